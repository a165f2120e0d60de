"""What the subcommands return: small objects with a plain and a rich form.

The rich form is a table of escaped text: nothing that a model or a user wrote is markup. The
tree's report is the widgets' own.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_jupyter.notebook.markdown import plain
from mlx_jupyter.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_jupyter.cache.forgetting import Removed
    from mlx_jupyter.engine.engine import Engine
    from mlx_jupyter.engine.keeping import Receipt, Restored
    from mlx_jupyter.engine.status import Status
    from mlx_jupyter.engine.storage import StoreUse
    from mlx_jupyter.models.info import ModelInfo

_TO_KEEP = "%config LLMMagics.store = True keeps them, from the next engine on."
_TO_CLEAR = "%llm store clear removes all of it; saved conversations stay."
_CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"


@dataclass(frozen=True, slots=True)
class Report:
    """A titled table of texts.

    Attributes:
        title: one line above it; may be empty.
        head: column titles; empty for name and value pairs.
        rows: its cells.
        note: lines below it.
        data: what it was made from, for programs.
    """

    title: str = ""
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    data: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        lines = [self.title] if self.title else []
        lines += _columns([*([self.head] if self.head else []), *self.rows])
        lines += [self.note] if self.note else []
        return plain("\n".join(lines))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…" if cycle else repr(self))

    def _repr_html_(self) -> str:
        parts = [f"<div>{_escape(self.title)}</div>"] if self.title else []
        if self.rows:
            head = "".join(f'<th style="{_CELL}">{_escape(h)}</th>' for h in self.head)
            body = "".join(
                "<tr>" + "".join(f'<td style="{_CELL}">{_escape(c)}</td>' for c in row) + "</tr>"
                for row in self.rows
            )
            top = f"<thead><tr>{head}</tr></thead>" if head else ""
            parts.append(f"<table>{top}<tbody>{body}</tbody></table>")
        parts += [f"<div>{_escape(line)}</div>" for line in self.note.splitlines()]
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Page:
    """Text that is shown as it is, such as help or a plan.

    Attributes:
        text: its lines.
        data: what it was made from, for programs.
    """

    text: str
    data: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        return plain(self.text)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…" if cycle else repr(self))


def models(loaded: Sequence[ModelInfo], aliases: Iterable[str]) -> Report:
    """``%llm models``."""
    rows = tuple(
        (
            f"{info.name}{' (current)' if i == 0 else ''}",
            info.family,
            f"{info.parameters / 1e6:,.0f} M",
            info.dtype,
            human_bytes(info.weight_bytes),
            f"{info.context:,} tokens",
        )
        for i, info in enumerate(loaded)
    )
    known = ", ".join(sorted(aliases))
    note = f"%llm load takes {known}, " if known else "%llm load takes "
    return Report(
        title="" if rows else "No model is loaded.",
        head=("model", "family", "weights", "type", "memory", "context") if rows else (),
        rows=rows,
        note=note + "a directory, a GGUF file or a Hugging Face id.",
        data=tuple(loaded),
    )


def status(now: Status) -> Report:
    """``%llm status``."""
    from mlx_jupyter.notebook.memory_reports import memory_rows

    rows: list[tuple[str, str]] = []
    for i, info in enumerate(now.models):
        rows.append(
            (
                "model" if i == 0 else "also loaded",
                f"{info.name}: {info.family}, {info.parameters / 1e6:,.0f} M weights, {info.dtype}",
            )
        )
    if not now.models:
        rows.append(("model", "none yet; the first prompt loads the default one"))
    if now.context:
        rows.append(("context", _context(now)))
    rows += [
        *memory_rows(now),
        ("on disk", _on_disk(now.store)),
        ("device", f"{now.device}; BLAS: {_blas(now)}"),
        ("requests", f"{now.requests:,} ended, {now.waiting:,} waiting or running"),
    ]
    return Report(rows=tuple(rows), note=now.blas.hint, data=now)


def _context(now: Status) -> str:
    """The limit in force, and what the others would allow."""
    rest = "".join(f"; {each.tokens:,} by {each.origin}" for each in now.limits[1:])
    return f"{now.context:,} tokens, set by {now.context_origin}{rest}"


def _on_disk(store: StoreUse) -> str:
    if store.place is None:
        return "off: cached tokens end with the kernel"
    return f"{human_bytes(store.nbytes)} of {human_bytes(store.budget)} in {store.place}"


def store(use: StoreUse) -> Report:
    """``%llm store``."""
    if use.place is None:
        title = "Nothing is kept on disk: cached tokens end with the kernel."
        return Report(title=title, note=_TO_KEEP, data=use)
    rows = [
        ("place", str(use.place)),
        ("bytes", f"{human_bytes(use.nbytes)} of {human_bytes(use.budget)}"),
        ("files", f"{use.files:,}"),
        *((f"model {name}", human_bytes(nbytes)) for name, nbytes in use.models.items()),
        ("last fault", use.fault or "none"),
    ]
    return Report(rows=tuple(rows), note=_TO_CLEAR if use.files else "", data=use)


def cleared(nbytes: int, use: StoreUse) -> str:
    """``%llm store clear``."""
    if use.place is None:
        return "Nothing is kept on disk, so there is nothing to remove."
    return f"{human_bytes(nbytes)} are removed from {use.place}."


def saved(branch: str, receipt: Receipt) -> str:
    """``%llm save @branch``."""
    turns = "1 turn" if receipt.turns == 1 else f"{receipt.turns:,} turns"
    pages = f", {receipt.tokens:,} cached tokens" if receipt.tokens else ""
    line = f"@{branch} is saved: {turns}{pages}, {human_bytes(receipt.nbytes)}, in {receipt.path}."
    return line + (f" Without cached tokens: {receipt.why}." if receipt.why else "")


def restored(found: Restored) -> str:
    """``%llm restore @branch``."""
    turns = "1 turn" if found.turns == 1 else f"{found.turns:,} turns"
    line = f"@{found.name} is back: {turns}"
    if found.why and not found.cached:
        return f"{line}. Its tokens will be computed again: {found.why}."
    line += f", {found.cached:,} of {found.tokens:,} tokens cached"
    if found.why:
        return f"{line} here already; {found.why}."
    return f"{line}, for this conversation alone." if found.lent else f"{line}."


def removed(branch: str, gone: Removed) -> str:
    """``%llm forget @branch``."""
    return (
        f"@{branch} is removed for good: {gone.tokens:,} tokens, {human_bytes(gone.memory)} in "
        f"memory, {human_bytes(gone.disk)} on disk."
    )


def _blas(now: Status) -> str:
    return now.blas.library or now.blas.state


def pinned(name: str, engine: Engine, *, on: bool) -> Page:
    """``%llm pin NAME`` and ``%llm unpin NAME``.

    Raises:
        BadRequest: no such model is loaded, or it isn't pinned.
    """
    if not on:
        engine.unpin(name)
        return Page(f"{name} may be sent away for another model again.", name)
    held = engine.pin(name)
    return Page(f"{name} is pinned: its {human_bytes(held)} stay, whatever else is loaded.", held)


def overview(now: Status, branches: Sequence[str]) -> Page:
    """A bare ``%llm``: where one stands and what to try."""
    model = now.models[0].name if now.models else "none yet (the first prompt loads the default)"
    used = now.memory.weights + now.memory.live + now.memory.stored
    lines = [
        f"Model: {model} · memory: {human_bytes(used)} · "
        + (f"branches: {', '.join('@' + b for b in branches)}" if branches else "no branches yet"),
        "",
        "Try   %llm what is love?            a prompt on one line",
        "      %%llm @chat                   a conversation; the prompt is on the lines below",
        "      %llm status · %llm tree       what is in memory · what is cached",
        "      %llm pages                    where each page of it is",
        "      %llm help                     everything else",
    ]
    return Page("\n".join(lines), now)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with their columns aligned; the last one keeps its line breaks, indented."""
    if not rows:
        return []
    count = max(len(row) for row in rows)
    widths = [
        max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(count - 1)
    ]
    lines = []
    for row in rows:
        front = "".join(cell.ljust(width + 2) for cell, width in zip(row, widths, strict=False))
        last = row[-1] if len(row) == count else ""
        lines.append((front + last.replace("\n", "\n" + " " * len(front))).rstrip())
    return lines


def _escape(text: str) -> str:
    return html.escape(plain(text), quote=True)
