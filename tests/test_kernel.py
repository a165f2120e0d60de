"""The magics in real kernels, driven over the wire as front ends do it, with the fake model."""

import os
import pathlib
import random
import re
import subprocess
import sys
import textwrap
import time

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from jupyter_client.session import Session
from nbclient import NotebookClient

pytestmark = pytest.mark.kernel

TESTS = str(pathlib.Path(__file__).parent)
HANG = 60  # seconds; a guard, never waited for
SETUP = f"""
import sys, time
sys.path.insert(0, {TESTS!r})
import mlx_jupyter
from fakes import FakeModel, cold, fake_engine
pace = 0.0
model = FakeModel(before_call=lambda count: time.sleep(pace))
mlx_jupyter.runtime.set_engine(fake_engine(model))
%load_ext mlx_jupyter
"""


class Run:
    """What one execution sent, and its reply."""

    def __init__(self):
        self.messages = []
        self.reply = None

    def of(self, kind):
        return [content for name, content in self.messages if name == kind]

    @property
    def shown(self):
        """The outputs as a notebook would save them: display updates in place."""
        outputs, places = [], {}
        for name, content in self.messages:
            key = (content.get("transient") or {}).get("display_id")
            if name == "update_display_data":
                outputs[places[key]] = content["data"]
            elif name in {"display_data", "execute_result"}:
                if key is not None:
                    places[key] = len(outputs)
                outputs.append(content["data"])
        return outputs

    @property
    def text(self):
        """Everything printed or shown as plain text."""
        streams = [content["text"] for content in self.of("stream")]
        return "\n".join([*streams, *(data.get("text/plain", "") for data in self.shown)])


