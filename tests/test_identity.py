"""What changes a model's identity, what doesn't, and what it costs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cache as lm

import gguf_files as files
from fakes import FakeModel
from mlx_jupyter.models import identity, precision, sources, tensors
from mlx_jupyter.models.identity import fingerprint, layout
from mlx_jupyter.models.pool import ModelPool

WEIGHTS = "model.safetensors"
DAY = 24 * 3600 * 10**9


def write_weights(path: Path, seed: int = 0, name: str = "w", count: int = 40_000) -> None:
    array = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    tensors.write(path, [tensors.Entry(name, "F32", (count,))], [array])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with files of every kind; nothing of it can be loaded."""
    made = tmp_path / "model"
    made.mkdir()
    write_weights(made / WEIGHTS)
    (made / "config.json").write_text('{"model_type": "fake", "rope_theta": 1}')
    (made / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (made / "tokenizer_config.json").write_text('{"chat_template": "x", "eos_token": "a"}')
    (made / "generation_config.json").write_text('{"temperature": 1}')
    return made


@pytest.fixture
def of(model):
    """The identity of a directory with a fake model."""
    return lambda path, model=model, where="cpu": fingerprint(path, model, where)


def keep_time(path: Path, change) -> None:
    """Change a file behind its date."""
    stat = path.stat()
    change(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def poke(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


# --- what changes it ----------------------------------------------------------------------------


def touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def longer(path: Path) -> None:
    keep_time(path, lambda p: p.write_bytes(p.read_bytes() + b"x"))


def renamed_tensor(path: Path) -> None:
    keep_time(path, lambda p: write_weights(p, name="v"))


def other_training(path: Path) -> None:
    keep_time(path, lambda p: write_weights(p, seed=1))


@pytest.mark.parametrize("change", [touch, longer, renamed_tensor, other_training])
def test_another_weight_file_changes_it(change, directory, of):
    before = of(directory)
    change(directory / WEIGHTS)
    assert of(directory) != before


def test_one_weight_file_more_changes_it(directory, of):
    before = of(directory)
    write_weights(directory / "model-2.safetensors")
    assert of(directory) != before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"model_type": "fake", "rope_theta": 2}'),
        ("tokenizer.json", '{"model": {"vocab": {"b": 0}}}'),
        ("tokenizer_config.json", '{"chat_template": "x", "eos_token": "b"}'),
        ("tokenizer_config.json", '["odd"]'),
        ("tokenizer_config.json", '{"chat_template": "y", "eos_token": "a"}'),
        ("tokenizer_config.json", '{"eos_token": "a"}'),
        ("chat_template.jinja", "another"),
        ("chat_template.json", '{"chat_template": "another"}'),
        ("tokenizer.model", "pieces"),
        ("added_tokens.json", "{}"),
        ("own.py", "class Model: ..."),
    ],
)
def test_another_configuration_tokenizer_template_or_code_changes_it(name, content, directory, of):
    before = of(directory)
    (directory / name).write_text(content)
    assert of(directory) != before


def test_the_backend_changes_it(directory, of):
    assert len({of(directory, where=where) for where in ("cpu", "metal", "cuda")}) == 3


class Layer(nn.Module):
    """A weight that can be in any precision."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.layers = [0]


def test_the_precision_in_force_changes_it(directory, of):
    def made(dtype: mx.Dtype | None = None, **packing) -> str:
        model = Layer()
        if dtype is not None:
            model.set_dtype(dtype)
        if packing:
            nn.quantize(model, **packing)
        return of(directory, model)

    forms = [
        made(),
        made(mx.bfloat16),
        made(mx.float16),
        made(group_size=64, bits=4),
        made(group_size=64, bits=8),
        made(group_size=32, bits=4),
        made(group_size=32, mode="mxfp4", bits=4),
        made(mx.bfloat16, group_size=64, bits=4),
    ]
    assert len(set(forms)) == len(forms)
    assert made() == forms[0]


class Caches(FakeModel):
    """A fake model with the caches it is given."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def make_cache(self) -> list[object]:
        return self.make()


