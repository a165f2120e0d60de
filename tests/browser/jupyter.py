"""JupyterLab and Notebook in headless Chromium, driven as a user would and without guessing.

``Server`` is one running application with directories of its own. ``Notebook`` is one open
notebook in it: cells are run through the application's own commands, and every wait is for a
state of the application (context, session, kernel) and not for a look of the page.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import nbformat

if TYPE_CHECKING:
    from playwright.sync_api import Page

App = Literal["lab", "notebook"]

START_TIMEOUT = 60.0
READY_TIMEOUT = 60.0
CELL_TIMEOUT = 120.0
ORPHAN_TIMEOUT = 300

LIBRARY = (Path(__file__).parent / "notebook.js").read_text()


class Server:
    """A running JupyterLab or Notebook server that shares nothing with the user's own."""

    def __init__(
        self, app: App, directory: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.app = app
        self.root = directory / "notebooks"
        self.root.mkdir(parents=True)
        self._token = secrets.token_hex(16)
        self._runtime = directory / "runtime"
        self._log = directory / "server.log"
        env = os.environ | self._directories(directory) | (environment or {})
        name = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}[app]
        module = {"lab": "jupyterlab", "notebook": "notebook"}[app]
        command = [
            *(sys.executable, "-m", module),
            *("--no-browser", "--allow-root"),
            "--ServerApp.ip=127.0.0.1",
            "--ServerApp.port=0",
            f"--IdentityProvider.token={self._token}",
            f"--ServerApp.root_dir={self.root}",
            f"--{name}.expose_app_in_browser=True",
            # Should the tests be killed, the server and its kernels end by themselves.
            f"--MappingKernelManager.cull_idle_timeout={ORPHAN_TIMEOUT}",
            f"--ServerApp.shutdown_no_activity_timeout={ORPHAN_TIMEOUT}",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = self._wait_for_url()

    @staticmethod
    def _directories(directory: Path) -> dict[str, str]:
        """Environment variables that keep everything inside ``directory``, settings included."""
        config = directory / "config"
        (config / "labconfig").mkdir(parents=True)
        # The offer to fetch news would cover the page.
        quiet = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        (config / "labconfig" / "page_config.json").write_text(json.dumps(quiet))
        return {
            "JUPYTER_CONFIG_DIR": str(config),
            "JUPYTER_DATA_DIR": str(directory / "data"),
            "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(directory / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(directory / "workspaces"),
            "IPYTHONDIR": str(directory / "ipython"),
        }

    def _wait_for_url(self) -> str:
        """The server's address, once it answers."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            for file in self._runtime.glob("jpserver-*.json"):
                try:
                    url = str(json.loads(file.read_text())["url"])
                    request = urllib.request.Request(
                        f"{url}api/status", headers={"Authorization": f"token {self._token}"}
                    )
                    urllib.request.urlopen(request, timeout=2).close()
                except (ValueError, OSError):  # half written, or not listening yet
                    continue
                return url
            time.sleep(0.1)
        self.close()
        raise RuntimeError(f"{self.app} did not start:\n{self._log.read_text()[-2000:]}")

    def write(self, name: str, notebook: nbformat.NotebookNode) -> Path:
        """Put a notebook where the server shows it."""
        path = self.root / name
        # Without it the application asks which kernel to use.
        notebook.metadata.kernelspec = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, path)
        return path

    def open(self, page: Page, name: str) -> Notebook:
        """Open a notebook in ``page`` and wait until its kernel is idle."""
        route = {"lab": "lab/tree", "notebook": "notebooks"}[self.app]
        # Without `reset`, JupyterLab opens again what the last page had open.
        page.goto(f"{self.url}{route}/{name}?token={self._token}&reset")
        return Notebook(page, name)

    def close(self) -> None:
        """Stop the server and the kernels that it started."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Notebook:
    """An open notebook."""

    def __init__(self, page: Page, name: str) -> None:
        self.page = page
        self.page.set_default_timeout(READY_TIMEOUT * 1000)
        self.page.wait_for_function("() => window.jupyterapp")
        self.page.evaluate(LIBRARY, name)
        self.ready()

    def _call(self, function: str, *arguments: Any, timeout: float = READY_TIMEOUT) -> Any:
        return self.page.evaluate(
            "([name, args, ms]) => window.drive.call(name, args, ms)",
            [function, list(arguments), timeout * 1000],
        )

    def ready(self) -> None:
        """Wait until the document, its session and its kernel are ready, and the kernel idle."""
        self._call("ready")

    def start(self, index: int) -> None:
        """Start a cell and return at once."""
        self._call("start", index)

    def wait(self, index: int, timeout: float = CELL_TIMEOUT) -> bool:
        """Wait for the end of a started cell; whether it succeeded."""
        return bool(self._call("wait", index, timeout=timeout))

    def run(self, index: int, timeout: float = CELL_TIMEOUT) -> bool:
        """Run a cell to its end; whether it succeeded."""
        self.start(index)
        return self.wait(index, timeout)

    def insert(self, source: str) -> int:
        """Add a code cell at the end; its index."""
        return int(self._call("insert", source))

    def do(self, source: str, timeout: float = CELL_TIMEOUT) -> list[dict[str, Any]]:
        """Add a code cell at the end, run it, return its outputs."""
        index = self.insert(source)
        self.run(index, timeout)
        return self.outputs(index)

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """The cell's outputs as the notebook file would hold them."""
        found: list[dict[str, Any]] = self._call("outputs", index)
        return found

    def text(self, index: int) -> str:
        """The cell's outputs as the user reads them on the page."""
        return str(self._call("text", index))

    def wait_for_text(self, index: int, wanted: str = r"\S", timeout: float = CELL_TIMEOUT) -> str:
        """Wait until the page shows something in the cell's output that matches a pattern."""
        deadline = time.monotonic() + timeout
        while not re.search(wanted, text := self.text(index)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {wanted!r} in cell {index}, but: {text!r}")
            self.page.wait_for_timeout(20)
        return text

    def count(self) -> int:
        """How many cells there are."""
        return int(self._call("count"))

    def sources(self) -> list[str]:
        """Every cell's source; markdown cells give the empty string."""
        found: list[str] = self._call("sources")
        return found

    def interrupt(self) -> None:
        """Press the interrupt button."""
        self._call("interrupt")

    def restart(self) -> None:
        """Restart the kernel and wait until it is idle."""
        self._call("restart")
        self.ready()

    def end(self) -> None:
        """Shut the kernel down for good."""
        self._call("end")

    def save(self) -> None:
        """Save the file."""
        self._call("save")

    def show(self, index: int) -> None:
        """Scroll a cell into view."""
        self._call("show", index)
