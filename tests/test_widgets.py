"""The Python halves of the widgets, and the freshness of the built bundle."""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from IPython.core.formatters import DisplayFormatter

from mlx_jupyter.cache.view import TreeView
from mlx_jupyter.widgets import TrieView, trie
from mlx_jupyter.widgets import report as report_room
from mlx_jupyter.widgets.forms import tree_text
from mlx_jupyter.widgets.trie import TreeReport, tree_report
from test_forms import JS, demo_tree

STATIC = pathlib.Path(trie.__file__).parent / "static"
WIDGET = "application/vnd.jupyter.widget-view+json"


def source_hash():
    """The same as ``sourceHash`` in js/build.mjs."""
    names = [p.relative_to(JS).as_posix() for p in (JS / "src").rglob("*") if p.is_file()]
    digest = hashlib.sha256()
    for name in sorted([*names, "build.mjs", "package-lock.json"]):
        text = (JS / name).read_bytes().replace(b"\r\n", b"\n")
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["trie.js", "trie.css", "pages.js", "pages.css"])
def test_the_bundle_was_built_from_the_sources(name):
    banner = (STATIC / name).read_text(encoding="utf-8").split("\n", 1)[0]
    assert re.findall(r"\b[0-9a-f]{64}\b", banner) == [source_hash()], (
        "stale: cd js && npm ci && npm run build"
    )


@pytest.mark.parametrize("name", ["trie.js", "pages.js"])
def test_the_bundle_is_small_and_fetches_nothing(name):
    js = (STATIC / name).read_text(encoding="utf-8")
    assert len(js.encode()) < 40_000
    hosts = set(re.findall(r"https?://([\w.]+)", js))
    assert hosts <= {"www.w3.org"}  # names of XML namespaces
    assert not re.search(r"\b(fetch|import)\(", js)


def test_third_party_notices_name_what_is_bundled():
    notices = (JS.parent / "THIRD_PARTY_NOTICES.md").read_text(encoding="utf-8")
    package = json.loads((JS / "package.json").read_text(encoding="utf-8"))
    for name, version in package["dependencies"].items():
        assert f"{name} {version}" in notices


def test_lock_file_names_no_registry():
    lock = json.loads((JS / "package-lock.json").read_text(encoding="utf-8"))
    assert not [name for name, entry in lock["packages"].items() if "resolved" in entry]


def test_snapshot_is_json_with_a_version_and_without_tokens():
    view = TrieView(demo_tree())
    assert view.snapshot["version"] == 42
    assert "tokens" not in json.dumps(view.snapshot).replace(" tokens", "")
    assert len(view.snapshot["nodes"]) == 12


def test_update_shows_newer_moments_and_other_models_only():
    view = TrieView(demo_tree())
    seen = []
    view.observe(lambda change: seen.append(change["new"]["version"]), "snapshot")
    view.update(replace(demo_tree(), version=41))
    view.update(demo_tree())
    view.update(replace(demo_tree(), version=43))
    view.update(replace(demo_tree(), version=1, model="another"))
    assert seen == [43, 1]
    assert "another" in view._repr_mimebundle_()[0]["text/html"]


def test_bundle_has_the_live_view_text_and_picture():
    data, _ = TrieView(demo_tree())._repr_mimebundle_()
    assert set(data) == {WIDGET, "text/plain", "text/html"}
    assert data["text/plain"] == tree_text(demo_tree())
    assert data["text/html"].startswith("<img src=")


def test_report_is_text_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "90")
    report = tree_report(demo_tree())
    assert isinstance(report, TreeReport)
    assert repr(report) == tree_text(demo_tree(), width=90)
    with pytest.raises(NotImplementedError):
        report._ipython_display_()
    data, _ = DisplayFormatter().format(report)
    assert data["text/plain"] == tree_text(demo_tree())
    assert WIDGET not in data


def displayed(monkeypatch, report):
    shown = []
    monkeypatch.setattr(report_room, "display", lambda data, **_: shown.append(data))
    monkeypatch.setattr(
        report_room, "get_ipython", lambda: type("Shell", (), {"kernel": object()})()
    )
    report._ipython_display_()
    return shown


def test_report_in_a_notebook_is_the_picture_and_the_live_view_beside_it(monkeypatch):
    picture, live = displayed(monkeypatch, tree_report(demo_tree()))
    assert set(picture) == {"text/plain", "text/html"}
    assert set(live) == {WIDGET, "text/plain"}  # no HTML: a viewer shows the picture once
    assert "live view" in live["text/plain"]


def test_live_widgets_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("MLX_JUPYTER_WIDGETS", "off")
    with pytest.raises(NotImplementedError):
        displayed(monkeypatch, tree_report(demo_tree()))


def test_report_of_an_empty_tree():
    assert "Run a %%llm cell" in repr(tree_report(TreeView()))
    assert TrieView(TreeView()).snapshot["nodes"] == []


def test_widgets_load_lazily_and_without_mlx():
    code = (
        "import sys, mlx_jupyter.widgets as w; assert 'anywidget' not in sys.modules; "
        "w.TrieView; assert 'anywidget' in sys.modules; "
        "assert 'mlx' not in sys.modules and 'mlx.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError):
        __import__("mlx_jupyter.widgets").widgets.nothing  # noqa: B018