class Own(lm.KVCache):
    """A cache class of a model's own."""


LAYOUTS = [
    lambda: [lm.KVCache(), lm.KVCache()],
    lambda: [lm.KVCache()],
    lambda: [lm.KVCache(), Own()],
    lambda: [lm.ConcatenateKVCache(), lm.KVCache()],
    lambda: [lm.KVCache(), lm.RotatingKVCache(max_size=32)],
    lambda: [lm.KVCache(), lm.RotatingKVCache(max_size=64)],
    lambda: [lm.KVCache(), lm.RotatingKVCache(max_size=64, keep=4)],
    lambda: [lm.KVCache(), lm.ChunkedKVCache(64)],
    lambda: [lm.KVCache(), lm.ArraysCache(2)],
    lambda: [lm.KVCache(), lm.ArraysCache(3)],
    lambda: [lm.QuantizedKVCache(64, 8)],
    lambda: [lm.QuantizedKVCache(64, 4)],
]


def test_the_layout_changes_it(directory, of):
    found = [of(directory, Caches(make)) for make in LAYOUTS]
    assert len(set(found)) == len(found)
    assert found == [of(directory, Caches(make)) for make in LAYOUTS]


def test_nested_caches_are_told_by_their_leaves():
    flat = layout(Caches(lambda: [lm.KVCache(), lm.ArraysCache(2)]))
    assert layout(Caches(lambda: [lm.CacheList(lm.KVCache(), lm.ArraysCache(2))])) == flat
    assert [(kind, [leaf["class"] for leaf in group]) for kind, group in flat] == [
        ("rows", ["mlx_lm.models.cache.KVCache"]),
        ("state", ["mlx_lm.models.cache.ArraysCache"]),
    ]


@pytest.mark.parametrize(
    ("version", "same"),
    [("0.32.2", True), ("0.32.2.dev7+abc", True), ("0.32.3", False), ("0.33.2", False)],
)
def test_versions_count_to_the_patch(version, same, directory, of, monkeypatch):
    import mlx_lm

    for module in (mlx_lm, mx):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", "0.32.2")
            before = of(directory)
            patch.setattr(module, "__version__", version)
            assert (of(directory) == before) is same


def test_the_stores_format_changes_it(directory, of, monkeypatch):
    before = of(directory)
    monkeypatch.setattr(identity, "FORMAT", identity.FORMAT + 1)
    assert of(directory) != before


# --- what doesn't -------------------------------------------------------------------------------


def test_it_is_short_and_the_same_every_time(directory, of):
    found = of(directory)
    assert len(found) == 32
    assert set(found) <= set("0123456789abcdef")
    assert of(directory, FakeModel()) == found


def test_moving_and_copying_with_dates_do_not_change_it(directory, of, tmp_path):
    before = of(directory)
    copied = Path(shutil.copytree(directory, tmp_path / "copy"))
    assert of(copied) == before
    assert of(directory.rename(tmp_path / "another-name")) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", '{"temperature": 0}'),
        ("README.md", "about it"),
    ],
)
def test_defaults_and_descriptions_do_not_change_it(name, content, directory, of):
    before = of(directory)
    (directory / name).write_text(content)
    assert of(directory) == before


def test_dates_of_small_files_do_not_change_it(directory, of):
    before = of(directory)
    for name in ("config.json", "tokenizer.json"):
        os.utime(directory / name, (1, 1))
    assert of(directory) == before


# --- from the hub -------------------------------------------------------------------------------


