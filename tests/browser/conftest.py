"""Servers and a browser for the tests in this directory.

Both live no longer than this directory's tests: Playwright keeps an event loop on the main
thread, which would be in the way of any other test that runs one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from browser.jupyter import Server

TESTS = Path(__file__).parent.parent
QUIET_CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this directory's tests and run them after all others: they are the slowest."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.browser)
    items.sort(key=lambda item: item in here)


@pytest.fixture(scope="package")
def chrome() -> Iterator[Browser]:
    """A headless Chromium; without one the tests are skipped unless they are required."""
    found = os.environ.get("MLX_JUPYTER_CHROMIUM") or shutil.which("chromium")
    if not found:
        why = "no Chromium (apt install chromium, or set MLX_JUPYTER_CHROMIUM)"
        if os.environ.get("MLX_JUPYTER_REQUIRE_BROWSER"):
            pytest.fail(why)
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=QUIET_CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def tab(chrome: Browser) -> Iterator[Page]:
    """A fresh page. Its own errors, those of our widgets' modules, fail the test."""
    context = chrome.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(error.stack or str(error)))
    yield page
    context.close()
    # The applications throw harmless ones of their own; a widget's module is loaded from a blob.
    ours = [error for error in errors if "blob:" in error]
    assert not ours, "\n".join(ours)


def _server(app: str, directory: Path) -> Iterator[Server]:
    from browser.jupyter import Server

    # Kernels find the fake model beside the tests.
    server = Server(app, directory, {"PYTHONPATH": str(TESTS)})  # type: ignore[arg-type]
    yield server
    server.close()


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab."""
    yield from _server("lab", tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="package")
def notebook7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Jupyter Notebook."""
    yield from _server("notebook", tmp_path_factory.mktemp("notebook"))


@pytest.fixture(params=["lab", "notebook7"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the two applications in turn."""
    found: Server = request.getfixturevalue(request.param)
    return found
