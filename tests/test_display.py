"""A request on the screen: a ticket fed by hand, a front end that writes down what it is sent."""

import signal
import threading
from types import SimpleNamespace

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher

from mlx_jupyter.cache.plan import Cause, Plan
from mlx_jupyter.conversation.answer import Answer
from mlx_jupyter.engine.request import Done, Loading, Prefill, Request, Tail, Ticket, Token
from mlx_jupyter.engine.stats import Timing, Usage
from mlx_jupyter.notebook import display
from mlx_jupyter.notebook.footer import duration, footer, plan_line
from mlx_jupyter.notebook.interrupt import Interrupts


@pytest.fixture(autouse=True)
def no_echo():
    """No handler is left from an interrupted test."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


class FrontEnd:
    """Keeps every message, and the output as a saved notebook would have it."""

    def __init__(self):
        self.messages = []
        self.outputs = {}

    def publish(self, data, metadata=None, *, transient=None, update=False):
        key = transient["display_id"]
        assert update == (key in self.outputs)
        self.messages.append((dict(data), update))
        self.outputs[key] = dict(data)


@pytest.fixture
def notebook():
    return SimpleNamespace(kernel=object(), display_pub=FrontEnd())


def tokens(*texts):
    return [Token(i, text, -0.1) for i, text in enumerate(texts)]


ANSWER = Answer("Hello <b>", (1, 2), (0,), "stop")


def test_notebook_replaces_progress_by_text_by_markdown(notebook):
    screen = display.screen_for(notebook, "md")
    screen.show([Prefill(512, 840, 128)])
    screen.show(tokens("Hello ", "<b>"))
    screen.finish("Hello <b>", "read 3 tokens")
    (saved,) = notebook.display_pub.outputs.values()
    texts = [data["text/plain"] for data, _ in notebook.display_pub.messages]
    assert texts[0] == "Reading the prompt: 512 of 840 tokens (128 reused)"
    assert texts[1] == "Hello <b>"
    assert saved == {
        "text/plain": "Hello <b>\n\nread 3 tokens",
        "text/markdown": "Hello &lt;b>\n\n*read 3 tokens*",
    }


def test_views(notebook):
    for view, wanted in (
        ("text", {"text/plain": "Hello <b>\n\nf"}),
        ("tokens", {"text/plain": "Hello │<b>\n\nf"}),
    ):
        notebook.display_pub = FrontEnd()
        screen = display.screen_for(notebook, view)
        screen.show(tokens("Hello ", "<b>"))
        screen.finish("Hello <b>", "f")
        assert list(notebook.display_pub.outputs.values()) == [wanted]
    notebook.display_pub = FrontEnd()
    screen = display.screen_for(notebook, "none")
    screen.show(tokens("x"))
    screen.finish("x", "f")
    assert notebook.display_pub.messages == []


def test_a_tail_belongs_to_the_last_token(notebook, capsys):
    events = [*tokens("Hello ", "<b"), Tail(">")]
    for view, wanted in (("text", "Hello <b>"), ("tokens", "Hello │<b>")):
        notebook.display_pub = FrontEnd()
        screen = display.screen_for(notebook, view)
        screen.show(events)
        screen.finish("Hello <b>", "")
        assert list(notebook.display_pub.outputs.values()) == [{"text/plain": wanted}]
        terminal = display.Terminal(view)
        terminal.show(events[:1])
        terminal.show(events[1:])
        terminal.finish("Hello <b>", "")
        assert capsys.readouterr().out == wanted + "\n"


def test_nothing_is_published_before_there_is_something(notebook):
    screen = display.screen_for(notebook, "md")
    screen.show([])
    screen.show(tokens(""))
    screen.fail()
    assert notebook.display_pub.messages == []


def test_failure_keeps_the_text_and_takes_progress_away(notebook):
    screen = display.screen_for(notebook, "md")
    screen.show([Loading("Fetching m", 1, 4)])
    screen.fail()
    screen = display.screen_for(notebook, "md")
    screen.show(tokens("half"))
    screen.fail()
    first, second = notebook.display_pub.outputs.values()
    assert first["text/plain"] == ""
    assert second["text/plain"] == "half"
    assert notebook.display_pub.messages[0][0]["text/plain"] == "Fetching m: 25 %"


def test_long_texts_are_sent_less_often(notebook, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(display.time, "monotonic", lambda: clock.now)
    screen = display.screen_for(notebook, "md")
    sent = 0
    for _ in range(1000):  # 50 s at 20 batches a second
        screen.show(tokens("word " * 20))
        clock.now += 0.05
    sent = sum(len(data["text/plain"]) for data, _ in notebook.display_pub.messages)
    assert sent < 50 * 250_000


def test_captured_output_gets_the_final_form_only():
    publisher = CapturingDisplayPublisher()
    shell = SimpleNamespace(kernel=object(), display_pub=publisher)
    screen = display.screen_for(shell, "md")
    screen.show([Prefill(1, 2, 0), *tokens("a")])
    assert publisher.outputs == []
    screen.finish("a", "")
    assert [output["data"]["text/plain"] for output in publisher.outputs] == ["a"]


def terminal(view):
    return display.screen_for(SimpleNamespace(display_pub=None), view)


def test_terminal_prints_text_only(capsys):
    """Case 41."""
    screen = terminal("md")
    screen.show([Loading("Loading m", 0, 2), Loading("Loading m", 1, 2), Prefill(1, 2, 0)])
    screen.show(tokens("**He", "llo** \x1b[31m"))
    screen.finish("**Hello** \x1b[31m!", "read 2 tokens")
    assert capsys.readouterr().out == "Loading m…\n**Hello** ␛[31m!\n\n[read 2 tokens]\n"


def test_terminal_views(capsys):
    screen = terminal("tokens")
    screen.show(tokens("a"))
    screen.show(tokens("b", "c\n"))
    screen.finish("abc\n", "")
    assert capsys.readouterr().out == "a│b│c\n"
    screen = terminal("none")
    screen.show(tokens("x"))
    screen.finish("x", "f")
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------- footer


def answer(**changes):
    made = {
        "text": "x",
        "tokens": tuple(range(128)),
        "prompt_ids": (1,),
        "finish": "stop",
        "usage": Usage(812, 28, 128),
        "timing": Timing(ttft=0.2, decode=127 / 45, decoded=127, restore=0.01),
    }
    return Answer(**{**made, **changes})


def test_footer_in_words():
    assert footer(answer(), rate=90.0) == (
        "reused 812 of 840 tokens (saved 9 s) · 128 tokens at 45/s · first after 0.2 s"
    )
    assert footer(answer()).startswith("reused 812 of 840 tokens · ")
    assert footer(answer(usage=Usage(0, 1, 1), tokens=(1,), timing=Timing(ttft=0.04))) == (
        "read 1 token · 1 token · first after 40 ms"
    )
    assert footer(answer(finish="length")).endswith("cut at the token limit")
    cut = Answer("ab", (1, 2), (), "cancelled")
    assert footer(cut) == "interrupted · 2 tokens"


def test_footer_says_why():
    why = (
        Cause("seed", "one token starts the answer", 1, 800),
        Cause("diverged", "the second message differs", 300, 500),
        Cause("evicted", "their rows were given up", 40, 100),
        Cause("snapshot", "no snapshot", 3, 20),
    )
    assert footer(answer(why=why)).endswith("40 tokens read again: their rows were given up")
    told = footer(answer(why=why), continued=True)
    assert told.endswith("300 tokens read again: the second message differs")
    assert "again" not in footer(answer(why=why[:1]))


def test_plan_line():
    plan = Plan(10, 4, 3, 3, (Cause("seed", "one token starts the answer", 1, 9),))
    assert plan_line(plan) == (
        "10 tokens: 4 stay in place, 3 are read back, 3 are computed\n"
        "  1: one token starts the answer"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0001, "1 ms"),
        (0.04, "40 ms"),
        (0.2, "0.2 s"),
        (3.0, "3 s"),
        (9.96, "10 s"),
        (200, "3 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------ interrupts


def test_follow_ends_with_the_job():
    ticket = Ticket(Request(text="x"))
    done = Done(ANSWER)

    def work():
        for token in tokens("a", "b", "c"):
            ticket.emit(token)
        ticket.emit(done)

    thread = threading.Thread(target=work)
    thread.start()
    with Interrupts() as interrupts:
        events = [event for batch in interrupts.follow(ticket) for event in batch]
    thread.join()
    assert events == [*tokens("a", "b", "c"), done]
    assert interrupts.count == 0


def test_interrupt_while_waiting_comes_back_without_an_exception():
    ticket = Ticket(Request(text="x"))
    ticket.emit(Prefill(1, 2, 0))
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        seen = []
        for batch in interrupts.follow(ticket):
            seen += batch
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # a second one is only counted
    assert seen == [Prefill(1, 2, 0)]
    assert interrupts.count == 2
    signal.raise_signal(signal.SIGINT)  # one that comes a moment later is let go
    with Interrupts() as later:
        pass
    assert later.count == 0
    assert signal.getsignal(signal.SIGINT) is before
    ticket.emit(Done(ANSWER))  # the reader ends


def test_interrupt_wakes_a_wait_without_events():
    ticket = Ticket(Request(text="x"))
    main = threading.main_thread()
    waiting = threading.Event()

    def press():
        waiting.wait(10)
        signal.pthread_kill(main.ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with Interrupts() as interrupts:
        waiting.set()
        assert list(interrupts.follow(ticket)) == []
    thread.join()
    assert interrupts.count == 1
    ticket.emit(Done(ANSWER))


def test_after_the_grace_an_interrupt_is_an_interrupt(monkeypatch):
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr("mlx_jupyter.notebook.interrupt.time.monotonic", lambda: clock.now)
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        signal.raise_signal(signal.SIGINT)
    clock.now += 1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_someone_who_insists_gets_the_exception(monkeypatch):
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr("mlx_jupyter.notebook.interrupt.time.monotonic", lambda: clock.now)
    with pytest.raises(KeyboardInterrupt), Interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        clock.now += 3
        signal.raise_signal(signal.SIGINT)


def test_other_threads_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with Interrupts() as interrupts:
            seen.append(signal.getsignal(signal.SIGINT))
            seen.append(interrupts.count)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, 0]
