"""Loading, fitting, precision, limits and unloading."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

import gguf_files as files
from fake_tokenizer import chatml_tokenizer
from fakes import FakeModel
from mlx_jupyter.errors import BadModel, Interrupted, ModelDoesNotFit
from mlx_jupyter.models import limits, memory, precision, sources, tensors
from mlx_jupyter.models.pool import GIVEN, ModelPool, cache_layers

if TYPE_CHECKING:
    from pathlib import Path

on_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="the CPU backend's precision"
)


def model_dir(tmp_path: Path, name: str = "tiny", kind: str = "Q8_0", **changes) -> Path:
    config = files.tiny_config(**changes)
    path = tmp_path / f"{name}.gguf"
    files.from_weights(config, files.random_weights(config), kind).write(path)
    made = sources.resolve(str(path)).path
    directory = tmp_path / name
    shutil.copytree(made, directory)
    return directory


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


# --- objects of the user's -------------------------------------------------------------------


def test_a_given_model_is_adopted_with_its_tokenizer():
    pool = ModelPool()
    loaded = pool.adopt(FakeModel(("rows", "state", "window"), context=99), chatml_tokenizer())
    assert isinstance(loaded.tokenizer, TokenizerWrapper)
    assert pool.current is loaded is pool.find(None) is pool.find("model")
    info = loaded.info
    assert (info.name, info.source, info.family) == ("model", GIVEN, "fake")
    assert (info.context, info.context_origin) == (99, "the model (max_position_embeddings)")
    assert info.layers == (("rows", 1), ("window", 1), ("state", 1))
    assert info.weight_bytes > 0
    assert pool.infos() == (info,)


def test_a_model_without_a_tokenizer_is_adopted():
    assert ModelPool().adopt(FakeModel()).tokenizer is None


def test_a_second_model_of_the_same_name_replaces_the_first():
    pool = ModelPool()
    first = pool.adopt(FakeModel())
    gone = []
    pool.on_unload = gone.append
    second = pool.adopt(FakeModel())
    assert gone == [first]
    assert pool.current is second
    assert len(pool.infos()) == 1


# --- loading ---------------------------------------------------------------------------------


def test_a_directory_is_loaded_once_and_found_by_every_name(tmp_path):
    directory = model_dir(tmp_path)
    pool, told = ModelPool(), []
    loaded = pool.load(str(directory), progress=lambda *news: told.append(news))
    assert told == [("Loading tiny", 0, 0)]
    other = pool.adopt(FakeModel())
    assert pool.current is other
    for name in (str(directory), "tiny", str(directory) + "/."):
        assert pool.load(name) is loaded
    assert pool.current is loaded
    assert loaded.vocabulary == len(files.VOCABULARY)
    assert loaded.info.family == "llama"
    assert pool.find("nobody") is None


@on_cpu
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_the_cpu_computes_in_float32_and_the_headers_foretell_the_bytes(kind, tmp_path):
    directory = model_dir(tmp_path, kind=kind)
    config = json.loads((directory / "config.json").read_text())
    entries = tensors.model_entries(directory)
    loaded = ModelPool().load(str(directory))
    assert {a.dtype for _, a in tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert loaded.info.dtype == "float32"
    foretold = precision.loaded_bytes("cpu", entries, config)
    assert loaded.info.weight_bytes == pytest.approx(foretold, rel=0.1, abs=100_000)
    assert foretold == sum(a.nbytes for _, a in tree_flatten(loaded.model.parameters()))
    assert precision.loaded_bytes("metal", entries, config) == sum(e.nbytes for e in entries)


@on_cpu
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_large_packed_model_stays_packed_with_float32_scales(kind, tmp_path, monkeypatch):
    directory = model_dir(tmp_path, kind=kind)
    plain = ModelPool().load(str(directory))
    monkeypatch.setattr(precision, "UNPACK_LIMIT", 1000)
    packed = ModelPool().load(str(directory))
    parameters = dict(tree_flatten(packed.model.parameters()))
    assert {a.dtype for a in parameters.values()} == {mx.float32, mx.uint32}
    bits = 4 if kind == "Q4_1" else 8
    assert packed.info.dtype == f"{bits}-bit affine, group 32"
    assert packed.info.parameters == plain.info.parameters
    config = json.loads((directory / "config.json").read_text())
    foretold = precision.loaded_bytes("cpu", tensors.model_entries(directory), config)
    assert foretold == sum(a.nbytes for a in parameters.values())
    ids = mx.array([[1, 2, 3, 4]])
    np.testing.assert_allclose(np.array(packed.model(ids)), np.array(plain.model(ids)), atol=1e-3)


def test_on_a_gpu_the_files_decide(tmp_path):
    from mlx_lm.utils import load_model

    directory = model_dir(tmp_path, kind="Q4_0")
    model, _ = load_model(directory, lazy=True)
    precision.settle(model, "metal")
    assert {a.dtype for _, a in tree_flatten(model.parameters())} == {mx.float16, mx.uint32}


def break_config(directory):
    edit(directory / "config.json", model_type="mystery")


def break_shape(directory):
    edit(directory / "config.json", hidden_size=32)


def break_template(directory):
    (directory / "tokenizer.json").write_text("{}")


def break_type(directory):
    edit(directory / "config.json", num_hidden_layers="two")


@pytest.mark.parametrize("damage", [break_config, break_shape, break_template, break_type])
def test_wrong_files_are_one_line_and_the_pool_stays_sound(damage, tmp_path):
    directory = model_dir(tmp_path)
    damage(directory)
    pool = ModelPool()
    kept = pool.adopt(FakeModel())
    with pytest.raises(BadModel) as caught:
        pool.load(str(directory))
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    assert pool.current is kept


def test_a_tokenizer_with_code_of_its_own_is_refused_without_asking(tmp_path):
    directory = model_dir(tmp_path)
    edit(
        directory / "tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": ["evil.EvilTokenizer", None]},
    )
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(BadModel):
        ModelPool().load(str(directory))


def test_a_cancelled_load_leaves_the_pool_as_it_was(tmp_path):
    directory = model_dir(tmp_path)
    pool = ModelPool()
    with pytest.raises(Interrupted):
        pool.load(str(directory), cancelled=lambda: True)
    assert pool.infos() == ()


# --- fitting ---------------------------------------------------------------------------------


def test_a_model_that_can_never_fit_is_refused_and_nobody_goes_for_it(tmp_path, monkeypatch):
    directory = model_dir(tmp_path)
    pool = ModelPool()
    kept = pool.adopt(FakeModel(), name="old")
    monkeypatch.setattr(precision, "needed_bytes", lambda *_: 10**15)
    with pytest.raises(ModelDoesNotFit) as caught:
        pool.load(str(directory))
    assert caught.value.needed == 10**15 > caught.value.free > 0
    assert "old" in dict(caught.value.holders)
    assert pool.current is kept
    assert "\n" not in str(caught.value)


def test_the_users_bound_counts_too(tmp_path):
    directory = model_dir(tmp_path)
    with pytest.raises(ModelDoesNotFit):
        ModelPool(memory_limit=1).load(str(directory))


def test_an_unloaded_model_is_really_gone(tmp_path):
    directory = model_dir(tmp_path, kind="F32", hidden=256)
    pool = ModelPool()
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    loaded = pool.load(str(directory))
    size, model = loaded.info.weight_bytes, weakref.ref(loaded.model)
    assert mx.get_active_memory() - before >= size * 0.9
    assert pool.unload("tiny") == ["tiny"]
    assert model() is None
    assert mx.get_active_memory() - before < size * 0.1
    assert pool.unload("tiny") == []
    assert pool.current is None


def test_unload_without_a_name_unloads_all():
    pool = ModelPool()
    pool.adopt(FakeModel(), name="a")
    pool.adopt(FakeModel(), name="b")
    assert sorted(pool.unload()) == ["a", "b"]


# --- limits and defaults ---------------------------------------------------------------------


class Stub:
    def __init__(self, length: float) -> None:
        self.model_max_length = length


@pytest.mark.parametrize(
    ("config", "length", "user", "limit", "origin"),
    [
        ({"max_position_embeddings": 8192}, None, None, 8192, "max_position_embeddings"),
        ({"max_position_embeddings": 8192}, 2048, None, 2048, "model_max_length"),
        ({"max_position_embeddings": 8192}, int(1e30), None, 8192, "max_position_embeddings"),
        ({"max_position_embeddings": 8192}, None, 100, 100, "context option"),
        ({"max_position_embeddings": 8192}, None, 10**6, 8192, "max_position_embeddings"),
        ({"text_config": {"max_position_embeddings": 77}}, None, None, 77, "max_position"),
        ({"n_positions": 1024}, None, None, 1024, "n_positions"),
        ({}, None, None, limits.UNSTATED, "states none"),
        ({"max_position_embeddings": "many"}, None, None, limits.UNSTATED, "states none"),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
            None, None, 16384, "rope_scaling",
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            None, None, 131072, "rope_scaling",
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            None, None, 131072, "max_position_embeddings",
        ),
    ],
)  # fmt: skip
def test_the_context_is_the_smallest_limit_and_says_whose(config, length, user, limit, origin):
    tokenizer = None if length is None else Stub(length)
    got, whose = limits.context_of(config, tokenizer, user)
    assert got == limit
    assert origin in whose


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True, "top_p": "much", "temperature": -1}, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_sampling_defaults_come_from_the_models_generation_config(config, defaults, tmp_path):
    directory = model_dir(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps(config))
    assert ModelPool().load(str(directory)).defaults == defaults


def test_a_broken_generation_config_sets_nothing(tmp_path):
    for content in ("{", "[1]", ""):
        (tmp_path / "generation_config.json").write_text(content)
        assert limits.defaults_of(tmp_path) == {}


def test_prefill_chunks_depend_on_backend_and_size_only():
    sizes = [10**6, 135 * 10**6, 10**9, 7 * 10**9]
    chunks = {
        where: [precision.prefill_chunk(where, n) for n in sizes]
        for where in ("cpu", "metal", "cuda")
    }
    assert chunks["cpu"] == [128, 128, 64, 32]
    assert chunks["metal"] == [2048, 2048, 2048, 512]
    assert chunks["cuda"] == [2048] * 4


def test_nested_caches_count_by_their_leaves():
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

    class Mixed(nn.Module):
        def make_cache(self):
            return [CacheList(KVCache(), ArraysCache(2)), QuantizedKVCache(), KVCache()]

    assert cache_layers(Mixed()) == (("rows", 3), ("state", 1))


# --- memory ----------------------------------------------------------------------------------


def test_measured_memory_is_plain_and_plausible():
    now = memory.measured()
    assert 0 < now.free <= now.limit
    assert now.active <= now.peak
    assert now.device


def test_weights_of_a_shared_buffer_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = mx.ones((256, 1024))
            self.b = self.a

    model = Tied()
    mx.eval(model.parameters())
    assert 1 << 20 <= memory.weights_bytes(model) < 2 << 20


def test_containers_limits_are_seen(tmp_path):
    assert memory.cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    assert memory.cgroup(tmp_path) == (1000, 500)
    old = tmp_path / "v1" / "memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert memory.cgroup(old.parent) is None
    (old / "memory.limit_in_bytes").write_text("1000")
    (old / "memory.usage_in_bytes").write_text("900")
    (old / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    assert memory.cgroup(old.parent) == (1000, 200)


# --- the process -----------------------------------------------------------------------------


def test_loading_leaves_the_process_as_it_was_and_prints_nothing():
    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "from mlx_jupyter.models.pool import ModelPool; import sys\n"
        "assert not {'mlx.core', 'mlx_lm', 'transformers'} & set(sys.modules)\n"
        "from mlx_jupyter.models import pool; pool.import_mlx_lm(); import mlx_lm\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.real
def test_the_default_model_loads_in_float32(real_model_dir):
    loaded = ModelPool().load(sources.DEFAULT_MODEL)
    assert (loaded.info.name, loaded.info.source) == (sources.DEFAULT_MODEL, str(real_model_dir))
    assert (loaded.info.context, loaded.info.layers) == (8192, (("rows", 30),))
    assert loaded.info.parameters == 134_515_008
    if mx.default_device().type == mx.DeviceType.cpu:
        assert loaded.info.dtype == "float32"


@on_cpu
@pytest.mark.real
def test_packed_and_unpacked_default_model_agree(real_model_dir, monkeypatch):
    ids = mx.array([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]])
    unpacked = np.array(ModelPool().load(str(real_model_dir)).model(ids)[0, -1])
    monkeypatch.setattr(precision, "UNPACK_LIMIT", 0)
    packed = np.array(ModelPool().load(str(real_model_dir)).model(ids)[0, -1])
    assert np.abs(packed - unpacked).max() < 1e-3


def test_a_model_for_one_request_leaves_the_current_one(tmp_path):
    pool, directory = ModelPool(), model_dir(tmp_path)
    first = pool.load(str(directory), current=False)
    assert pool.current is first, "there was none"
    second = pool.adopt(FakeModel(), None, name="second")
    assert pool.load("tiny", current=False) is first
    assert pool.current is second
    pool.unload("tiny")
    again = pool.load(str(directory), current=False)
    assert pool.current is second
    assert pool.models() == (again, second)
    assert again.used > second.used


def test_a_load_leaves_the_random_numbers_where_they_stood(tmp_path):
    pool, directory = ModelPool(), model_dir(tmp_path)
    mx.random.seed(7)
    mx.random.uniform()
    before = mx.random.state[0].tolist()
    pool.load(str(directory))
    assert mx.random.state[0].tolist() == before
