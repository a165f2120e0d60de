"""Records traces of three notebook sessions on the default model, for ``retention.py``.

    python benchmarks/record_traces.py [--out DIR] [--model NAME]

The sessions run through the engine and the tree of turns, as cells do: a rerun replaces its turn,
an answer's own ids come back in the next prompt. Answers are cut short to save time; ``--scale``
of ``retention.py`` makes a trace as long as a large model's conversations.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_jupyter.cache.trace import TraceWriter
from mlx_jupyter.conversation.conversation import Conversation, turns_of
from mlx_jupyter.conversation.turns import Call
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.models.template import render

if TYPE_CHECKING:
    from collections.abc import Callable

TRACES = Path(__file__).parent / "traces"

LESSON = """You help the pupils of a ninth form with their physics notebook. Answer in short \
sentences. Use SI units. Never give a final number before you have written the formula.

The unit is about motion. A body that moves with constant velocity covers equal distances in \
equal times: s = v t. With constant acceleration the velocity grows by equal amounts in equal \
times: v = v0 + a t, and the distance is s = v0 t + a t^2 / 2. From both follows \
v^2 = v0^2 + 2 a s, which has no time in it and is handy when only places are known.

The experiment: a cart runs down a track of 2.4 m. A gate every 40 cm notes the time. The pupils \
measured 0.90 s, 1.27 s, 1.55 s, 1.79 s, 2.00 s and 2.19 s. The track is tilted by 5.8 degrees. \
A second group put 200 g on the cart and measured the same times within 0.02 s. A third group \
used a felt mat: 1.10 s, 1.56 s, 1.91 s, 2.20 s, 2.46 s and 2.70 s.

What often goes wrong: pupils divide the whole distance by the whole time and call it the final \
velocity. They forget that the first gate is not where the cart starts. They mix centimetres and \
metres. They think that a heavier cart must be faster. They draw a straight line through points \
that lie on a parabola. When you see one of these, ask a question that lets them find it out.

Marks are given for a sketch, for units in every line, for a sentence that says what the result \
means, and for an estimate of the error. A wrong number with a right way loses one point only.
"""

EXPLAIN = [
    "What does the table of times say about the motion of the cart? Begin with what you can see.",
    "How do I get the acceleration from the first and the last gate?",
    "The third group used a felt mat. Which formula shows the force of friction?",
    "Write one sentence that says what the difference between both accelerations means.",
    "How large is the error if each gate is off by two millimetres?",
    "Give me a question for the test that checks exactly this point.",
]
QUIZ = [
    "Ask me one question about the formula v^2 = v0^2 + 2 a s. Wait for my answer.",
    "I think that the velocity at the end is 2.4 m divided by 2.19 s.",
    "Because the cart starts from rest? Then it would be twice as much.",
    "So 2.19 m/s. How does that fit with the gates?",
    "Ask me a harder one, about the mass on the cart.",
]
REPORT = [
    "Write the heading and the first sentence of my lab report on the tilted track.",
    "Now the list of what was used, one line each: cart, track, gates, mat, 200 g mass.",
    "Add the results of the first group as a table in Markdown.",
    "Add two sentences on the errors.",
    "Shorten the whole report to five lines for the notice board.",
]

REVIEW = """You read reviews of a bicycle shop and put them in order. For each review give: the \
mood (good, mixed, bad), the part of the shop that it is about (sale, repair, web shop, hire), and \
one short reason in the words of the customer.

Review 1: The repair took two days longer than they said, but the gears run better than new.
Review 2: Ordered lights on Monday, had them on Tuesday. The box was far too large, though.
Review 3: We hired four bicycles for the island. One had a flat tyre after an hour and nobody \
answered the telephone. We walked home.
Review 4: The young man let me try five saddles and didn't sell me the dearest one. I'll be back.
Review 5: My order was split into three parcels, each with its own fee. Never again.
Review 6: They found a crack in the fork that two other shops had missed. Thank you.
Review 7: Friendly, but the brakes squeaked again after a week.
Review 8: The web shop showed my size, the shop didn't have it, and the refund took a month.

