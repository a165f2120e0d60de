"""Shows a request in its cell while it runs, and the answer when it ends.

In a notebook the cell's output is one ordinary display that is updated: progress, then text, then
Markdown with the footer. Nothing but that last form is saved, so a file, nbconvert and GitHub show
what was on the screen. A terminal gets the text as it comes and nothing else. Captured output
(``%%capture``) gets the final form only. ``view`` none shows nothing anywhere.
"""

from __future__ import annotations

import sys
import time
import uuid
from typing import TYPE_CHECKING, Protocol

from IPython.core.displaypub import CapturingDisplayPublisher

from mlx_jupyter.engine.request import Loading, Prefill, Tail, Token
from mlx_jupyter.notebook.markdown import plain, safe_markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from mlx_jupyter.engine.request import Event
    from mlx_jupyter.notebook.commands import View

# The growing text is sent whole: long texts less often, to stay far below the server's limit of
# a megabyte a second.
BYTES_PER_SECOND = 200_000
BOUNDARY = "\u2502"  # between two tokens in the tokens view

Bundle = dict[str, str]


class Screen(Protocol):
    """Where a request is shown."""

    def show(self, events: Sequence[Event]) -> None:
        """Show what is new."""
        ...

    def finish(self, text: str, footer: str) -> None:
        """Show the final form: the whole text with its footer."""
        ...

    def fail(self) -> None:
        """The request failed: keep the text that is there, take progress away."""
        ...


def screen_for(shell: InteractiveShell, view: View) -> Screen:
    """The screen that suits the shell and the view."""
    if view == "none":
        return Silent()
    if isinstance(shell.display_pub, CapturingDisplayPublisher):
        return Captured(shell, view)
    if in_kernel(shell):
        return Notebook(shell, view)
    return Terminal(view)


def in_kernel(shell: InteractiveShell) -> bool:
    """Whether outputs go to a front end that understands display messages."""
    return getattr(shell, "kernel", None) is not None


def bundle(text: str, footer: str, view: View = "md") -> Bundle:
    """The final form as MIME types."""
    shown = plain(text)
    data = {"text/plain": f"{shown}\n\n{footer}".strip() if footer else shown}
    if view == "md":
        body = safe_markdown(text)
        data["text/markdown"] = f"{body}\n\n*{_emphasised(footer)}*" if footer else body
    return data


def progress(event: Loading | Prefill) -> str:
    """One line about work that comes before the first token."""
    if isinstance(event, Prefill):
        reused = f" ({event.cached:,} reused)" if event.cached else ""
        return f"Reading the prompt: {event.done:,} of {event.total:,} tokens{reused}"
    if not event.total:
        return event.text
    share = f"{100 * event.done // event.total} %"
    return f"{event.text}: {share}" if event.done <= event.total else event.text


class Silent:
    """Shows nothing."""

    def show(self, events: Sequence[Event]) -> None:
        """Nothing."""

    def finish(self, text: str, footer: str) -> None:
        """Nothing."""

    def fail(self) -> None:
        """Nothing."""


class Collecting:
    """Keeps the pieces of text as they come, one for each token."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.pieces: list[str] = []
        self.progress = ""

    def take(self, events: Sequence[Event]) -> str:
        """Remember the events; what they add to the shown text."""
        new = ""
        for event in events:
            if isinstance(event, Loading | Prefill):
                self.progress = progress(event)
            elif isinstance(event, Token | Tail):
                new += self._piece(event)
        return new

    def _piece(self, event: Token | Tail) -> str:
        """Keep a piece; what it adds to the text. A tail belongs to the token before it."""
        bounded = self.view == "tokens" and isinstance(event, Token) and bool(self.pieces)
        if isinstance(event, Token) or not self.pieces:
            self.pieces.append(event.text)
        else:
            self.pieces[-1] += event.text
        return BOUNDARY * bounded + event.text

    def text(self, whole: str | None = None) -> str:
        """What to show: the answer's own text, or its tokens with visible boundaries."""
        if self.view == "tokens":
            return BOUNDARY.join(self.pieces)
        return "".join(self.pieces) if whole is None else whole


class Notebook(Collecting):
    """One display that is updated in place."""

    def __init__(self, shell: InteractiveShell, view: View) -> None:
        super().__init__(view)
        self._shell = shell
        self._id = uuid.uuid4().hex
        self._shown: Bundle | None = None
        self._next = 0.0

    def show(self, events: Sequence[Event]) -> None:
        """Send the text so far, or progress while there is none."""
        self.take(events)
        text = self.text()
        if not text and not self.progress:
            return
        now = time.monotonic()
        if text and now < self._next:
            return
        self._next = now + len(text) / BYTES_PER_SECOND
        self._publish({"text/plain": plain(text) if text else self.progress})

    def finish(self, text: str, footer: str) -> None:
        """Replace it by the final form."""
        self._publish(bundle(self.text(text), footer, self.view))

    def fail(self) -> None:
        """Leave the text, or an empty output where progress was."""
        if self._shown is not None or self.text():
            self._publish(bundle(self.text(), "", self.view))

    def _publish(self, data: Bundle) -> None:
        if data == self._shown:
            return
        self._shell.display_pub.publish(
            data, {}, transient={"display_id": self._id}, update=self._shown is not None
        )
        self._shown = data


class Captured(Collecting):
    """One display at the end."""

    def __init__(self, shell: InteractiveShell, view: View) -> None:
        super().__init__(view)
        self._shell = shell

    def show(self, events: Sequence[Event]) -> None:
        """Wait for the end."""
        self.take(events)

    def finish(self, text: str, footer: str) -> None:
        """The final form."""
        self._shell.display_pub.publish(bundle(self.text(text), footer, self.view), {})

    def fail(self) -> None:
        """The text that came before the failure."""
        if self.pieces:
            self.finish("".join(self.pieces), "")


class Terminal(Collecting):
    """Plain text on standard output as it comes: no colours, no cursor movements."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._loading = ""
        self._ends_line = True

    def show(self, events: Sequence[Event]) -> None:
        """Write what is new. Of a load, only its beginning is told."""
        for event in events:
            if isinstance(event, Loading) and event.text != self._loading:
                self._loading = event.text
                self._write(f"{event.text}…\n")
        self._write(self.take(events))

    def finish(self, text: str, footer: str) -> None:
        """Write what is missing of the text, then the footer on a line of its own."""
        written = "".join(self.pieces)
        if self.view != "tokens" and text.startswith(written):
            self._write(text[len(written) :])
        self._end_line()
        if footer:
            self._write(f"\n[{footer}]\n" if text else f"[{footer}]\n")

    def fail(self) -> None:
        """End the line that was begun."""
        self._end_line()

    def _end_line(self) -> None:
        if not self._ends_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(plain(text))
            sys.stdout.flush()
            self._ends_line = text.endswith("\n")


def _emphasised(footer: str) -> str:
    """The footer as text inside ``*…*``: nothing in it is Markdown."""
    safe = safe_markdown(" ".join(footer.split()))
    return safe.replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
