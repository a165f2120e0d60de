"""GGUF files: what is read is right, and what is wrong or hostile is refused in one line."""

from __future__ import annotations

import importlib
import json
import struct
import tracemalloc
from typing import TYPE_CHECKING

import gguf as reference
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gguf_files as files
from mlx_jupyter.errors import BadModel
from mlx_jupyter.models import convert, gguf
from mlx_jupyter.models.pool import ModelPool

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "the tHe  the\n\n\tthen 1234.5 <|end|> x",
    "naïve café ÆØÅ 日本語 🦊👩‍👩‍👧 e\u0301",
    "  leading and trailing  ",
    "<|start|>user\nhe said <tool>they<tool><|end|>",
    "\r\n\x00\x7f'll I'M don't",
]


def converted(file: files.File, tmp_path: Path) -> Path:
    source = gguf.read(file.write(tmp_path / "model.gguf"))
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    convert.convert(source, out, lambda done, total: None)
    return out


def logits_of(directory: Path) -> np.ndarray:
    model = ModelPool().load(str(directory)).model
    return np.array(model(mx.array([[5, 77, 200, 3, 9, 9, 100]])))[0]


def wanted_logits(config: dict, weights: dict[str, np.ndarray]) -> np.ndarray:
    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = arch.Model(arch.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(a)) for name, a in weights.items()])
    return np.array(model(mx.array([[5, 77, 200, 3, 9, 9, 100]])))[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_families_give_the_original_logits(family, tied, tmp_path):
    config = files.tiny_config(family, tie_word_embeddings=tied)
    weights = files.random_weights(config)
    directory = converted(files.from_weights(config, weights), tmp_path)
    np.testing.assert_allclose(logits_of(directory), wanted_logits(config, weights), atol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q6_K"])
def test_types_give_the_logits_of_the_dequantized_weights(kind, tmp_path):
    config = files.tiny_config(hidden=256)
    weights = files.random_weights(config)
    if kind == "Q6_K":  # the reference package reads this type but doesn't write it
        file = files.from_weights(config, weights, "Q8_0")
        raw = np.random.default_rng(1).integers(0, 256, (256, 210), np.uint8)
        raw[:, -2:] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        file.tensors["blk.0.attn_v.weight"] = (raw[:128], 14)
        file.shapes["blk.0.attn_v.weight"] = (128, 256)
    else:
        file = files.from_weights(config, weights, kind)
    plain = dict(weights)
    for name, (raw, number) in file.tensors.items():
        values = reference.dequantize(raw, reference.GGMLQuantizationType(number))
        for original, array in weights.items():
            target = files.from_weights(config, {original: array}).tensors
            if name in target and array.ndim == 2:
                if "attn_q." in name or "attn_k." in name:
                    heads = array.shape[0] // config["head_dim"]
                    rows = values.reshape(heads, config["head_dim"] // 2, 2, -1)
                    values = rows.swapaxes(1, 2).reshape(array.shape)
                plain[original] = values.reshape(array.shape)
    got, want = logits_of(converted(file, tmp_path)), wanted_logits(config, plain)
    rounded = kind in ("Q5_0", "Q5_1", "Q6_K")  # kept in 16 bits
    np.testing.assert_allclose(got, want, atol=5e-3 if rounded else 1e-4)


def test_stretched_positions_of_llama3_are_recognised(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = files.tiny_config(hidden=256, rope_scaling=scaling, rope_theta=500000.0)
    weights = files.random_weights(config)
    file = files.from_weights(config, weights)
    file.add("rope_freqs.weight", convert._llama3_factors(config, scaling).astype(np.float32))
    directory = converted(file, tmp_path)
    assert json.loads((directory / "config.json").read_text())["rope_scaling"] == scaling
    np.testing.assert_allclose(logits_of(directory), wanted_logits(config, weights), atol=1e-4)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_tokenizer_round_trips_and_knows_its_special_tokens(pre, tmp_path):
    config = files.tiny_config()
    directory = converted(
        files.from_weights(config, files.random_weights(config), pre=pre), tmp_path
    )
    loaded = ModelPool().load(str(directory))
    tokenizer = loaded.tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert max(ids) < loaded.vocabulary
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [files.END]
    assert tokenizer.encode(" the", add_special_tokens=False) == [files.VOCABULARY.index("Ġthe")]
    assert tokenizer.eos_token_ids == {files.END}
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert shown == "<|start|>user\nhi<|end|>"


def test_digits_are_cut_one_by_one_where_the_model_was_trained_so(tmp_path):
    source = files.from_weights(files.tiny_config(), {})
    source.metadata["tokenizer.ggml.tokens"] = (
        files.ARRAY,
        (files.STRING, [*files.ALPHABET, "12", "<|end|>", "<|start|>"]),
    )
    source.metadata["tokenizer.ggml.token_type"] = (files.ARRAY, (files.I32, [1] * 257 + [3, 3]))
    source.metadata["tokenizer.ggml.merges"] = (files.ARRAY, (files.STRING, ["1 2"]))
    for key in ("bos", "eos"):
        source.metadata[f"tokenizer.ggml.{key}_token_id"] = (files.U32, 257)
    from mlx_jupyter.models import tokens

    counts = {}
    for pre in ("smollm", "gpt-2"):
        source.metadata["tokenizer.ggml.pre"] = (files.STRING, pre)
        parsed = gguf.read(source.write(tmp_path / f"{pre}.gguf"))
        vocabulary = tokens._vocabulary(parsed)
        built = tokens._build(parsed, vocabulary, tokens._kinds(parsed, len(vocabulary)))
        counts[pre] = len(built.encode("12").ids)
    assert counts == {"smollm": 2, "gpt-2": 1}


# --- hostile files --------------------------------------------------------------------------


def tiny_file() -> files.File:
    config = files.tiny_config(hidden=32, num_hidden_layers=1)
    return files.from_weights(config, files.random_weights(config), "Q4_0")


TINY = bytes(tiny_file())
HUGE = 2**63


def entry(key: str, kind: int, body: bytes) -> bytes:
    return files.string(key) + struct.pack("<I", kind) + body


def changed(**changes):
    def make() -> files.File:
        file = tiny_file()
        for name, content in changes.items():
            setattr(file, name, content)
        return file

    return make


def with_metadata(key, kind, content):
    def make() -> files.File:
        file = tiny_file()
        file.metadata[key] = (kind, content)
        return file

    return make


def without(table, key):
    def make() -> files.File:
        file = tiny_file()
        getattr(file, table).pop(key)
        return file

    return make


def with_shape(name, shape, kind=None):
    def make() -> files.File:
        file = tiny_file()
        file.shapes[name] = shape
        if kind is not None:
            file.tensors[name] = (file.tensors[name][0], kind)
        return file

    return make


def with_values(name, array):
    def make() -> files.File:
        file = tiny_file()
        file.add(name, array)
        return file

    return make


HOSTILE = {
    "wrong magic": changed(magic=b"GGML"),
    "version 1": changed(version=1),
    "version 4": changed(version=4),
    "big-endian": changed(version=0x03000000),
    "huge tensor count": changed(tensor_count=HUGE),
    "huge entry count": changed(entry_count=HUGE),
    "one tensor more than there is": changed(tensor_count=1000),
    "one entry more than there is": changed(entry_count=1000),
    "cut short": changed(tail=1),
    "cut in half": changed(tail=len(TINY) // 2),
    "cut in the header": changed(tail=len(TINY) - 100),
    "huge key": changed(extra_entries=[files.string("x", HUGE)]),
    "huge string": changed(extra_entries=[entry("x", 8, files.string("x", HUGE))]),
    "huge array": changed(extra_entries=[entry("x", 9, struct.pack("<IQ", 4, HUGE))]),
    "huge array of strings": changed(extra_entries=[entry("x", 9, struct.pack("<IQ", 8, HUGE))]),
    "array past the end": changed(extra_entries=[entry("x", 9, struct.pack("<IQ", 10, 1 << 22))]),
    "array of arrays": changed(extra_entries=[entry("x", 9, struct.pack("<IQ", 9, 1))]),
    "unknown value type": changed(extra_entries=[entry("x", 13, b"\0" * 8)]),
    "unknown item type": changed(extra_entries=[entry("x", 9, struct.pack("<IQ", 99, 1))]),
    "truth value of 2": changed(extra_entries=[entry("x", 7, b"\2")]),
    "key that is no UTF-8": changed(extra_entries=[files.string(b"\xff\xfe")]),
    "the same key twice": changed(extra_entries=[entry("general.architecture", 4, b"\0" * 4)]),
    "alignment 0": with_metadata("general.alignment", files.U32, 0),
    "alignment 24": with_metadata("general.alignment", files.U32, 24),
    "alignment text": with_metadata("general.alignment", files.STRING, "32"),
    "alignment 2^31": with_metadata("general.alignment", files.U32, 1 << 31),
    "offset past the end": changed(offsets={"output_norm.weight": 1 << 40}),
    "offset that overflows": changed(offsets={"output_norm.weight": 2**64 - 32}),
    "offset off the grid": changed(offsets={"output_norm.weight": 3}),
    "overlapping tensors": changed(offsets={"output_norm.weight": 0}),
    "dimensions that overflow": with_shape("output_norm.weight", (HUGE, 4)),
    "an empty dimension": with_shape("output_norm.weight", (0,)),
    "no dimensions": with_shape("output_norm.weight", ()),
    "five dimensions": with_shape("output_norm.weight", (1, 1, 1, 1, 32)),
    "rows of half a block": with_shape("blk.0.attn_v.weight", (32, 16)),
    "unknown tensor type": with_shape("output_norm.weight", (32,), 4),
    "tensor type 2^32-1": with_shape("output_norm.weight", (32,), 2**32 - 1),
    "quantized norm": with_shape("output_norm.weight", (32,), 2),
    "wrong shape": with_shape("output_norm.weight", (16,)),
    "missing tensor": without("tensors", "output_norm.weight"),
    "missing embedding": without("tensors", "token_embd.weight"),
    "unexpected tensor": with_values("blk.0.surprise.weight", np.zeros((4,))),
    "rope factors of no rule": with_values("rope_freqs.weight", np.array([1, 9, 2, 7.0])),
    "norm that is not a number": with_values("output_norm.weight", np.full(32, np.nan)),
    "norm beyond 16 bits": with_values("output_norm.weight", np.full(32, 1e30)),
    "missing family": without("metadata", "general.architecture"),
    "unknown family": with_metadata("general.architecture", files.STRING, "mystery"),
    "family that is a number": with_metadata("general.architecture", files.U32, 1),
    "no layers": with_metadata("llama.block_count", files.U32, 0),
    "a billion layers": with_metadata("llama.block_count", files.U32, 10**9),
    "no heads": with_metadata("llama.attention.head_count", files.U32, 0),
    "more kv heads than heads": with_metadata("llama.attention.head_count_kv", files.U32, 8),
    "three kv heads for four": with_metadata("llama.attention.head_count_kv", files.U32, 3),
    "odd head size": with_metadata("llama.attention.key_length", files.U32, 7),
    "no context": with_metadata("llama.context_length", files.U32, 0),
    "context as text": with_metadata("llama.context_length", files.STRING, "8192"),
    "context true": with_metadata("llama.context_length", files.BOOL, True),
    "rope base not a number": with_metadata("llama.rope.freq_base", files.F32, float("nan")),
    "rope base 0": with_metadata("llama.rope.freq_base", files.F32, 0.0),
    "rope partly": with_metadata("llama.rope.dimension_count", files.U32, 4),
    "rope scaling unknown": with_metadata("llama.rope.scaling.type", files.STRING, "magic"),
    "epsilon infinite": with_metadata(
        "llama.attention.layer_norm_rms_epsilon", files.F32, float("inf")
    ),
    "experts": with_metadata("llama.expert_count", files.U32, 8),
    "sentencepiece": with_metadata("tokenizer.ggml.model", files.STRING, "llama"),
    "unknown pre-tokenizer": with_metadata("tokenizer.ggml.pre", files.STRING, "none-such"),
    "no tokens": with_metadata("tokenizer.ggml.tokens", files.ARRAY, (files.STRING, [])),
    "tokens as numbers": with_metadata("tokenizer.ggml.tokens", files.ARRAY, (files.I32, [1])),
    "the same token twice": with_metadata(
        "tokenizer.ggml.tokens", files.ARRAY, (files.STRING, [*files.VOCABULARY[:-1], "he"])
    ),
    "too many tokens": with_metadata(
        "tokenizer.ggml.tokens", files.ARRAY, (files.STRING, [str(i) for i in range(999)])
    ),
    "token types too few": with_metadata(
        "tokenizer.ggml.token_type", files.ARRAY, (files.I32, [1])
    ),
    "merge of unknown pieces": with_metadata(
        "tokenizer.ggml.merges", files.ARRAY, (files.STRING, ["qq zz"])
    ),
    "merge without a space": with_metadata(
        "tokenizer.ggml.merges", files.ARRAY, (files.STRING, ["he"])
    ),
    "end token out of range": with_metadata("tokenizer.ggml.eos_token_id", files.U32, 1 << 20),
    "template as a number": with_metadata("tokenizer.chat_template", files.U32, 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_line_and_little_memory(case, tmp_path):
    path = HOSTILE[case]().write(tmp_path / "model.gguf")
    tracemalloc.start()
    try:
        with pytest.raises(BadModel) as caught:
            convert.convert(gguf.read(path), tmp_path, lambda done, total: None)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 24, b"GGUF" + b"\xff" * 60])
def test_files_that_are_no_gguf_are_refused(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModel):
        gguf.read(path)


def test_the_untouched_file_passes(tmp_path):
    assert (converted(tiny_file(), tmp_path) / "model.safetensors").is_file()


def outcome(data: bytes, directory: Path) -> None:
    """Success or ``BadModel``; anything else escapes and fails the test."""
    path = directory / "fuzzed.gguf"
    path.write_bytes(data)
    try:
        convert.convert(gguf.read(path), directory, lambda done, total: None)
    except BadModel as caught:
        refusal = str(caught)
    else:
        return
    assert "\n" not in refusal


FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(flips=st.lists(st.integers(0, len(TINY) * 8 - 1), min_size=1, max_size=8))
def test_flipped_bits_anywhere(flips, tmp_path):
    data = bytearray(TINY)
    for bit in flips:
        data[bit // 8] ^= 1 << (bit % 8)
    outcome(bytes(data), tmp_path)


HEADER = TINY.index(b"tokenizer.ggml.tokens")


@FUZZ
@given(data=st.data())
def test_replaced_fields_in_the_header(data, tmp_path):
    at = data.draw(st.integers(0, HEADER))
    number = data.draw(st.sampled_from([0, 1, 2, 8, 9, 255, 2**31, 2**32 - 1, HUGE, 2**64 - 1]))
    width = data.draw(st.sampled_from([1, 2, 4, 8]))
    patch = (number % (1 << (8 * width))).to_bytes(width, "little")
    outcome(TINY[:at] + patch + TINY[at + width :], tmp_path)


@FUZZ
@given(length=st.integers(0, len(TINY) - 1))
def test_every_length_but_the_whole_is_refused(length, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(TINY[:length])
    with pytest.raises(BadModel):
        gguf.read(path)


# --- the real one ---------------------------------------------------------------------------


@pytest.mark.real
def test_the_default_model_reads_as_it_should(real_model_dir):
    loaded = ModelPool().load(str(real_model_dir))
    tokenizer = loaded.tokenizer
    assert [
        tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ] == [0, 1, 2]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert tokenizer.eos_token_ids == {2}
    for text in [*TEXTS, *TEXTS[1].split()]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    seen = []
    for _ in range(8):
        seen.append(int(mx.argmax(loaded.model(mx.array([ids + seen]))[0, -1])))
    assert "Paris" in tokenizer.decode(seen)
