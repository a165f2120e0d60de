"""Views of the engine: anywidget Python halves and static forms.

Everything here reads immutable descriptions (``cache/view.py``, ``cache/plan.py``) and never the
cache itself. Importing this package loads no widget library; the views are fetched when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_jupyter.widgets.pages import PagesView as PagesView
    from mlx_jupyter.widgets.trie import TrieView as TrieView

__all__ = ["PagesView", "TrieView"]


def __getattr__(name: str) -> object:
    if name == "PagesView":
        from mlx_jupyter.widgets.pages import PagesView

        return PagesView
    if name == "TrieView":
        from mlx_jupyter.widgets.trie import TrieView

        return TrieView
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
