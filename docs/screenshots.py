"""Take the pictures in docs/screenshots: the executed quickstart in JupyterLab, light and dark.

usage: python docs/screenshots.py [PICTURE...]        (or ./run screenshots)

The notebook is run for real in the browser, so the pictures show live widgets. With names, such as
``pages``, only those pictures are taken.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.jupyter import Notebook, Server  # noqa: E402 - found through the line above

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURES = ROOT / "docs" / "screenshots"
QUICKSTART = ROOT / "notebooks" / "quickstart.ipynb"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
VIEWS = {"answers": "question-1", "conversation": "conversation-about", "tree": "tree-about"}
"""Picture: the id of the cell at its top."""

PAGES = {"pages": 1280, "pages-narrow": 820}
"""Picture of the pages widget: the window's width."""


def main() -> None:
    """Run the notebook once and photograph it in both themes."""
    wanted = set(sys.argv[1:]) or {*VIEWS, *PAGES}
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("MLX_JUPYTER_CHROMIUM") or shutil.which("chromium")
    if not chromium:
        sys.exit("no Chromium: install it, or set MLX_JUPYTER_CHROMIUM")
    source = nbformat.read(QUICKSTART, as_version=4)
    places = {cell.id: index for index, cell in enumerate(source.cells)}
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        server = Server("lab", Path(directory))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            server.write("quickstart.ipynb", source)
            page = browser.new_page(
                viewport={"width": 1280, "height": 900}, device_scale_factor=1.5
            )
            notebook = server.open(page, "quickstart.ipynb")
            tidy(page)
            for index, cell in enumerate(source.cells):
                if cell.cell_type == "code" and not notebook.run(index):
                    sys.exit(f"cell {cell.id} failed: {notebook.outputs(index)}")
            for theme, name in THEMES.items():
                set_theme(page, name)
                for view, cell_id in VIEWS.items():
                    if view in wanted:
                        photograph(notebook, places[cell_id], PICTURES / f"{view}-{theme}.png")
            if wanted & {*PAGES}:
                pages(notebook, wanted)
        finally:
            browser.close()
            server.close()


def pages(notebook: Notebook, wanted: set[str]) -> None:
    """Photograph the pages widget, with a smaller budget to try, in both themes and two widths."""
    page = notebook.page
    place = notebook.insert("%llm pages")
    notebook.run(place)
    slider = page.get_by_test_id("pages-budget")
    slider.focus()
    while not page.get_by_test_id("pages-going").count():
        for _ in range(5):
            slider.press("ArrowLeft")
        page.wait_for_timeout(500)  # the slider settles, the kernel answers
    for theme, name in THEMES.items():
        set_theme(page, name)
        for view, width in PAGES.items():
            if view in wanted:
                page.set_viewport_size({"width": width, "height": 900})
                photograph(notebook, place, PICTURES / f"{view}-{theme}.png")


def tidy(page: Page) -> None:
    """Leave the notebook alone on the screen."""
    page.evaluate(
        """async () => {
            const { commands, shell } = window.jupyterapp;
            shell.collapseLeft();
            shell.collapseRight();
            await commands.execute("application:set-mode", { mode: "single-document" });
        }"""
    )


def set_theme(page: Page, name: str) -> None:
    """Switch JupyterLab's theme and wait until it is there."""
    page.evaluate(
        "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name
    )
    page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)


def photograph(notebook: Notebook, index: int, target: Path) -> None:
    """Scroll to a cell and take the picture."""
    notebook.show(index)
    notebook.page.wait_for_timeout(700)  # scrolling and theme transitions
    notebook.page.screenshot(path=target)
    print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