class Kernel:
    """A kernel with a client, or several."""

    def __init__(self):
        self.manager = KernelManager()
        environment = {**os.environ, "MLX_JUPYTER_WIDGETS": "off"}
        self.manager.start_kernel(env=environment, extra_arguments=["--colors=NoColor"])
        self.client = self.connect()

    def connect(self):
        # Each client has a session of its own, as front ends have.
        client = self.manager.client(session=Session(key=self.manager.session.key))
        client.start_channels()
        client.wait_for_ready(timeout=HANG)
        return client

    def send(self, code, cell=None, client=None):
        client = client or self.client
        content = {
            "code": textwrap.dedent(code) if code.startswith("\n") else code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        metadata = {"cellId": cell} if cell else {}
        message = client.session.msg("execute_request", content, metadata=metadata)
        client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def follow(self, message, client=None, until=None):
        """Collect until the kernel is idle again, or until ``until(run)``."""
        client = client or self.client
        run = Run()
        while True:
            got = client.get_iopub_msg(timeout=HANG)
            if got["parent_header"].get("msg_id") != message:
                continue
            kind, content = got["header"]["msg_type"], got["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            run.messages.append((kind, content))
            if until is not None and until(run):
                return run
        run.reply = self.reply(message, client)
        return run

    def reply(self, message, client=None):
        client = client or self.client
        while True:
            got = client.get_shell_msg(timeout=HANG)
            if got["parent_header"].get("msg_id") == message:
                return got["content"]

    def run(self, code, cell=None, client=None):
        """Run a cell that has to succeed."""
        run = self.follow(self.send(code, cell, client), client)
        assert run.reply["status"] == "ok", (run.reply, run.text)
        return run

    def value(self, expression, client=None):
        """A literal's value in the kernel."""
        import ast

        return ast.literal_eval(
            self.run(expression, client=client).of("execute_result")[0]["data"]["text/plain"]
        )

    def close(self):
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def started():
    kernel = Kernel()
    kernel.run(SETUP)
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(started):
    """The module's kernel with a new engine."""
    started.run(
        "pace = 0.0\nmlx_jupyter.runtime.engine().close()\n"
        "mlx_jupyter.runtime.set_engine(fake_engine(model))\n%reload_ext mlx_jupyter"
    )
    return started


# ---------------------------------------------------------------------------------------- display


def test_text_comes_before_the_end_and_markdown_at_the_end(kernel):
    """Cases 35 and 36."""
    kernel.run("pace = 0.002")
    run = kernel.run("%%llm -o r --max 150\nhello")
    (saved,) = run.shown
    sent = [
        c["data"]["text/plain"] for c in (*run.of("display_data"), *run.of("update_display_data"))
    ]
    text = kernel.value("r.text")
    partial = [each for each in sent if each and text.startswith(each) and each != text]
    assert partial
    assert len(sent) < 60  # batches, not tokens
    assert saved["text/markdown"].startswith(text)
    assert saved["text/plain"].startswith(text)
    assert run.of("execute_result") == run.of("stream") == []


def test_result_is_underscore_and_out(kernel):
    run = kernel.run("%llm --max 4 hello")
    number = run.reply["execution_count"]
    assert kernel.value("_.finish") == "length"
    assert kernel.value(f"Out[{number}].usage.generated") == 4


def test_view_none_sends_nothing(kernel):
    """Case 41."""
    run = kernel.run("%%llm --view none --max 4\nhello")
    assert {name for name, _ in run.messages} <= {"status", "execute_input"}


def test_markup_of_the_model_is_text(kernel):
    kernel.run("from mlx_jupyter.notebook import display\nimport types")
    run = kernel.run("""
        screen = display.screen_for(get_ipython(), "md")
        screen.finish("<img src=x onerror=alert(1)> **bold**", "")
    """)
    (saved,) = run.shown
    assert saved["text/markdown"] == "&lt;img src=x onerror=alert(1)> **bold**"


def test_capture(kernel):
    """Case 46: the final form once, nothing on the screen."""
    run = kernel.run("%%capture out\n%llm --max 4 -o r hello")
    assert run.shown == []
    assert kernel.value(
        "len(out.outputs), out.outputs[0].data['text/plain'].startswith(r.text)"
    ) == (1, True)


def test_subcommands(kernel):
    kernel.run("%llm --max 3 hello")
    (status,) = kernel.run("%llm status").shown
    assert "4,096 tokens" in status["text/plain"]
    assert "<table>" in status["text/html"]
    (tree,) = kernel.run("%llm tree").shown
    assert "hello" in tree["text/plain"]
    assert tree["text/html"].startswith("<img ")


def test_help(kernel):
    """Case 38."""
    assert "Ask the model" in kernel.run("%llm?").reply["payload"][0]["data"]["text/plain"]
    run = kernel.run("%llm --max 2 -o r what is love?")
    assert run.reply["payload"] == []
    assert kernel.value("r.messages[0].content") == "what is love?"


@pytest.mark.parametrize(
    ("cell", "prompt"),
    [
        ("%%llm -o r --max 1\n>>> a\n  In [1]: b;\n%c?\n", ">>> a\n  In [1]: b;\n%c?"),
        ("# note\n\n  %%llm -o r --max 1\n    a\n  b", "    a\n  b"),
        ("%%llm -o r --max 1\r\na\r\nb\r\n", "a\r\nb"),
        ("%%llm -o r --max 1\n🙂 e\u0301\n\n", "🙂 e\u0301\n"),
        ("%%llm -o r --max 1\n{v:k for k,v in d.items()} \\frac{1}{2} $x {% if %}",
         "{v:k for k,v in d.items()} \\frac{1}{2} $x {% if %}"),
    ],
)  # fmt: skip
def test_bodies(kernel, cell, prompt):
    """Cases 34 and 42."""
    kernel.run(cell)
    assert kernel.value("r.messages[0].content") == prompt


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("%%llm\n \n", "There is no prompt"),
        ("%llm --tmp 0 x", "Unknown option --tmp"),
        ("%llm {{nope}}", "there is no variable 'nope'"),
        ("%llm load no/such/model", "ModelNotFound"),
    ],
)
def test_errors_fail_the_cell_in_one_line(kernel, cell, told):
    """Case 37."""
    run = kernel.follow(kernel.send(cell))
    assert run.reply["status"] == "error"
    errors = [content["traceback"] for content in run.of("error")]
    lines = [*(line for each in errors for line in each), *(c["text"] for c in run.of("stream"))]
    assert len("".join(lines).strip().splitlines()) == 1
    assert told in lines[0]


