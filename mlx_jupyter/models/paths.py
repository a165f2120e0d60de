"""Where converted models and stored pages live on disk."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MLX_JUPYTER_HOME"


def home() -> Path:
    """The package's cache directory: ``MLX_JUPYTER_HOME``, else the platform's place for caches."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("mlx-jupyter", appauthor=False))


def models() -> Path:
    """The directory that holds one MLX model directory per converted model."""
    return home() / "models"


def pages() -> Path:
    """The directory of the stored pages."""
    return home() / "pages"
