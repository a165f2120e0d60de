"""The trie widget, and what ``%llm tree`` returns."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import traitlets

from mlx_jupyter.widgets.forms import tree_html, tree_text
from mlx_jupyter.widgets.report import Report
from mlx_jupyter.widgets.tree_data import tree_json

if TYPE_CHECKING:
    from mlx_jupyter.cache.view import TreeView
    from mlx_jupyter.widgets.report import Bundle

_STATIC = pathlib.Path(__file__).parent / "static"


class TrieView(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget has no types
    """The prefix cache as an icicle: x = token position, one lane per branch.

    Attributes:
        snapshot: what is drawn, as ``tree_json`` gives it; replaced as a whole by ``update``.
    """

    _esm: ClassVar[pathlib.Path] = _STATIC / "trie.js"
    _css: ClassVar[pathlib.Path] = _STATIC / "trie.css"

    snapshot = traitlets.Dict().tag(sync=True)

    def __init__(self, view: TreeView, **kwargs: Any) -> None:
        self._view = view
        super().__init__(snapshot=dict(tree_json(view)), **kwargs)

    def update(self, view: TreeView) -> None:
        """Show another moment; one of the same model that isn't newer changes nothing."""
        if view.model == self._view.model and view.version <= self._view.version:
            return
        self._view = view
        self.snapshot = dict(tree_json(view))

    def live_bundle(self) -> Bundle:
        """The MIME bundle of the widget alone, for an output beside its static form."""
        data, metadata = super()._repr_mimebundle_()
        data["text/plain"] = "(a live view of the prefix cache; it needs a running kernel)"
        return data, metadata

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        data, metadata = super()._repr_mimebundle_()
        return {**data, **static_bundle(self._view)}, metadata


class TreeReport(Report):
    """A moment of the prefix cache."""

    def __init__(self, view: TreeView) -> None:
        self.view = view

    def text(self, width: int = 100) -> str:
        """The tree as text."""
        return tree_text(self.view, width=width)

    def html(self) -> str:
        """The tree as a picture."""
        return tree_html(self.view)

    def live(self) -> Bundle:
        """A live view of it."""
        return TrieView(self.view).live_bundle()


def tree_report(view: TreeView) -> TreeReport:
    """What ``%llm tree`` returns."""
    return TreeReport(view)


def static_bundle(view: TreeView) -> dict[str, str]:
    """Text and picture, which any viewer can show without a kernel."""
    return {"text/plain": tree_text(view), "text/html": tree_html(view)}
