"""The trie widget, and what ``%llm tree`` returns.

A live widget alone doesn't survive: a trusted notebook that is reopened without widget state shows
"model not found" and ignores the bundle's HTML. So a report puts its static form into the output by
itself, and the widget beside it; while the widget is alive it stands in for the picture.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display

from mlx_jupyter.widgets.forms import tree_html, tree_text
from mlx_jupyter.widgets.tree_data import tree_json

if TYPE_CHECKING:
    from mlx_jupyter.cache.view import TreeView

_STATIC = pathlib.Path(__file__).parent / "static"
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

Bundle = tuple[dict[str, Any], dict[str, Any]]


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


class TreeReport:
    """A moment of the prefix cache, shown in the way that fits where it is shown.

    In a terminal it is text. In a notebook it is the live widget, with the static form as an output
    of its own that stays in the saved file.
    """

    def __init__(self, view: TreeView) -> None:
        self.view = view

    def __repr__(self) -> str:
        return tree_text(self.view, width=shutil.get_terminal_size((100, 24)).columns)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return static_bundle(self.view)

    def _ipython_display_(self) -> None:
        if not widgets_wanted():
            raise NotImplementedError  # IPython goes on to the bundle above
        display(static_bundle(self.view), raw=True)  # type: ignore[no-untyped-call]
        data, metadata = TrieView(self.view).live_bundle()
        display(data, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def tree_report(view: TreeView) -> TreeReport:
    """What ``%llm tree`` returns."""
    return TreeReport(view)


def static_bundle(view: TreeView) -> dict[str, str]:
    """Text and picture, which any viewer can show without a kernel."""
    return {"text/plain": tree_text(view), "text/html": tree_html(view)}


def widgets_wanted() -> bool:
    """Whether the output goes to a kernel's front end, and live widgets aren't turned off.

    ``MLX_JUPYTER_WIDGETS=off`` keeps them out of notebooks that are executed for publication.
    """
    if os.environ.get("MLX_JUPYTER_WIDGETS", "").lower() in {"off", "0", "no"}:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
