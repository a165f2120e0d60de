"""What a magic returns for a picture: the form that fits where it is shown.

A live widget alone doesn't survive: a trusted notebook that is reopened without widget state shows
"model not found" and ignores the bundle's HTML. So a report puts its static form into the output by
itself, and the widget beside it; while the widget is alive it stands in for the picture.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

Bundle = tuple[dict[str, Any], dict[str, Any]]


class Report(ABC):
    """A moment, shown in the way that fits where it is shown.

    In a terminal it is text. In a notebook it is the live widget, with the static form as an output
    of its own that stays in the saved file.
    """

    @abstractmethod
    def text(self, width: int = 100) -> str:
        """The moment as text, no line wider than ``width`` terminal cells."""

    @abstractmethod
    def html(self) -> str:
        """The moment as a picture, which any viewer can show without a kernel."""

    @abstractmethod
    def live(self) -> Bundle:
        """The MIME bundle of a live widget alone."""

    def __repr__(self) -> str:
        return self.text(shutil.get_terminal_size((100, 24)).columns)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}

    def _ipython_display_(self) -> None:
        if not widgets_wanted():
            raise NotImplementedError  # IPython goes on to the bundle above
        display(self._repr_mimebundle_(), raw=True)  # type: ignore[no-untyped-call]
        data, metadata = self.live()
        display(data, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def widgets_wanted() -> bool:
    """Whether the output goes to a kernel's front end, and live widgets aren't turned off.

    ``MLX_JUPYTER_WIDGETS=off`` keeps them out of notebooks that are executed for publication.
    """
    if os.environ.get("MLX_JUPYTER_WIDGETS", "").lower() in {"off", "0", "no"}:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
