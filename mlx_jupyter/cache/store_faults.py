"""What went wrong with the store: counted, and told once of each kind in a process.

A store that fails costs time, never a result, so that a notebook is told of it and no more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger(__name__)

Kind = Literal["directory", "damaged", "unreadable", "full", "bug"]

_told: set[str] = set()


@dataclass(slots=True)
class Faults:
    """How often something went wrong, and what it was last.

    Attributes:
        count: faults so far.
        last: the latest one, in one line; ``""`` without any.
    """

    count: int = 0
    last: str = ""

    def note(self, kind: Kind, message: str) -> None:
        """Count a fault; the first of its kind in this process is logged as a warning."""
        self.count += 1
        self.last = message
        log.log(logging.DEBUG if kind in _told else logging.WARNING, "%s", message)
        _told.add(kind)