Answer with one line for each review, in this form: number, mood, part, reason.
"""

NOTES = """These are notes for a talk on the harbour of a small town. The harbour was dug in 1846 \
for grain. The railway came in 1871 and left in 1962. Of eleven cranes two are left; one is a \
café. In winter the water freezes from the north side first. The town wants to build flats on the \
east quay; the fishers fear for their moorings. A report of 2019 counts 214 boats, 61 of them \
used for work. The lock is 9.1 m wide, too narrow for the new ferries.
"""

STORY = """We write a radio play for four voices together. The voices are Ada, who repairs clocks; \
Bruno, her brother, who sells maps of places that aren't there; the Captain, who hasn't left the \
harbour for nine years; and a Parrot that only repeats the last word. It rains all the time. \
Every scene has at most six lines. Nobody may say what they really want.
"""


class Session:
    """Runs cells on an engine and writes each request down."""

    def __init__(self, engine: Engine, writer: TraceWriter, name: str) -> None:
        self._engine, self._writer, self._name = engine, writer, name
        self._runs = itertools.count()
        self._tree = turns_of(engine)

    def chat(self, name: str, system: str | None = None) -> Conversation:
        """A conversation of this session."""
        return Conversation(self._engine, f"{self._name}-{name}", system)

    def cell(self, chat: Conversation, cell: str, text: str, tokens: int = 16) -> None:
        """Run a cell: a new cell appends, a known one replaces its turn."""
        call = Call(self._name, cell, 0, str(next(self._runs)))
        self._tree.caller = lambda: call
        answer = chat.ask(text, max_tokens=tokens, temperature=0.8, seed=next(self._runs))
        loaded = self._engine._shop.find(None)
        assert loaded is not None
        rendered = render(loaded.tokenizer, answer.messages[:-1])
        assert rendered.ids == answer.prompt_ids
        self._writer.request(
            answer.prompt_ids, answer.tokens, f"{self._name}@{chat.name}", rendered.marks
        )
        print(f"{self._name} {cell}: {answer.usage.prompt} + {len(answer.tokens)}", flush=True)


def teacher(session: Session) -> None:
    """Three conversations share a long system text; one is edited and rerun to the end."""
    parts = {"explain": EXPLAIN, "quiz": QUIZ, "report": REPORT}
    chats = {name: session.chat(name, LESSON) for name in parts}
    for name, texts in parts.items():
        for i, text in enumerate(texts):
            session.cell(chats[name], f"{name}{i}", text)
    edited = [EXPLAIN[0], EXPLAIN[1] + " Use the second gate instead of the first.", *EXPLAIN[2:]]
    for i in range(1, len(edited)):
        session.cell(chats["explain"], f"explain{i}", edited[i])
    session.cell(chats["quiz"], "quiz5", "One more, about the units.")
    for name, texts in parts.items():  # top to bottom
        for i, text in enumerate(edited if name == "explain" else texts):
            session.cell(chats[name], f"{name}{i}", text)
    session.cell(chats["report"], "report5", "Translate the heading into French.")
    session.cell(chats["explain"], "explain6", "And a hint for those who are stuck.")


def prompts(session: Session) -> None:
    """One prompt edited fifteen times, with retries; another one beside it."""
    chat, other = session.chat("review"), session.chat("mail")
    text = REVIEW
    edits: list[Callable[[str], str]] = [
        lambda t: t + "Don't write anything else.\n",
        lambda t: t + "Begin at once with number 1.\n",
        lambda t: t.replace("one short reason", "a reason of at most five words"),
        lambda t: t + "If two parts fit, name both.\n",
        lambda t: t.replace("Review 5: My order", "Review 5: The order"),
        lambda t: t + "Number, then a colon.\n",
        lambda t: t.replace("good, mixed, bad", "glad, mixed, cross"),
        lambda t: t.replace("Number, then a colon.\n", "Number, then a bar.\n"),
        lambda t: t + "Review 6 is about a repair.\n",
        lambda t: "Take your time. " + t,
        lambda t: t.replace("Review 8: The web shop", "Review 8: Their web shop"),
        lambda t: t + "Write in lower case.\n",
        lambda t: t.removeprefix("Take your time. "),
        lambda t: t.replace("Write in lower case.\n", ""),
        lambda t: t + "Leave no line out.\n",
    ]
    session.cell(chat, "draft", text)
    for n, edit in enumerate(edits):
        text = edit(text)
        session.cell(chat, "draft", text)
        if n % 3 == 1:
            session.cell(chat, "draft", text)
        if n % 5 == 3:
            session.cell(other, f"mail{n}", f"Write a kind answer to review {n}. " + NOTES)
    session.cell(chat, "check", "Is review 7 good or mixed? Say why in one sentence.")
    session.cell(chat, "check", "Is review 2 good or mixed? Say why in one sentence.")
    session.cell(chat, "more", "Now count the moods.")


def forks(talk: Session, play: Session) -> None:
    """Two notebooks take turns; one of them forks its conversation at several places."""
    notes, scenes = talk.chat("talk", NOTES), play.chat("play", STORY)
    for i, text in enumerate(
        [
            "Give me an opening sentence that an old fisher would like.",
            "Which three facts should be on the first slide?",
            "Make the second one shorter.",
            "What would the builders of the flats answer to that?",
        ]
    ):
        talk.cell(notes, f"t{i}", text)
        play.cell(scenes, f"p{i}", f"Write line {i + 1} of the first scene. Keep it short.", 24)
    brief = notes.fork("talk-brief", 2)
    talk.cell(brief, "b0", "Do it all in sixty words instead.")
    play.cell(scenes, "p4", "Let Bruno sell a map to the Parrot.", 24)
    sad, glad = scenes.fork("play-sad", 1), scenes.fork("play-glad", 1)
    for i in range(3):
        play.cell(sad, f"s{i}", f"Scene {i + 2}, sad: the Captain sees a ship.", 24)
        play.cell(glad, f"g{i}", f"Scene {i + 2}, glad: the clock runs backwards.", 24)
        talk.cell(brief, f"b{i + 1}", f"Cut sentence {i + 1}.")
    talk.cell(notes, "t4", "A closing sentence, please.")
    play.cell(scenes, "p3", "Write line 4 of the first scene as a question.", 24)
    play.cell(scenes, "p4", "Let Bruno sell a map to the Parrot.", 24)
    talk.cell(notes, "t1", "Which four facts should be on the first slide?")
    talk.cell(notes, "t2", "Make the second one shorter.")
    talk.cell(notes, "t3", "What would the builders of the flats answer to that?")
    play.cell(sad, "s3", "The last scene. It stops raining.", 24)
    talk.cell(brief, "b4", "Read it aloud: mark the pauses.")


def main() -> None:
    """Record all three."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--out", type=Path, default=TRACES)
    options.add_argument("--model", default="smollm2-135m")
    given = options.parse_args()
    given.out.mkdir(exist_ok=True)
    with Engine(store=False) as engine:
        engine.load(given.model)
        for name in ("teacher", "prompts", "forks"):
            path = given.out / f"{name}.jsonl"
            with TraceWriter(path) as writer:
                if name == "teacher":
                    teacher(Session(engine, writer, "teacher"))
                elif name == "prompts":
                    prompts(Session(engine, writer, "prompts"))
                else:
                    forks(Session(engine, writer, "talk"), Session(engine, writer, "play"))
            pack(path)


def pack(path: Path) -> None:
    """Gzip a file, the same bytes every time, and remove it."""
    with (
        path.open("rb") as plain,
        path.with_name(path.name + ".gz").open("wb") as packed,
        gzip.GzipFile("", "wb", 9, packed, mtime=0) as target,
    ):
        shutil.copyfileobj(plain, target)
    path.unlink()


if __name__ == "__main__":
    main()
