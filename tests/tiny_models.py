"""Tiny models with random weights, one for each way in which mlx-lm's models lay out their caches.

``build(name)`` gives a float32 model of a few layers whose logits depend measurably on every kind
of cached content: a stale row, a rolled window or a wrong state changes them. Windows and chunks
are 32 tokens, so that short prompts cross them.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import (
    CacheList,
    ConcatenateKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import mlx.nn as nn

SLOW = ("A_log", "recurrent_param")
"""Parameters that decide how fast a recurrent state forgets; small ones make it remember."""

GAINED = ("post_feedforward_layernorm", "post_per_layer_input_norm", "post_laurel_norm")
"""Norms of what a block adds: enlarged, so that it outweighs the embedding of the last token."""

VOCAB = 256
WINDOW = 32
HIDDEN = 64

BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


@dataclass(frozen=True)
class Family:
    """How to build a model.

    Attributes:
        arch: the module in ``mlx_lm.models``.
        config: what differs from ``BASE``.
        window: rows that its window or chunk layers keep; 0 without such layers.
        cache: makes the cache instead of the model, for classes that no model makes by itself.
        chunk: prompts have to be fed in steps of this many tokens for equal logits; 0 is any.
        tolerance: of logits, relative to the largest one, between two ways to compute the same.
    """

    arch: str
    config: Mapping[str, Any] = field(default_factory=dict)
    window: int = 0
    cache: Callable[[nn.Module], list[Any]] | None = None
    chunk: int = 0
    tolerance: float = 2e-5


def _each(make: Callable[[], Any]) -> Callable[[nn.Module], list[Any]]:
    return lambda model: [make() for _ in model.layers]


SLIDING, FULL = "sliding_attention", "full_attention"

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {"num_hidden_layers": 2}),
    "llama_sliding": Family(
        "llama",
        {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": WINDOW},
        WINDOW,
    ),
    "llama_rotating": Family(
        "llama",
        {"num_hidden_layers": 2},
        WINDOW,
        cache=_each(lambda: RotatingKVCache(max_size=WINDOW)),
    ),
    "llama_keep": Family(
        "llama",
        {"num_hidden_layers": 2},
        WINDOW,
        cache=_each(lambda: RotatingKVCache(max_size=WINDOW, keep=4)),
        chunk=1,  # several tokens in one step don't see the kept ones, single ones do
    ),
    "llama_quantized": Family(
        "llama",
        {"num_hidden_layers": 2, "head_dim": 32},
        cache=_each(lambda: QuantizedKVCache(group_size=32, bits=8)),
        tolerance=3e-3,  # a rounding error can move a value to the next of 255 levels
    ),
    "llama_concatenate": Family("llama", {"num_hidden_layers": 2}, cache=_each(ConcatenateKVCache)),
    "qwen3": Family("qwen3", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "gemma3_text": Family(
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
        },
        WINDOW,
    ),
    "gemma3n": Family(
        "gemma3n",
        {
            "text_config": {
                **BASE,
                "model_type": "gemma3n",
                "num_hidden_layers": 5,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB,
                "sliding_window": WINDOW,
                "rope_local_base_freq": 1e4,
                "final_logit_softcapping": 30.0,
                "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
                "activation_sparsity_pattern": [0.0] * 5,
                "hidden_size_per_layer_input": 16,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
                "intermediate_size": [128] * 5,
            }
        },
        WINDOW,
    ),
    "gemma4_text": Family(
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "tie_word_embeddings": False,
        },
        WINDOW,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        WINDOW,
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {
            "num_hidden_layers": 3,
            "num_experts_per_tok": 2,
            "hybrid_layer_pattern": [0, 1, 1],
            "moe_layer_freq": [0, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "moe_intermediate_size": 32,
            "n_shared_experts": None,
            "n_routed_experts": 4,
            "routed_scaling_factor": 1.0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 1e4,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "v_head_dim": 8,
            "swa_head_dim": 16,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.5,
        },
        WINDOW,
    ),
    "iquestloopcoder": Family(
        "iquestloopcoder", {"num_hidden_layers": 2, "loop_window_size": WINDOW}, WINDOW
    ),
    "afm7": Family(
        "afm7",
        {
            "hidden_dim": HIDDEN,
            "num_layers": 3,
            "num_kv_reuse_layers": 1,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
    ),
    "nanbeige": Family("nanbeige", {"num_hidden_layers": 2, "num_loops": 2}),
    "llama4": Family(
        "llama4",
        {
            "text_config": {
                **BASE,
                "model_type": "llama4_text",
                "attention_bias": False,
                "attention_chunk_size": WINDOW,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 128,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 4,
                "num_local_experts": 4,
                "rope_scaling": None,
                "use_qk_norm": True,
            }
        },
        WINDOW,
    ),
    "mamba": Family(
        "mamba",
        {
            "num_hidden_layers": 2,
            "state_size": 16,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": "auto",
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": Family(
        "mamba2",
        {
            "num_hidden_layers": 2,
            "num_heads": 8,
            "state_size": 16,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": (0.0, math.inf),
            "time_step_rank": "auto",
        },
    ),
    "rwkv7": Family(
        "rwkv7",
        {
            "num_hidden_layers": 2,
            "norm_eps": 1e-5,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
    ),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        {
            "num_hidden_layers": 3,
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "num_key_value_heads": 1,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        WINDOW,
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 32,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [],
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen3_5": Family(
        "qwen3_5",
        {
            "model_type": "qwen3_5",
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "kimi_linear": Family(
        "kimi_linear",
        {
            **MLA,
            "num_hidden_layers": 4,
            "model_max_length": 4096,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {
            **MLA,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "layer_group_size": 2,
            "group_norm_size": 1,
            "routed_scaling_factor": 1.0,
        },
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "attention_bias": False,
        },
    ),
    "lfm2": Family(
        "lfm2",
        {
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": HIDDEN,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", FULL, "conv"],
        },
    ),
    "gear": Family(
        "gear",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv_mixer", SLIDING, FULL, "conv_mixer"],
            "sliding_window": WINDOW,
        },
        WINDOW,
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            "num_hidden_layers": 3,
            "attention_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "attention_bias": False,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": ["M", "-", "*", "M"],
        },
    ),
    "jamba": Family(
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "mamba_d_head": 16,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "baichuan_m1": Family(
        "baichuan_m1",
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "sliding_window_layers": [0, 2],
            "conv_window": 2,
        },
        WINDOW,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **MLA,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        {
            **MLA,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "index_head_dim": 16,
            "index_n_heads": 4,
            "index_topk": 24,
        },
    ),
    "deepseek_v41": Family(
        "deepseek_v41",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,  # of no multiple of 16: its rows aren't rounded to eight or four bits
            "q_lora_rank": 48,
            "qk_rope_head_dim": 8,
            "o_groups": 2,
            "o_lora_rank": 32,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "compress_ratios": [0, 4, 4, 4],
            "kv_source_layer_ids": [1],
            "index_source_layer_ids": [1],
            "index_n_heads": 4,
            "index_head_dim": 24,
            "index_topk": 16,
            "hc_mult": 2,
        },
        WINDOW,
    ),
    "minimax_m3_vl": Family(
        "minimax_m3_vl",
        {
            "text_config": {
                **BASE,
                "dense_intermediate_size": 128,
                "shared_intermediate_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 3,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_layer_freq": [0, 1, 1],
                "sparse_attention_freq": [0, 1, 1],
                "index_n_heads": 2,
                "index_head_dim": 16,
                "index_block_size": 8,
                "index_topk_blocks": 2,
            }
        },
    ),
    "longcat_flash_ngram": Family(
        "longcat_flash_ngram",
        {
            **MLA,
            "ffn_hidden_size": 128,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 1,
            "num_layers": 2,
            "routed_scaling_factor": 1.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "ngram_vocab_size_ratio": 2,
            "emb_neighbor_num": 3,
            "emb_split_num": 2,
        },
    ),
}

SAME_LAYOUT = "the same cache classes, used in the same way, as "
NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(
        (
            "afmoe",
            "cohere2",
            "exaone4",
            "exaone_moe",
            "gemma3",
            "laguna",
            "mellum",
            "ministral3",
            "muse_glimmer",
            "muse_spark",
            "olmo3",
            "plamo3",
            "spark2_5",
            "step3p5",
        ),
        SAME_LAYOUT + "gemma3_text",
    ),
    "bailing_moe_linear": SAME_LAYOUT + "bailing_hybrid",
    "bailing_moe_v3": SAME_LAYOUT + "kimi_linear",
    "gemma4": SAME_LAYOUT + "gemma4_text",
    "kimi_k3": SAME_LAYOUT + "kimi_linear",
    "lfm2-vl": SAME_LAYOUT + "lfm2",
    "lfm2_moe": SAME_LAYOUT + "lfm2",
    "longcat_flash": SAME_LAYOUT + "deepseek_v32",
    "nemotron-nas": SAME_LAYOUT + "llama, with fewer caches than layers as in nemotron_h",
    "plamo2": SAME_LAYOUT + "jamba",
}
"""Modules of mlx-lm that make caches of their own and aren't built, and why."""