def snapshot(hub: Path, source: Path, revision: str, date: int) -> Path:
    """The files of ``source`` as the hub's client keeps them in its cache."""
    repository = hub / "models--someone--something"
    made = repository / "snapshots" / revision
    made.mkdir(parents=True)
    blobs = repository / "blobs"
    blobs.mkdir(exist_ok=True)
    for file in source.iterdir():
        content = file.read_bytes()
        large = file.suffix == ".safetensors"
        blob = blobs / (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        blob.write_bytes(content)
        os.utime(blob, ns=(date, date))
        (made / file.name).symlink_to(os.path.relpath(blob, made))
    return made


def test_downloading_again_does_not_change_it(directory, of, tmp_path):
    first = of(snapshot(tmp_path / "hub", directory, "abc", DAY))
    shutil.rmtree(tmp_path / "hub")
    again = snapshot(tmp_path / "hub", directory, "def", 2 * DAY)
    assert of(again) == first
    elsewhere = snapshot(tmp_path / "elsewhere", directory, "abc", 3 * DAY)
    assert of(elsewhere) == first


def test_another_revision_with_other_weights_changes_it(directory, of, tmp_path):
    first = of(snapshot(tmp_path / "hub", directory, "abc", DAY))
    # Between the samples and with the same size and header: only the hub's hash can tell.
    poke(directory / WEIGHTS, 3000)
    assert of(snapshot(tmp_path / "hub", directory, "def", DAY)) != first


def test_a_blob_that_is_not_named_by_a_hash_goes_by_its_date(directory, of, tmp_path):
    def weights_named(date: int) -> str:
        made = snapshot(tmp_path / str(date), directory, "abc", date)
        link = made / WEIGHTS
        blob = link.resolve()
        odd = blob.rename(blob.with_name("etag-1"))
        link.unlink()
        link.symlink_to(odd)
        return of(made)

    assert weights_named(DAY) != weights_named(2 * DAY)


def note(directory: Path, known: str, seconds: float) -> None:
    """What the hub's client writes beside the files of a directory of the user's."""
    notes = directory / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / f"{WEIGHTS}.metadata").write_text(f"{'0' * 40}\n{known}\n{seconds}\n")


def test_files_downloaded_into_a_directory_go_by_the_hubs_hash(directory, of):
    weights = directory / WEIGHTS
    os.utime(weights, (1000, 1000))
    note(directory, "a" * 64, 1001.5)
    first = of(directory)
    os.utime(weights, (2000, 2000))
    note(directory, "a" * 64, 2001.5)
    assert of(directory) == first
    note(directory, "b" * 64, 2001.5)
    assert of(directory) != first


@pytest.mark.parametrize(
    "content", ["", "x", f"{'0' * 40}\nodd\n2001.5\n", f"{'0' * 40}\n{'a' * 64}\nwhen\n"]
)
def test_notes_that_do_not_hold_are_not_believed(content, directory, of):
    weights = directory / WEIGHTS
    note(directory, "a" * 64, 1001.5)
    (directory / ".cache/huggingface/download" / f"{WEIGHTS}.metadata").write_text(content)
    found = set()
    for date in (1000, 2000):
        os.utime(weights, (date, date))
        found.add(of(directory))
    assert len(found) == 2


def test_a_file_newer_than_its_note_goes_by_its_date(directory, of):
    note(directory, "a" * 64, 1001.5)
    found = set()
    for date in (3000, 4000):
        os.utime(directory / WEIGHTS, (date, date))
        found.add(of(directory))
    assert len(found) == 2


def test_an_older_file_put_in_place_of_a_downloaded_one_is_told(directory, of):
    os.utime(directory / WEIGHTS, (1000, 1000))
    note(directory, "a" * 64, 1001.5)
    first = of(directory)
    write_weights(directory / WEIGHTS, seed=1)
    os.utime(directory / WEIGHTS, (500, 500))
    assert of(directory) != first


# --- models that the pool loads -----------------------------------------------------------------


def gguf(tmp_path: Path, seed: int = 0) -> Path:
    config = files.tiny_config()
    path = tmp_path / "tiny.gguf"
    files.from_weights(config, files.random_weights(config, seed), "Q8_0").write(path)
    return path


