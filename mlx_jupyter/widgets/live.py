"""Live documents: what a widget shows, kept up to date in every view of it that is open.

A document is one JSON object without nulls. A front end that asks for a widget's state, also after
a reload, gets the whole of it in a trait. Changes follow as numbered messages: JSON merge patches
(RFC 7386), at most one in 50 ms, and only while a view is open. A view that misses a number asks
for the whole document.

The engine's thread only leaves a note that something changed. The document is read, compared and
sent by a thread that lives as long as a view is open.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_jupyter.widgets.report import Bundle

log = logging.getLogger(__name__)

INTERVAL = 0.05
"""Seconds between two messages: the eye sees no difference, the wire does."""

LEASE = 150.0
"""Seconds that a view counts as open after it was last heard of: a page that was closed or loaded
again says nothing. Views speak up every 30 s; a browser may stretch that where nobody looks."""


class Feed:
    """Sends a document's changes to whoever has a view of it open. Any thread.

    Args:
        read: gives the document now.
        send: sends a message to all views.
        watch: calls what it is given after each change, until the function it returns is called.
        interval: seconds between two messages.
        lease: seconds that a view counts as open without being heard of.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, Any]],
        send: Callable[[dict[str, Any]], None],
        watch: Callable[[Callable[[], None]], Callable[[], None]],
        *,
        interval: float = INTERVAL,
        lease: float = LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._send = send
        self._watch = watch
        self._interval = interval
        self._lease = lease
        self._clock = clock
        self._document: Mapping[str, Any] = {}
        self._number = 0
        self._views: dict[str, float] = {}
        self._note = threading.Event()
        self._gate = threading.RLock()
        self._thread: threading.Thread | None = None

    @property
    def views(self) -> int:
        """How many views are open."""
        return len(self._views)

    def changed(self) -> None:
        """The document may have changed; only leaves a note."""
        self._note.set()

    def whole(self) -> dict[str, Any]:
        """The document with its number, as a message holds it."""
        with self._gate:
            if not self._views:  # else the views would miss what is new
                self._advance()
            return {"number": self._number, "document": self._document}

    def open(self, view: str, number: int = -1) -> None:
        """A view is open, or still is.

        Args:
            view: its name.
            number: of the document that it has.
        """
        with self._gate:
            self._views[view] = self._clock() + self._lease
            if number != self._number:
                self.resend()
            if self._thread is None:
                self._note.set()  # it changed, maybe, while nobody looked
                work = contextvars.copy_context().run
                self._thread = threading.Thread(
                    target=work, args=(self._run,), name="mlx-view", daemon=True
                )
                self._thread.start()

    def close(self, view: str) -> None:
        """A view is gone."""
        with self._gate:
            self._views.pop(view, None)
        self._note.set()

    def resend(self) -> None:
        """Send the whole document."""
        with self._gate:
            self._send({"type": "whole", **self.whole()})

    def flush(self) -> None:
        """Send what changed since the last message, if anything did."""
        with self._gate:
            patch = self._advance()
            if patch:
                self._send({"type": "patch", "number": self._number, "patch": patch})

    def _advance(self) -> dict[str, Any]:
        """Read the document; how it differs from before."""
        try:
            now = self._read()
        except Exception:
            log.warning("a live view couldn't be brought up to date", exc_info=True)
            return {}
        patch = difference(self._document, now)
        if patch:
            self._document = now
            self._number += 1
        return patch

    def _run(self) -> None:
        stop = self._watch(self.changed)
        try:
            while True:
                self._note.wait(self._lease)
                with self._gate:
                    now = self._clock()
                    self._views = {v: until for v, until in self._views.items() if until > now}
                    if not self._views:
                        self._thread = None
                        return
                if self._note.is_set():
                    self._note.clear()
                    self.flush()
                    time.sleep(self._interval)  # what comes meanwhile goes together
        finally:
            stop()


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that makes ``new`` of ``old``."""
    patch: dict[str, Any] = dict.fromkeys(key for key in old if key not in new)
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := difference(before, value):
                patch[key] = inner
        elif before != value:
            patch[key] = value
    return patch


class LiveWidget(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget has no types
    """A widget that shows a live document.

    Attributes:
        snapshot: the document with its number, filled in whenever a front end asks for it.
        picture: the alternative text of the static picture that a view stands in for.

    Args:
        read: as ``Feed``'s.
        watch: as ``Feed``'s.
        picture: see above.
    """

    snapshot = traitlets.Dict().tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        read: Callable[[], Mapping[str, Any]],
        watch: Callable[[Callable[[], None]], Callable[[], None]],
        picture: str = "",
        **kwargs: Any,
    ) -> None:
        self.feed = Feed(read, self.send, watch)
        super().__init__(picture=picture, **kwargs)
        self.on_msg(self._heard)
        # ipykernel sends a comm's messages to the shell that last used it, mostly the busy main
        # one; a front end's own choice, a subshell, can answer while a cell runs.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, default: default  # noqa: SLF001

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The traits for a front end, the document as it is now among them."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "snapshot" in state:
            state["snapshot"] = self.feed.whole()
        return state

    def live_bundle(self) -> Bundle:
        """The MIME bundle of the widget alone, for an output beside its static form."""
        data, metadata = super()._repr_mimebundle_()
        data["text/plain"] = "(a live view; it needs a running kernel)"
        return data, metadata

    def asked(self, content: Mapping[str, Any]) -> None:
        """A view asks for something of the widget's own; may neither wait nor compute."""

    def _heard(self, _widget: Any, content: Any, _buffers: Any) -> None:
        match content:
            case {"type": "open", "view": str(view), "number": int(number)}:
                self.feed.open(view, number)
            case {"type": "close", "view": str(view)}:
                self.feed.close(view)
            case {"type": "whole"}:
                self.feed.resend()
            case {"type": str()}:
                self.asked(content)