def build(name: str, seed: int = 0) -> nn.Module:
    """The family's model with weights drawn from ``seed``, evaluated, float32."""
    family = FAMILIES[name]
    arch = importlib.import_module(f"mlx_lm.models.{family.arch}")
    config = {"model_type": family.arch, **BASE, **family.config}
    model = arch.Model(arch.ModelArgs.from_dict(config))
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(weights))
    model.update(
        tree_unflatten(
            [(path, _drawn(path, w, key)) for (path, w), key in zip(weights, keys, strict=True)]
        )
    )
    if family.cache is not None:
        make = family.cache
        model.make_cache = lambda: make(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def _drawn(path: str, weight: mx.array, key: mx.array) -> mx.array:
    """Random values for one parameter, of a size that keeps activations near 1."""
    noise = mx.random.normal(weight.shape, key=key)
    leaf = path.rpartition(".")[2]
    if weight.dtype != mx.float32:
        return weight
    if leaf in SLOW or path.endswith("w_lora.lora.2.bias"):
        return weight - 4 + 0.5 * noise
    if any(part in path for part in GAINED):
        return weight * 3 + 0.1 * noise
    if leaf in ("dt_bias", "time_step_bias") or path.endswith("dt_proj.bias"):
        return noise * 0.5 - 2  # softplus of it is about 0.1: a state lasts some tens of tokens
    if weight.ndim < 2:
        return weight + 0.1 * noise
    if weight.shape[0] == VOCAB:
        return noise * (2 / math.sqrt(HIDDEN))  # logits with a deviation of about 2
    fan_in = math.prod(weight.shape[1:]) if "conv" in leaf or "conv" in path else weight.shape[-1]
    return noise * (1.5 / math.sqrt(fan_in))


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The caches of a model with those inside a ``CacheList`` instead of the list."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from leaves(layer.caches)
        else:
            yield layer


def cache_classes(model: nn.Module) -> tuple[str, ...]:
    """What each entry of the model's cache is, such as ``CacheList(ArraysCache, KVCache)``."""

    def named(layer: Any) -> str:
        inner = ", ".join(map(named, layer.caches)) if isinstance(layer, CacheList) else ""
        return type(layer).__name__ + (f"({inner})" if inner else "")

    return tuple(map(named, make_prompt_cache(model)))
