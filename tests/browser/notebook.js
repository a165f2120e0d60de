(path) => {
  // Runs inside the page: `window.drive` talks to the application's own objects and commands.
  const app = window.jupyterapp;
  const ends = new Map();

  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

  // What is being waited for, for the message when the time is up.
  let waiting = "";

  async function until(what, check) {
    waiting = what;
    while (!check()) await pause(20);
  }

  function panel() {
    for (const widget of app.shell.widgets("main")) {
      if (widget.context?.path === path && widget.content?.model?.cells) return widget;
    }
    return undefined;
  }

  const cell = (index) => panel().content.widgets[index];
  const kernel = () => panel().sessionContext.session?.kernel;

  window.drive = {
    // Every call from outside has a limit: a dialog that nobody answers would block for ever.
    async call(name, args, timeout) {
      waiting = name;
      const late = pause(timeout).then(() => {
        const dialog = document.querySelector(".jp-Dialog")?.innerText ?? "none";
        throw new Error(`${name}: ${timeout} ms are up, waiting for ${waiting}; dialog: ${dialog}`);
      });
      return await Promise.race([window.drive[name](...args), late]);
    },

    async ready() {
      await until("the notebook's panel", panel);
      waiting = "the document";
      await panel().context.ready;
      waiting = "the session";
      await panel().sessionContext.ready;
      await until("a kernel", kernel);
      waiting = "the kernel's info";
      await kernel().info;
      await until(
        "an idle kernel",
        () => kernel()?.connectionStatus === "connected" && kernel().status === "idle",
      );
    },

    start(index) {
      panel().content.activeCellIndex = index;
      panel().content.deselectAll();
      ends.set(index, app.commands.execute("notebook:run-cell"));
    },

    async wait(index) {
      await ends.get(index);
      // The command's promise may be there before the last output is drawn.
      await new Promise(requestAnimationFrame);
      return !window.drive.outputs(index).some((output) => output.output_type === "error");
    },

    insert(source) {
      const { content } = panel();
      const index = content.model.cells.length;
      content.model.sharedModel.insertCell(index, { cell_type: "code", source });
      return index;
    },

    count: () => panel().content.model.cells.length,

    sources: () =>
      panel().content.widgets.map(({ model }) =>
        model.type === "code" ? model.sharedModel.getSource() : "",
      ),

    outputs: (index) => cell(index).model.outputs?.toJSON() ?? [],

    text: (index) => cell(index).outputArea?.node.innerText ?? "",

    interrupt: () => kernel().interrupt(),

    async restart() {
      await kernel().restart();
    },

    end: () => panel().sessionContext.shutdown(),

    save: () => panel().context.save(),

    async show(index) {
      await panel().content.scrollToItem(index);
      cell(index).node.scrollIntoView({ block: "start" });
      await new Promise(requestAnimationFrame);
    },
  };
};
