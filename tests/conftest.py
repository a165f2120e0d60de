"""Fixtures that all tests share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from mlx_jupyter import blas

settings.register_profile("mlx-jupyter", deadline=None)  # no test asserts a speed
settings.load_profile("mlx-jupyter")

os.environ["MLX_JUPYTER_STORE"] = "off"  # every test starts cold, unless it is about the store

blas.ensure()  # before any test module imports mlx

if TYPE_CHECKING:
    from pathlib import Path

ORDINARY_HOME = ("real", "kernel", "browser")
"""Markers of tests that use the ordinary cache directory, so that the model is fetched once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers a file's tests stay together, and so do all that drive a browser."""
    for item in items:
        together = "browser" if item.get_closest_marker("browser") else item.path.name
        item.add_marker(pytest.mark.xdist_group(together))


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """The embedded default model as an MLX directory, in the ordinary cache directory."""
    from mlx_jupyter.models import sources

    return sources.resolve(sources.DEFAULT_MODEL).path


@pytest.fixture(autouse=True)
def isolated_home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    """A cache directory of its own for each test that doesn't share the real model's."""
    if any(request.node.get_closest_marker(name) for name in ORDINARY_HOME):
        return None
    home = tmp_path / "mlx-jupyter-home"
    monkeypatch.setenv("MLX_JUPYTER_HOME", str(home))
    return home


@pytest.fixture
def model():
    """A fake model of two full layers; its ``before_call`` may be set."""
    from fakes import FakeModel

    return FakeModel()


@pytest.fixture
def engine(model):
    """An engine on the fake model, closed at the end."""
    from fakes import fake_engine

    with fake_engine(model) as made:
        yield made


@pytest.fixture
def shell(engine, tmp_path, monkeypatch):
    """A shell of this process with the extension loaded, around the test's ``engine``."""
    from IPython.core.interactiveshell import InteractiveShell

    from mlx_jupyter import runtime

    monkeypatch.chdir(tmp_path)
    made = InteractiveShell()
    made.history_manager.enabled = False
    made.run_line_magic("load_ext", "mlx_jupyter")
    yield made
    made.run_line_magic("unload_ext", "mlx_jupyter")
    runtime.watch(None)


@pytest.fixture
def run(shell):
    """Run a cell that has to succeed; its result."""

    def run(cell):
        result = shell.run_cell(cell, store_history=True)
        assert result.success, result.error_before_exec or result.error_in_exec
        return result.result

    return run
