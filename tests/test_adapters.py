"""Adapters: a model of its own each, with its own cache and identity; bad ones are one line."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

import gguf_files as files
from fakes import fake_engine
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.thread import EngineThread
from mlx_jupyter.errors import BadModel, BadRequest
from mlx_jupyter.models import adapters, sources
from mlx_jupyter.models.adapters import resolve
from mlx_jupyter.models.pool import ModelPool

RANK: dict[str, Any] = {"rank": 4, "scale": 10.0, "dropout": 0.5}
PROMPT = "The quick brown fox jumps over the lazy dog, again and again. " * 4


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = files.tiny_config(max_position_embeddings=2048)
    path = tmp_path / "tiny.gguf"
    files.from_weights(config, files.random_weights(config), "Q8_0").write(path)
    return Path(shutil.copytree(sources.resolve(str(path)).path, tmp_path / "tiny"))


def write_adapter(model_dir: Path, place: Path, seed: int = 0, **changes: Any) -> Path:
    """An adapter with random weights for the model in a directory."""
    model, _ = load_model(model_dir, lazy=True)
    linear_to_lora_layers(model, 2, RANK)
    random = np.random.default_rng(seed)
    weights = {
        name: mx.array(random.normal(size=array.shape).astype(np.float32))
        for name, array in tree_flatten(model.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    place.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(place / adapters.WEIGHTS), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": RANK, **changes}
    (place / adapters.CONFIG).write_text(json.dumps(config))
    return place


@pytest.fixture
def adapter(model_dir: Path, tmp_path: Path) -> Path:
    return write_adapter(model_dir, tmp_path / "poet")


def ask(engine: Engine, **how: Any) -> Any:
    return engine.generate(PROMPT, max_tokens=6, **how)


def test_it_is_a_model_of_its_own(model_dir: Path, adapter: Path) -> None:
    with Engine() as engine:
        plain = engine.load(str(model_dir))
        cold = ask(engine)
        tuned = engine.load("tiny", adapter=adapter)
        assert (plain.name, tuned.name) == ("tiny", "tiny+poet")
        assert tuned.weight_bytes > plain.weight_bytes
        other = ask(engine)
        assert other.model == "tiny+poet"
        assert other.usage.cached == 0  # nothing of the plain model's
        assert other.logprobs != pytest.approx(cold.logprobs, abs=1e-3)
        # By name, by directory, and back: each with its own cache.
        assert ask(engine, model="tiny").usage.prefilled == 1
        assert ask(engine, model="tiny+poet").usage.prefilled == 1
        again = ask(engine, model="tiny", adapter=adapter)
        assert (again.model, again.usage.prefilled) == ("tiny+poet", 1)
        assert again.tokens == other.tokens
        assert engine.plan(PROMPT, model=str(model_dir), adapter=adapter).recomputed == 1
        assert [m.name for m in engine.models()] == ["tiny+poet", "tiny"]
        assert ask(engine, model=str(model_dir)).model == "tiny"
        assert engine.unload("tiny+poet") == ["tiny+poet"]
        assert ask(engine, model="tiny").tokens == cold.tokens
        engine.check()


def test_without_a_name_it_goes_on_top_of_the_current_one(model_dir: Path, adapter: Path) -> None:
    with Engine() as engine:
        engine.load(str(model_dir))
        assert ask(engine, adapter=str(adapter)).model == "tiny+poet"
        assert ask(engine, adapter=str(adapter)).usage.prefilled == 1
        assert [m.name for m in engine.models()] == ["tiny", "tiny+poet"]
        assert ask(engine).model == "tiny"  # an option of one request changes nothing else


def test_it_computes_what_mlx_lm_does(model_dir: Path, adapter: Path) -> None:
    from mlx_lm.utils import load_adapters

    ids = [1, 5, 9, 40, 3]
    with Engine() as engine:
        engine.load(str(model_dir), adapter=adapter)
        answer = engine.generate(tokens=ids, max_tokens=1)
    model, _ = load_model(model_dir, lazy=True)
    model.set_dtype(mx.float32)
    load_adapters(model, str(adapter)).eval()
    logits = model(mx.array([ids]))[0, -1]
    scores = logits - mx.logsumexp(logits)
    assert answer.tokens == (int(mx.argmax(scores).item()),)
    assert answer.logprobs[0] == pytest.approx(float(mx.max(scores).item()), abs=1e-3)


def test_two_adapters_and_one_that_was_trained_again(
    model_dir: Path, adapter: Path, tmp_path: Path
) -> None:
    second = write_adapter(model_dir, tmp_path / "cook", seed=1)
    twin = write_adapter(model_dir, tmp_path / "elsewhere" / "poet", seed=2)
    runs = [write_adapter(model_dir, tmp_path / n / "adapters", seed=3) for n in ("one", "two")]
    with Engine() as engine:
        names = [
            engine.load(str(model_dir), adapter=each).name
            for each in (adapter, second, twin, *runs)
        ]
        assert names[:2] == ["tiny+poet", "tiny+cook"]
        assert names[2].startswith("tiny+poet-")
        assert names[3:] == ["tiny+one", "tiny+two"]
        assert len(engine.models()) == len(set(names)) == 5
        before = ask(engine, model="tiny+cook")
        write_adapter(model_dir, second, seed=7)
        after = ask(engine, model=str(model_dir), adapter=second)
        assert after.model == "tiny+cook"
        assert after.usage.cached == 0
        assert after.logprobs != pytest.approx(before.logprobs, abs=1e-3)
        assert len(engine.models()) == 5


# --- identity -----------------------------------------------------------------------------------


def test_it_is_in_the_identity(model_dir: Path, adapter: Path, tmp_path: Path) -> None:
    def identity(place: Path | None) -> str | None:
        pool = ModelPool()
        found = pool.load(str(model_dir), adapter=resolve(place) if place else None).identity
        pool.unload()
        return found

    plain, tuned = identity(None), identity(adapter)
    assert plain is not None
    assert tuned is not None
    seen = {plain, tuned}
    assert identity(adapter) == tuned
    assert identity(Path(shutil.copytree(adapter, tmp_path / "copied"))) == tuned
    seen.add(identity(write_adapter(model_dir, tmp_path / "other", seed=1)))
    config = {**RANK, "scale": 20.0}  # the weights' forms are the same
    seen.add(identity(write_adapter(model_dir, tmp_path / "scaled", lora_parameters=config)))
    assert len(seen) == 4


def change_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    table = json.loads(path.read_text())
    table["model_max_length"] = 4096
    path.write_text(json.dumps(table))


def change_template(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    table = json.loads(path.read_text())
    table["chat_template"] += "{# another one that writes the same #}"
    path.write_text(json.dumps(table))


def change_weights(directory: Path) -> None:
    config = files.tiny_config(max_position_embeddings=2048)
    path = directory.parent / "tiny.gguf"
    files.from_weights(config, files.random_weights(config, 5), "Q8_0").write(path)
    made = sources.resolve(str(path)).path
    shutil.copy(made / "model.safetensors", directory / "model.safetensors")


def change_config(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5000.0}))


def change_nothing(directory: Path) -> None:
    assert directory.is_dir()


@pytest.mark.parametrize(
    ("change", "tuned", "kept"),
    [
        (change_nothing, False, True),
        (change_tokenizer, False, False),
        (change_template, False, False),
        (change_weights, False, False),
        (change_config, False, False),
        (change_nothing, True, False),
    ],
)
def test_a_changed_model_never_matches_an_old_page(
    change, tuned: bool, kept: bool, model_dir: Path, adapter: Path, tmp_path: Path, monkeypatch
) -> None:
    """Pages outlive the engine; whatever was changed meanwhile, they aren't those of the model."""
    monkeypatch.delenv("MLX_JUPYTER_STORE")
    monkeypatch.setattr("mlx_jupyter.engine.base.EngineThread", partial(EngineThread, grace=0))
    prompt = PROMPT * 2
    with Engine(store=tmp_path / "pages") as engine:
        engine.load(str(model_dir))
        engine.generate(prompt, max_tokens=2)
        assert engine.settle_store()
    change(model_dir)
    with Engine(store=tmp_path / "pages") as engine:
        engine.load(str(model_dir), adapter=adapter if tuned else None)
        answer = engine.generate(prompt, max_tokens=2)
        assert (answer.usage.cached > 0) == kept


