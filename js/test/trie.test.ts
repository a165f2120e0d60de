import { afterEach, beforeEach, describe, expect, it } from "vitest";
import { bytes, label } from "../src/lib/format";
import type { Snapshot } from "../src/lib/model";
import widget from "../src/trie";
import { byTestId, demo, MockModel, settle } from "./helpers";

let el: HTMLElement;
let cleanup: (() => void) | undefined;

beforeEach(() => {
  el = document.body.appendChild(document.createElement("div"));
});

afterEach(() => {
  cleanup?.();
  cleanup = undefined;
  document.body.replaceChildren();
});

async function show(snapshot: unknown, signal?: AbortSignal): Promise<MockModel> {
  const model = new MockModel({ snapshot });
  cleanup = widget.render(signal ? { model, el, signal } : { model, el });
  await settle();
  return model;
}

const tree = () => byTestId(el, "trie-tree")[0] as HTMLElement;
const detail = () => byTestId(el, "trie-detail")[0]?.textContent ?? "";
const chosen = () => el.querySelector('[aria-selected="true"]')?.getAttribute("data-node-id");

async function press(key: string, init: KeyboardEventInit = {}): Promise<KeyboardEvent> {
  const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...init });
  tree().dispatchEvent(event);
  await settle();
  return event;
}

describe("rendering", () => {
  it("draws every node as a tree item with level, place and a spoken label", async () => {
    await show(demo);
    const items = byTestId(el, "trie-node");
    expect(items).toHaveLength(demo.nodes.length);
    for (const item of items) {
      expect(item.getAttribute("role")).toBe("treeitem");
      expect(Number(item.getAttribute("aria-level"))).toBeGreaterThan(0);
      expect(item.getAttribute("aria-label")).toMatch(/tokens? from/);
    }
    const root = items[0] as HTMLElement;
    expect(root.getAttribute("aria-label")).toContain("212 live");
    expect(root.getAttribute("aria-label")).toContain("active path");
    expect(el.querySelectorAll('[data-active="true"]')).toHaveLength(5);
  });

  it("shows residences, marks, owners, figures and a legend of what is there", async () => {
    await show(demo);
    const document = el.querySelector('[data-node-id="5"]') as HTMLElement;
    expect(document.querySelectorAll(".mj-run").length).toBe(5);
    expect(document.querySelector(".mj-run.mj-disk")).not.toBeNull();
    expect(byTestId(el, "trie-mark").map((m) => m.dataset.kind)).toContain("tip");
    expect(byTestId(el, "trie-owner").map((o) => o.textContent)).toContain("@demo, In [11]");
    expect(byTestId(el, "trie-summary")[0]?.textContent).toContain("5,325 of 6,051 tokens held");
    const legend = byTestId(el, "trie-legend")[0]?.textContent ?? "";
    for (const word of [
      "live",
      "device",
      "host",
      "disk",
      "gone",
      "active path",
      "system snapshot",
    ]) {
      expect(legend).toContain(word);
    }
  });

  it("says what to do when there is nothing", async () => {
    await show({ ...demo, nodes: [] });
    expect(byTestId(el, "trie-empty")[0]?.textContent).toContain("%%llm");
    expect(byTestId(el, "trie-tree")).toHaveLength(0);
  });

  it("survives a snapshot without any field", async () => {
    await show({});
    expect(byTestId(el, "trie-empty")).toHaveLength(1);
  });

  it("never turns a model's output into markup", async () => {
    const text = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&amp;';
    const nodes = [{ ...(demo.nodes[0] as object), text, owners: [text], tail: text }];
    await show({ ...demo, model: text, alt: text, nodes } as unknown as Snapshot);
    byTestId(el, "trie-node")[0]?.click();
    await settle();
    expect(el.querySelector("img, script")).toBeNull();
    expect(byTestId(el, "trie-node")[0]?.textContent).toContain(text);
    expect(detail()).toContain(text);
    expect((window as unknown as { hacked?: number }).hacked).toBeUndefined();
  });

  it("keeps only what is in sight in the document", async () => {
    const nodes = Array.from({ length: 3000 }, (_, i) => ({
      id: i + 1,
      parent: 0,
      start: 0,
      end: 100 + i,
      text: `branch ${i}`,
      uses: 1,
      used: i,
      runs: [[0, 100 + i, "device", 1]],
    }));
    await show({ ...demo, nodes });
    expect(byTestId(el, "trie-node").length).toBeLessThan(100);
    await press("End");
    expect(chosen()).toBe("3000");
  });
});

