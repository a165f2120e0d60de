"""Decoded text for the nodes of a tree, remembered per edge: decoding 100k tokens takes a while."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_jupyter.cache.view import NodeView, TreeView


class Labels:
    """Fills ``NodeView.text``."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], str] = {}

    def fill(self, view: TreeView, tokenizer: Any | None) -> TreeView:
        """The view with every node's text; unchanged without a tokenizer."""
        if tokenizer is None:
            return view
        order = list(view.nodes())
        known: dict[tuple[str, int, int, int], str] = {}
        made: dict[int, NodeView] = {}
        for node in reversed(order):  # children first: the nodes are frozen
            key = (view.model, node.id, node.start, node.end)
            text = self._known.get(key)
            if text is None:
                text = tokenizer.decode(node.tokens.tolist())
            known[key] = text
            made[node.id] = replace(
                node, text=text, children=tuple(made[c.id] for c in node.children)
            )
        others = {key: text for key, text in self._known.items() if key[0] != view.model}
        self._known = others | known
        root = replace(view.root, children=tuple(made[c.id] for c in view.root.children))
        return replace(view, root=root)