def identity_of(name: str | Path) -> str | None:
    pool = ModelPool()
    try:
        return pool.load(str(name)).identity
    finally:
        pool.unload()


def test_a_converted_model_finds_its_pages_after_another_conversion(tmp_path):
    path = gguf(tmp_path)
    first = identity_of(path)
    assert first is not None
    made = sources.resolve(str(path)).path
    shutil.rmtree(made)
    assert identity_of(path) == first
    os.utime(made / WEIGHTS, (1, 1))
    assert identity_of(made) == first


def test_another_file_under_the_same_name_has_another_identity(tmp_path):
    first = identity_of(gguf(tmp_path))
    assert identity_of(gguf(tmp_path, seed=1)) not in (None, first)


def test_a_directory_of_the_users_in_the_cache_directory_goes_by_its_dates(tmp_path):
    made = sources.resolve(str(gguf(tmp_path))).path
    own = Path(shutil.copytree(made, made.parent / "mine-v1"))
    first = identity_of(own)
    os.utime(own / WEIGHTS, (1, 1))
    assert identity_of(own) not in (None, first)


def test_the_short_name_is_not_in_it(tmp_path):
    made = sources.resolve(str(gguf(tmp_path))).path
    one = Path(shutil.copytree(made, tmp_path / "one"))
    first = identity_of(one)
    assert identity_of(one.rename(tmp_path / "two")) == first


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="unpacks on the CPU")
def test_the_same_files_packed_and_unpacked_differ(tmp_path, monkeypatch):
    path = gguf(tmp_path)
    first = identity_of(path)
    monkeypatch.setattr(precision, "UNPACK_LIMIT", 0)
    assert identity_of(path) not in (None, first)


def test_a_given_model_has_none():
    assert ModelPool().adopt(FakeModel()).identity is None


@pytest.mark.parametrize("change", [touch, other_training])
def test_files_that_change_while_they_are_loaded_give_none(change, tmp_path, monkeypatch, caplog):
    made = sources.resolve(str(gguf(tmp_path))).path
    directory = Path(shutil.copytree(made, tmp_path / "changing"))
    settle = precision.settle

    def meanwhile(model, where) -> None:
        settle(model, where)
        change(directory / WEIGHTS)

    monkeypatch.setattr(precision, "settle", meanwhile)
    assert identity_of(directory) is None
    assert "changed while it was loaded" in caplog.text


def test_a_failure_costs_the_identity_and_not_the_load(tmp_path, monkeypatch, caplog):
    made = sources.resolve(str(gguf(tmp_path))).path
    monkeypatch.setattr(identity, "fingerprint", lambda *_: json.loads("{"))
    pool = ModelPool()
    loaded = pool.load(str(made))
    assert loaded.identity is None
    assert pool.current is loaded
    assert "has no identity" in caplog.text


# --- what it reads ------------------------------------------------------------------------------


def test_it_reads_little_however_large_the_weights_are(directory, of, monkeypatch):
    """A sparse file of 4 GiB; read whole, it would take this much memory or time."""
    path = directory / WEIGHTS
    size = 4 << 30
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    read = 0
    samples = identity._samples

    def counted(*where):
        nonlocal read
        for sample in samples(*where):
            read += len(sample)
            yield sample

    monkeypatch.setattr(identity, "_samples", counted)
    first = of(directory)
    assert read == identity.SAMPLES * identity.SAMPLE
    keep_time(path, lambda p: poke(p, 8 + len(header) + size // 2))
    assert of(directory) != first  # a sample begins in the middle


@pytest.mark.parametrize("size", [0, 3, 8, 20])
def test_files_that_are_no_weights_have_an_identity_or_an_error(size, directory, of):
    (directory / WEIGHTS).write_bytes(b"\xff" * size)
    assert len(of(directory)) == 32