describe("selection", () => {
  it("follows a click and tells about the node", async () => {
    await show(demo);
    expect(detail()).toContain("Click a box");
    (el.querySelector('[data-node-id="5"]') as HTMLElement).click();
    await settle();
    expect(chosen()).toBe("5");
    expect(detail()).toContain("Here is a contract");
    expect(detail()).toContain("[212, 4,608) · 4,396");
    expect(detail()).toContain("3,884 of 4,396: 1,068 device, 1,792 host, 1,024 disk, 512 gone");
    expect(detail()).toContain("3 requests ago");
    expect(detail()).toContain("Sum it up in three lines.");
  });

  it("follows the arrow keys and names the active item", async () => {
    await show(demo);
    expect(tree().tabIndex).toBe(0);
    const event = await press("ArrowDown");
    expect(event.defaultPrevented).toBe(true);
    expect(chosen()).toBe("1");
    await press("ArrowRight");
    expect(chosen()).toBe("2");
    const id = tree().getAttribute("aria-activedescendant") ?? "";
    expect(el.querySelector(`#${id}`)?.getAttribute("data-node-id")).toBe("2");
    await press("ArrowDown");
    expect(chosen()).toBe("5");
    await press("ArrowLeft");
    expect(chosen()).toBe("1");
    await press("Escape");
    expect(chosen()).toBeUndefined();
  });

  it("leaves other keys and the browser's shortcuts alone", async () => {
    await show(demo);
    expect((await press("a")).defaultPrevented).toBe(false);
    expect((await press("ArrowDown", { ctrlKey: true })).defaultPrevented).toBe(false);
    expect((await press("Tab")).defaultPrevented).toBe(false);
  });

  it("stays on a node over updates and ends with it", async () => {
    const model = await show(demo);
    (el.querySelector('[data-node-id="12"]') as HTMLElement).click();
    await settle();
    model.set("snapshot", { ...demo, version: 43 });
    await settle();
    expect(chosen()).toBe("12");
    model.set("snapshot", { ...demo, nodes: demo.nodes.filter((node) => node.id !== 12) });
    await settle();
    expect(chosen()).toBeUndefined();
    expect(detail()).toContain("Click a box");
  });
});

describe("zoom", () => {
  const width = () => Number.parseFloat(tree().style.width);

  it("goes by keys and buttons and back to fit", async () => {
    await show(demo);
    const fit = width();
    const [out] = byTestId(el, "trie-zoom-out") as HTMLButtonElement[];
    expect(out?.disabled).toBe(true);
    await press("+");
    expect(width()).toBeGreaterThan(fit * 1.3);
    byTestId(el, "trie-zoom-in")[0]?.click();
    await settle();
    expect(width()).toBeGreaterThan(fit * 2);
    expect(out?.disabled).toBe(false);
    byTestId(el, "trie-zoom-fit")[0]?.click();
    await settle();
    expect(width()).toBeCloseTo(fit, 3);
  });

  it("goes to the selection with Enter", async () => {
    await show(demo);
    const fit = width();
    await press("ArrowDown");
    await press("Enter");
    expect(width()).toBeGreaterThan(fit * 2);
    await press("0");
    expect(width()).toBeCloseTo(fit, 3);
  });

  it("takes the wheel only with Ctrl or ⌘, so that the notebook still scrolls", async () => {
    await show(demo);
    const fit = width();
    const wheel = (init: WheelEventInit) => {
      const event = new WheelEvent("wheel", {
        deltaY: -200,
        bubbles: true,
        cancelable: true,
        ...init,
      });
      // happy-dom drops the modifier keys of wheel events
      Object.defineProperty(event, "ctrlKey", { value: init.ctrlKey ?? false });
      byTestId(el, "trie-viewport")[0]?.dispatchEvent(event);
      return event;
    };
    expect(wheel({}).defaultPrevented).toBe(false);
    await settle();
    expect(width()).toBeCloseTo(fit, 3);
    expect(wheel({ ctrlKey: true }).defaultPrevented).toBe(true);
    await settle();
    expect(width()).toBeGreaterThan(fit * 1.5);
  });
});

describe("life of a view", () => {
  it("draws again on a change, and cleans up", async () => {
    const model = await show(demo);
    model.set("snapshot", { ...demo, model: "another" });
    await settle();
    expect(byTestId(el, "trie-summary")[0]?.textContent).toContain("another");
    cleanup?.();
    expect(el.childElementCount).toBe(0);
    expect(model.listeners.get("change:snapshot")?.size).toBe(0);
    cleanup?.();
  });

  it("cleans up on the abort signal", async () => {
    const controller = new AbortController();
    const model = await show(demo, controller.signal);
    controller.abort();
    expect(el.childElementCount).toBe(0);
    expect(model.listeners.get("change:snapshot")?.size).toBe(0);
  });

  it("gives two views of one model ids of their own", async () => {
    const model = await show(demo);
    const second = document.body.appendChild(document.createElement("div"));
    const end = widget.render({ model, el: second });
    await settle();
    const ids = [...document.querySelectorAll("[role=treeitem]")].map((item) => item.id);
    expect(new Set(ids).size).toBe(2 * demo.nodes.length);
    end();
  });

  it("stands in for its own picture in the same cell, and gives it back", async () => {
    const area = document.body.appendChild(document.createElement("div"));
    for (const alt of ["a plot of mine", demo.alt, ""]) {
      const output = area.appendChild(document.createElement("div"));
      output.className = "jp-OutputArea-child";
      const image = document.createElement("img");
      image.alt = alt;
      output.append(alt ? image : el);
    }
    const [plot, picture] = [...area.children] as HTMLElement[];
    await show(demo);
    expect(picture?.style.display).toBe("none");
    expect(plot?.style.display).toBe("");
    cleanup?.();
    expect(picture?.style.display).toBe("");
  });
});

describe("format", () => {
  it("writes bytes with three digits", () => {
    const given = [0, 999, 1000, 9_400_000, 14_249_999, 999_600, 1e9, 5e15];
    expect(given.map(bytes)).toEqual([
      "0 B",
      "999 B",
      "1.00 kB",
      "9.40 MB",
      "14.2 MB",
      "1.00 MB",
      "1.00 GB",
      "5000 TB",
    ]);
  });

  it("shortens control tokens and writes roles as in a play", () => {
    expect(label("<|im_end|>↵<|im_start|>user↵Hi<b>")).toBe("▪user: Hi<b>");
    expect(label("<end_of_turn>↵<start_of_turn>model↵")).toBe("▪model:");
    expect(label("a < b |> c")).toBe("a < b |> c");
    expect(label("")).toBe("(no text)");
  });
});