# ---------------------------------------------------------------------------------- conversations


def questions(kernel, branch, client=None):
    turns = f"mlx_jupyter.Conversation(mlx_jupyter.engine(), {branch!r}).turns"
    return kernel.value(f"[t.question.content for t in {turns}]", client)


def test_rerunning_a_cell_replaces_its_turn(kernel):
    """Case 43."""
    kernel.run("%llm @c --max 2 one", cell="a")
    kernel.run("%llm @c --max 2 two", cell="b")
    for count in range(10):
        kernel.run(f"%llm @c --max 2 two again {count}", cell="b")
    assert questions(kernel, "c") == ["one", "two again 9"]
    kernel.run("%llm @c --max 2 ONE", cell="a")
    assert questions(kernel, "c") == ["ONE"]
    kernel.run("%llm @c --max 2 two", cell="b")
    assert questions(kernel, "c") == ["ONE", "two"]


def test_loop_makes_a_turn_each_and_a_rerun_replaces_them(kernel):
    """Case 45."""
    loop = "for q in {}:\n    %llm @c --max 2 -- {{{{q}}}}"
    kernel.run(loop.format(["a", "b", "c"]), cell="loop")
    assert questions(kernel, "c") == ["a", "b", "c"]
    kernel.run(loop.format(["x", "y"]), cell="loop")
    assert questions(kernel, "c") == ["x", "y"]


def test_a_second_notebook_does_not_overwrite_the_first(kernel):
    """Case 45: a copy has the same cell ids but another session."""
    kernel.run("%llm @c --max 2 one", cell="a")
    other = kernel.connect()
    try:
        kernel.run("%llm @c --max 2 two", cell="a", client=other)
        assert questions(kernel, "c", other) == ["one", "two"]
    finally:
        other.stop_channels()


def test_without_cell_ids_a_rerun_appends(kernel):
    kernel.run("%llm @c --max 2 one")
    kernel.run("%llm @c --max 2 one")
    assert questions(kernel, "c") == ["one", "one"]


def test_python_calls_belong_to_their_cell(kernel):
    ask = "mlx_jupyter.Conversation(mlx_jupyter.engine(), 'c').ask({!r}, max_tokens=2)"
    kernel.run(ask.format("one"), cell="a")
    kernel.run(ask.format("ONE"), cell="a")
    assert questions(kernel, "c") == ["ONE"]


# ------------------------------------------------------------------------------------- interrupts


def test_interrupt_keeps_the_partial_and_stops_the_queue(kernel):
    """Case 21."""
    kernel.run("pace = 0.005")
    first = kernel.send("%%llm @c -o r --max 2000\nhello", cell="a")
    second = kernel.send("ran = True")
    kernel.follow(first, until=lambda run: len(run.of("update_display_data")) >= 3)
    kernel.manager.interrupt_kernel()
    run = kernel.follow(first)
    assert run.reply["status"] == "error"
    assert run.reply["ename"] == "Cancelled"
    (error,) = run.of("error")
    assert error["traceback"] == ["Interrupted; the partial answer is kept."]
    assert kernel.reply(second)["status"] == "aborted"
    assert kernel.value("r.finish, 'ran' in globals()") == ("cancelled", False)
    last = run.of("update_display_data")[-1]["data"]
    text = kernel.value("r.text")
    assert text
    assert last["text/markdown"].startswith(f"{text}\n\n*interrupted")
    assert questions(kernel, "c") == ["hello"]


def test_interrupts_at_random_times(kernel):
    """Case 20: in the queue, in prefill, while decoding, during the teardown, twice in a row."""
    kernel.run("pace = 0.001")
    pick = random.Random(7)
    prompt = "word " * 100
    hit = 0
    for round_number in range(60):
        code = f"%%llm @c -o r --max 3000\n{prompt}{round_number % 7}"
        message = kernel.send(code, cell="a")
        # Before its first message a cell isn't ours yet: busy, execute_input, then the display.
        wanted = 2 + pick.choice([1, 1, 2, 3, 5])
        seen = kernel.follow(message, until=lambda run, n=wanted: len(run.messages) >= n)
        for _ in range(pick.choice([1, 1, 2, 3])):
            kernel.manager.interrupt_kernel()
        if seen.reply is None:
            seen = kernel.follow(message)
        assert seen.reply["status"] in {"ok", "error"}
        hit += seen.reply["status"] == "error"
    kernel.run("pace = 0.0\nmlx_jupyter.engine().check()")
    assert hit >= 55
    begun = time.monotonic()
    kernel.run("%llm -o r --max 20 --view none a plain question")
    assert time.monotonic() - begun < HANG
    kernel.run(
        "ids = list(r.prompt_ids)\nwanted = cold(model, ids, 20)\nmlx_jupyter.engine().check()"
    )
    assert kernel.value("list(r.tokens) == wanted")