# --- bad ones -----------------------------------------------------------------------------------


def no_config(place: Path) -> None:
    (place / adapters.CONFIG).unlink()


def no_weights(place: Path) -> None:
    (place / adapters.WEIGHTS).unlink()


def broken_config(place: Path) -> None:
    (place / adapters.CONFIG).write_text("{")


def list_config(place: Path) -> None:
    (place / adapters.CONFIG).write_text("[]")


def empty_config(place: Path) -> None:
    (place / adapters.CONFIG).write_text("{}")


def odd_type(place: Path) -> None:
    (place / adapters.CONFIG).write_text('{"fine_tune_type": "magic"}')


def no_scale(place: Path) -> None:
    config = json.loads((place / adapters.CONFIG).read_text())
    del config["lora_parameters"]["scale"]
    (place / adapters.CONFIG).write_text(json.dumps(config))


def cut_short(place: Path) -> None:
    path = place / adapters.WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def another_models(place: Path) -> None:
    mx.save_safetensors(str(place / adapters.WEIGHTS), {"model.x.lora_a": mx.zeros((2, 2))})


def half_of_it(place: Path) -> None:
    weights = mx.load(str(place / adapters.WEIGHTS))
    assert isinstance(weights, dict)
    kept = {k: v for k, v in weights.items() if not k.endswith("lora_a")}
    mx.eval(list(kept.values()))
    mx.save_safetensors(str(place / adapters.WEIGHTS), kept)


