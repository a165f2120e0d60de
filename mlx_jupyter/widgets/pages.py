"""The pages widget, and what ``%llm pages`` returns."""

from __future__ import annotations

import contextvars
import pathlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_jupyter.errors import EngineClosed, LLMError
from mlx_jupyter.widgets.live import LiveWidget
from mlx_jupyter.widgets.pages_data import pages_json, preview_json
from mlx_jupyter.widgets.pages_forms import pages_html, pages_text
from mlx_jupyter.widgets.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_jupyter.engine.engine import Engine
    from mlx_jupyter.widgets.pages_data import PagesJson
    from mlx_jupyter.widgets.report import Bundle

_STATIC = pathlib.Path(__file__).parent / "static"


class PagesView(LiveWidget):
    """Every page of the current model's cache, by conversation and by where it is, live.

    It shows memory over time too, and takes a new budget: first it shows what would go.

    Args:
        engine: whose; the view doesn't keep it alive.
    """

    _esm: ClassVar[pathlib.Path] = _STATIC / "pages.js"
    _css: ClassVar[pathlib.Path] = _STATIC / "pages.css"

    def __init__(self, engine: Engine, *, picture: str = "", **kwargs: Any) -> None:
        self._engine = weakref.ref(engine)
        self._last = read(engine)
        self._questions = Questions(self._answer, self.send)
        super().__init__(self._read, self._watch, picture, **kwargs)

    def asked(self, content: Mapping[str, Any]) -> None:
        """A view asks what a budget would do, or for it to be set."""
        match content:
            case {"type": "preview" | "apply", "budget": int(budget), "ask": int()} if budget >= 0:
                self._questions.put(content)

    def _read(self) -> PagesJson:
        engine = self._engine()
        if engine is not None:
            self._last = read(engine)
        return self._last

    def _watch(self, told: Callable[[], None]) -> Callable[[], None]:
        engine = self._engine()
        return engine.watch(told) if engine is not None else lambda: None

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        engine = self._engine()
        if engine is None:
            raise EngineClosed
        budget = question["budget"]
        if question["type"] == "preview":
            return preview_json(engine.preview(budget))
        return {"budget": budget, "freed": engine.set_budget(budget)}

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        data, metadata = self.live_bundle()
        now = self._read()
        return {**data, "text/plain": pages_text(now), "text/html": pages_html(now)}, metadata


class Questions:
    """Answers questions one after the other on a thread that lives as long as there are some.

    An answer may have to wait for a request to end. Of several previews that wait only the last is
    answered.

    Args:
        answer: gives the answer's fields; may wait.
        send: sends a message.
    """

    def __init__(
        self,
        answer: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self._answer = answer
        self._send = send
        self._waiting: list[Mapping[str, Any]] = []
        self._busy = False
        self._gate = threading.Lock()

    def put(self, question: Mapping[str, Any]) -> None:
        """Ask; returns at once."""
        with self._gate:
            if self._waiting and self._waiting[-1]["type"] == question["type"] == "preview":
                self._waiting.pop()
            self._waiting.append(question)
            if self._busy:
                return
            self._busy = True
        work = contextvars.copy_context().run
        threading.Thread(target=work, args=(self._run,), name="mlx-view-ask", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._gate:
                if not self._waiting:
                    self._busy = False
                    return
                question = self._waiting.pop(0)
            said = {"type": question["type"], "ask": question["ask"]}
            try:
                self._send({**said, **self._answer(question)})
            except LLMError as error:
                self._send({**said, "fault": str(error)})


class PagesReport(Report):
    """A moment of an engine's pages and memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.data = read(engine)

    def text(self, width: int = 100) -> str:
        """The pages as text."""
        return pages_text(self.data, width=width)

    def html(self) -> str:
        """The pages as a picture."""
        return pages_html(self.data)

    def live(self) -> Bundle:
        """A live view of them."""
        return PagesView(self._engine, picture=self.data["alt"]).live_bundle()


def read(engine: Engine) -> PagesJson:
    """An engine's pages and memory now; waits for no request."""
    return pages_json(engine.tree(), engine.status(), engine.history())


def pages_report(engine: Engine) -> PagesReport:
    """What ``%llm pages`` returns."""
    return PagesReport(engine)