def test_interrupts_in_every_phase(kernel):
    """Case 20: 50 signals in each phase of a cell's request; each next answer is as if cold."""
    kernel.run("import random\nfrom probes import PHASES, Gate, Probe")
    kernel.run("dice = random.Random(3)\nengine = mlx_jupyter.engine()\nprobe = Probe(model)")
    for number in range(200):
        phase = ("queue", "prefill", "decode", "teardown")[number % 4]
        kernel.run(f"prompt = '{number} ' + 'word ' * dice.randrange(40, 120)\ngate = Gate()")
        if phase == "queue":
            start = (
                "model.before_call = gate\n"
                "engine.submit(engine.request('ahead', max_tokens=2))\n"
                "gate.reached.wait(60)\n"
                "probe.when_queued(engine)"
            )
        else:
            left = {"prefill": "dice.randrange(2)", "decode": "dice.randrange(9)"}.get(phase, 0)
            start = f"probe.arm({phase!r}, {left})"
        message = kernel.send(f"{start}\n%llm -o r --max 20 --view none -- {{{{prompt}}}}")
        assert kernel.follow(message).reply["status"] in {"ok", "error"}
        kernel.run(
            "model.before_call = None\ngate.open.set()\nengine.check()\n"
            "after = engine.generate(prompt, max_tokens=3)\n"
            "assert list(after.tokens) == cold(model, after.prompt_ids, 3)\n"
            "model.before_call = probe.hook"
        )
    assert kernel.value("probe.hits") == dict.fromkeys(
        ("queue", "prefill", "decode", "teardown"), 50
    )


def test_interrupt_of_a_request_that_waits_behind_another(kernel):
    """Case 20, in the queue."""
    kernel.run("pace = 0.005")
    kernel.run(
        "engine = mlx_jupyter.engine()\n"
        "ahead = engine.submit(engine.request('first', max_tokens=3000))"
    )
    message = kernel.send("%llm -o r --max 3000 second")
    waiting = kernel.follow(message, until=lambda run: run.of("display_data"))
    assert waiting.text == "Waiting for 1 request ahead"
    kernel.manager.interrupt_kernel()
    run = kernel.follow(message)
    assert run.reply["status"] == "error"
    kernel.run(
        "going = not ahead.ended\nahead.cancel()\nahead.wait(60)\nmlx_jupyter.engine().check()"
    )
    assert kernel.value("going, ahead.outcome.answer.finish") == (True, "cancelled")


def test_run_all_of_twenty_cells(kernel):
    """Case 40."""
    messages = [kernel.send(f"%%llm @c --max 5\nquestion {i}", cell=f"q{i}") for i in range(20)]
    runs = [kernel.follow(message) for message in messages]
    assert [run.reply["status"] for run in runs] == ["ok"] * 20
    assert len(questions(kernel, "c")) == 20


# -------------------------------------------------------------------------- whole notebooks, exits


def test_fifty_cells_are_small_and_without_widgets(tmp_path):
    """Cases 39 and 46: executed by nbclient."""
    cells = [nbformat.v4.new_code_cell(SETUP)]
    cells += [
        nbformat.v4.new_code_cell(f"%%llm @c{i % 5} --max 100\nquestion {i}") for i in range(50)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=HANG, kernel_name="python3").execute(cwd=str(tmp_path))
    written = nbformat.writes(notebook)
    assert len(written) < 1_000_000
    assert "widgets" not in notebook.metadata
    assert "widget-view" not in written
    for cell in notebook.cells[1:]:
        (output,) = cell.outputs
        assert set(output.data) == {"text/plain", "text/markdown"}
        assert "100 tokens" in output.data["text/markdown"]


