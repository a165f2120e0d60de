"""Models from the Hugging Face Hub, through ``huggingface_hub`` in a child process.

The child takes the user's settings (``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, ``HF_HOME``, tokens,
timeouts) as ``huggingface_hub`` reads them and reports on its standard output, one JSON object a
line: progress, then a path or an error. A file that breaks off goes on where it stopped; after a
cancel the next run keeps the files that were complete and fetches the others anew, as the library
shares no partial files between processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mlx_jupyter.models import child
from mlx_jupyter.models.child import ChildFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WANTED = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)

_ROOT = Path(__file__).resolve().parents[2]
_CHILD = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from mlx_jupyter.models import hub; sys.exit(hub.main(sys.argv[2:]))"
)


def endpoint() -> str:
    """The hub's address in force."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def fetch(
    repository: str,
    directory: Path,
    progress: Callable[[str, int, int], None],
    cancelled: Callable[[], bool],
    *,
    trust_remote_code: bool = False,
) -> Path:
    """The local snapshot of a repository, downloaded as far as it isn't there yet.

    Args:
        repository: ``owner/name``.
        directory: an empty directory for the child's output.
        progress: called with (text, bytes done, bytes in all).
        cancelled: looked at all the time; complete files stay for the next try.
        trust_remote_code: whether the repository's Python files are fetched and may be run.

    Raises:
        Interrupted: cancelled.
        ChildFailed: anything else, in one line.
    """
    log = directory / "hub.txt"
    seen = 0
    reports: list[dict[str, Any]] = []

    def measure() -> int:
        nonlocal seen
        fresh, seen = _reports(log, seen)
        for report in fresh:
            reports.append(report)
            if "done" in report:
                progress(f"Fetching {repository}", report["done"], report["total"])
        last = reports[-1] if reports else {}
        return int(last.get("done", len(reports)))

    flags = ["--trust-remote-code"] if trust_remote_code else []
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
    # -P: a file in the user's directory that is called like a module must not be run.
    command = [sys.executable, "-P", "-c", _CHILD, str(_ROOT), repository, *flags]
    try:
        child.run(command, log, measure=measure, cancelled=cancelled, env=quiet)
    except ChildFailed:
        measure()
        for report in reports:
            if "error" in report:
                raise ChildFailed(report["error"]) from None
        raise
    measure()
    for report in reports:
        if "path" in report:
            return Path(report["path"])
    raise ChildFailed(child.last_line(log) or "the download ended without a result")


def _reports(log: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines after byte ``start`` that are reports, and where they end."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read()
    except OSError:
        return [], start
    whole = text[: text.rfind(b"\n") + 1]
    lines = [line for line in whole.splitlines() if line.startswith(b'{"mlx_jupyter"')]
    found = [json.loads(line)["mlx_jupyter"] for line in lines]
    return found, start + len(whole)


# --- the child's side -----------------------------------------------------------------------


def _report(**report: Any) -> None:
    sys.stdout.write(json.dumps({"mlx_jupyter": report}) + "\n")
    sys.stdout.flush()


def _download(repository: str, *, trust_remote_code: bool) -> str:
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    patterns = [*_WANTED, "*.py"] if trust_remote_code else list(_WANTED)
    if constants.HF_HUB_OFFLINE:
        return str(snapshot_download(repository, allow_patterns=patterns))
    try:  # the one request that isn't repeated by the library, so a dead network shows at once
        info = HfApi().model_info(
            repository, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except Exception as error:
        if not _unreachable(error):
            raise
        try:
            return str(
                snapshot_download(repository, allow_patterns=patterns, local_files_only=True)
            )
        except OSError:
            raise error from None
    total = sum(_sizes(info.siblings or [], patterns))
    if not total:
        raise FileNotFoundError("it has no model*.safetensors files")
    config = json.loads(Path(hf_hub_download(repository, "config.json")).read_text())
    if isinstance(config, dict) and "model_file" in config and not trust_remote_code:
        raise PermissionError("it wants to run its own code (model_file); that is refused")
    folder = "models--" + repository.replace("/", "--")
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            done = child.tree_bytes(Path(constants.HF_HUB_CACHE) / folder / "blobs")
            _report(done=min(done, total), total=total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        path = snapshot_download(repository, allow_patterns=patterns, max_workers=4)
    finally:
        stop.set()
        watcher.join()
    _report(done=total, total=total)
    return str(path)


def _sizes(files: Any, patterns: list[str]) -> Iterator[int]:
    from fnmatch import fnmatch

    names = [f.rfilename for f in files]
    if not any(fnmatch(name, "model*.safetensors") for name in names):
        return
    for file in files:
        if any(fnmatch(file.rfilename, pattern) for pattern in patterns):
            yield file.size or 0


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _kinds(error: BaseException) -> set[str]:
    """Names, since the HTTP library below ``huggingface_hub`` differs between its versions."""
    return {kind.__name__ for kind in type(error).__mro__}


def _unreachable(error: BaseException) -> bool:
    wanted = {"ConnectError", "TimeoutException", "Timeout", "ConnectionError"}
    return any(_kinds(cause) & wanted for cause in _causes(error))


def _explain(error: BaseException) -> str:
    """One line for people about an error of ``huggingface_hub`` or of the network below it."""
    kinds = _kinds(error)
    if "GatedRepoError" in kinds:
        return "its owner asks to accept terms first; do so on its page, then `hf auth login`"
    if "RepositoryNotFoundError" in kinds:
        return "no such repository, or a private one"
    if "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
        return "it has no config.json"
    for cause in _causes(error):
        kinds = _kinds(cause)
        if "OfflineModeIsEnabled" in kinds or _offline():
            return "offline (HF_HUB_OFFLINE) and not in the local cache"
        if kinds & {"TimeoutException", "Timeout"}:
            return "no answer in time"
        if kinds & {"ConnectError", "ConnectionError"}:
            return f"can't be reached ({' '.join(str(cause).split())[:200]})"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _clean_up(number: int, frame: object) -> NoReturn:
    """Remove the partial files that this process is writing, then end."""
    import psutil

    del frame
    for file in psutil.Process().open_files():
        if file.path.endswith(".incomplete"):
            with contextlib.suppress(OSError):
                os.unlink(file.path)
    os._exit(128 + number)


def main(arguments: list[str]) -> int:
    """Download the repository that the first argument names; report on standard output."""
    signal.signal(signal.SIGTERM, _clean_up)
    try:
        path = _download(arguments[0], trust_remote_code="--trust-remote-code" in arguments)
    except Exception as error:
        _report(error=_explain(error))
        return 1
    _report(path=path)
    return 0