def gone(place: Path) -> None:
    shutil.rmtree(place)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (no_config, "has no adapter_config.json"),
        (no_weights, "has no adapters.safetensors"),
        (broken_config, "adapter_config.json can't be read"),
        (list_config, "isn't a table"),
        (empty_config, "has no num_layers or lora_parameters"),
        (odd_type, "its fine_tune_type is 'magic'; known: lora, dora, full"),
        (no_scale, "doesn't fit the model: "),
        (cut_short, "cut short"),
        (another_models, "doesn't fit the model: "),
        (half_of_it, "doesn't fit the model: it has no model.layers."),
        (gone, "is no directory"),
    ],
)
def test_a_bad_one_is_one_clear_line(damage, told: str, model_dir: Path, adapter: Path) -> None:
    damage(adapter)
    with Engine() as engine:
        engine.load(str(model_dir))
        for attempt in (
            lambda: engine.load("tiny", adapter=adapter),
            lambda: ask(engine, adapter=adapter),
        ):
            with pytest.raises(BadModel) as caught:
                attempt()
            assert told in str(caught.value)
            assert "\n" not in str(caught.value)
            assert str(adapter) in str(caught.value)
        assert [m.name for m in engine.models()] == ["tiny"]
        assert ask(engine).model == "tiny"


@pytest.mark.parametrize("bad", ["", "  ", 3, b"x"])
def test_what_is_no_place(bad) -> None:
    with fake_engine() as engine:
        with pytest.raises(BadRequest, match="adapter takes a directory"):
            engine.load("x", adapter=bad)
        with pytest.raises(BadRequest, match="adapter takes a directory"):
            engine.request("x", adapter=bad)


def test_an_object_takes_none(adapter: Path) -> None:
    with fake_engine() as engine, pytest.raises(BadRequest, match="given as an object"):
        engine.generate("x", adapter=adapter)