def test_papermill_runs_a_notebook_with_parameters(tmp_path):
    """Case 46."""
    import papermill

    cells = [
        nbformat.v4.new_code_cell("topic = 'nothing'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(SETUP),
        nbformat.v4.new_code_cell("%%llm @c -o r --max 4\nTell me about {{topic}}."),
        nbformat.v4.new_code_cell("print(r.messages[0].content)"),
    ]
    given, done = tmp_path / "given.ipynb", tmp_path / "done.ipynb"
    language = {"language_info": {"name": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=language), given)
    papermill.execute_notebook(
        given, done, {"topic": "rain"}, kernel_name="python3", progress_bar=False, cwd=tmp_path
    )
    executed = nbformat.read(done, as_version=4)
    assert executed.cells[-1].outputs[0].text == "Tell me about rain.\n"
    assert "4 tokens" in executed.cells[-2].outputs[0].data["text/markdown"]


def test_from_a_subshell_while_the_main_shell_is_busy(kernel):
    """Case 28."""
    client = kernel.client
    client.control_channel.send(client.session.msg("create_subshell_request"))
    subshell = client.get_control_msg(timeout=HANG)["content"]["subshell_id"]
    kernel.run("pace = 0.002")
    busy = kernel.send("%llm --max 300 -o main --view none the main shell is busy")
    content = {"code": "sub = mlx_jupyter.engine().generate('from a subshell', max_tokens=3)"}
    message = client.session.msg("execute_request", {**content, "silent": False})
    message["header"]["subshell_id"] = subshell
    client.shell_channel.send(message)
    replies = {}
    while len(replies) < 2:
        reply = client.get_shell_msg(timeout=HANG)
        replies[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
    assert replies == {busy: "ok", message["header"]["msg_id"]: "ok"}
    kernel.run("mlx_jupyter.engine().check()")
    assert kernel.value("main.usage.generated, sub.usage.generated") == (300, 3)


def test_extension_comes_and_goes(kernel):
    """Case 46."""
    kernel.run("%llm @c --max 2 one")
    kernel.run("%reload_ext mlx_jupyter\n%load_ext autoreload\n%autoreload 2")
    kernel.run("%llm @c --max 2 two")
    assert questions(kernel, "c") == ["one", "two"]
    kernel.run("%autoreload 0\n%unload_ext mlx_jupyter")
    run = kernel.follow(kernel.send("%llm hello"))
    assert run.reply["status"] == "error"
    kernel.run("%load_ext mlx_jupyter\n%llm @c --max 2 three")
    assert questions(kernel, "c") == ["one", "two", "three"]


def test_shutdown_in_the_middle_of_a_stream():
    """Case 46: the process ends with status 0."""
    kernel = Kernel()
    try:
        kernel.run(SETUP)
        kernel.run("pace = 0.005")
        message = kernel.send("%llm --max 3000 hello")
        kernel.follow(message, until=lambda run: len(run.of("update_display_data")) >= 2)
        process = kernel.manager.provisioner.process
        kernel.manager.shutdown_kernel(now=False)
        assert process.wait(HANG) == 0
    finally:
        if kernel.manager.is_alive():
            kernel.close()


def test_terminal():
    """Case 41: plain IPython prints text only."""
    script = SETUP + (
        "\n%llm --max 5 -o r hello\n%llm --max 5 hello?\n%llm --view none --max 5 hello\n"
        "print('<' + r.text + '>', _.text == r.text)\n"
        "%%llm --max 3 -o s\nfirst line\nsecond?\n\n\nprint(repr(s.messages[0].content))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        input=script,
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=TESTS,
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    text = re.search(r"<(.{5})> (\w+)", done.stdout)
    assert text.group(2) == "True"  # the silent one, which is in _
    assert done.stdout.count(text.group(1)) == 2  # shown once, printed once
    assert "Out[" not in done.stdout
    assert "'first line\\nsecond?" in done.stdout
