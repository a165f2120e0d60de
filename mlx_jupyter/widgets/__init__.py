"""Views of the engine: anywidget Python halves and static forms."""
