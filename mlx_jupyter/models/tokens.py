"""A ``tokenizer.json`` made from a GGUF file's metadata.

Byte-level BPE vocabularies only. The text is cut before BPE by the rule that the model was
trained with; GGUF names that rule (``tokenizer.ggml.pre``) without spelling it out, so the known
names are listed here and an unknown one is refused, since a wrong rule gives wrong tokens quietly.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from mlx_jupyter.models.gguf import GGUF

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # values of tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST

# ``tokenizer.ggml.pre`` → how text is cut: "gpt2", "digits" (each digit alone, then gpt2), or a
# regular expression.
_CUTS = {
    "gpt-2": "gpt2",
    "default": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "codeshell": "digits",
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe"})  # a word in the vocabulary isn't cut


def write_tokenizer(source: GGUF, directory: Path, context: int) -> list[int]:
    """Write the tokenizer's files into ``directory``.

    Args:
        source: the checked GGUF file.
        directory: an MLX model directory in the making.
        context: the model's context length, written as the tokenizer's too.

    Returns:
        The ids that end an answer.

    Raises:
        BadModel: the vocabulary is inconsistent or of a kind that isn't supported.
    """
    vocabulary = _vocabulary(source)
    kinds = _kinds(source, len(vocabulary))
    _build(source, vocabulary, kinds).save(str(directory / "tokenizer.json"))
    special = {
        role: _special(source, role, vocabulary)
        for role in ("bos", "eos", "unknown", "padding", "eot", "eom")
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if (at := special[role]) is not None:
            config[f"{name}_token"] = vocabulary[at]
    if "tokenizer.chat_template" in source.metadata:
        config["chat_template"] = source.text("tokenizer.chat_template")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    ends = [special[role] for role in ("eos", "eot", "eom")]
    return list(dict.fromkeys(end for end in ends if end is not None))


def _vocabulary(source: GGUF) -> list[str]:
    kind = source.text("tokenizer.ggml.model")
    if kind != "gpt2":
        source.bad(f"its tokenizer kind {kind[:40]!r} isn't supported, only byte-level BPE is")
    vocabulary = source.strings("tokenizer.ggml.tokens")
    if not vocabulary or len(set(vocabulary)) != len(vocabulary) or "" in vocabulary:
        source.bad("its vocabulary is empty or has the same token twice")
    return vocabulary


def _kinds(source: GGUF, count: int) -> np.ndarray | None:
    kinds = source.numbers("tokenizer.ggml.token_type")
    if kinds is not None and (len(kinds) != count or kinds.dtype.kind not in "iu"):
        source.bad(f"it has {count:,} tokens but {len(kinds):,} token types")
    return kinds


def _special(source: GGUF, role: str, vocabulary: list[str]) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in source.metadata:
        return None
    return source.integer(key, 0, len(vocabulary) - 1)


def _merges(source: GGUF, known: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in source.strings("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left not in known or right not in known or left + right not in known:
            source.bad(f"the merge {line[:40]!r} isn't in its vocabulary")
        merges.append((left, right))
    return merges


def _build(source: GGUF, vocabulary: list[str], kinds: np.ndarray | None) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import ByteLevel as ByteLevelProcessor
    from tokenizers.processors import Sequence, TemplateProcessing

    rule = source.text("tokenizer.ggml.pre", "default")
    if rule not in _CUTS:
        source.bad(f"its pre-tokenizer {rule[:40]!r} isn't supported")
    known = {token: i for i, token in enumerate(vocabulary)}
    merges = _merges(source, known)
    whole = rule in _WHOLE_WORDS
    built = Tokenizer(models.BPE(vocab=known, merges=merges, ignore_merges=whole))
    space = source.flag("tokenizer.ggml.add_space_prefix", default=False)
    cut = _CUTS[rule]
    if cut in ("gpt2", "digits"):
        stages: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=True)]
        if cut == "digits":
            stages.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        stages = [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False),
        ]
    built.pre_tokenizer = pre_tokenizers.Sequence(stages)
    built.decoder = decoders.ByteLevel()
    processor: Any = ByteLevelProcessor(trim_offsets=True)
    if source.flag("tokenizer.ggml.add_bos_token", default=whole):
        at = _special(source, "bos", vocabulary)
        if at is None:
            source.bad("it asks for a token at the start of each text but names none")
        first = TemplateProcessing(
            single=[vocabulary[at], "$A"], special_tokens=[(vocabulary[at], at)]
        )
        processor = Sequence([processor, first])
    built.post_processor = processor
    marked = list(enumerate(kinds.tolist())) if kinds is not None else []
    control = [vocabulary[i] for i, kind in marked if kind in (_UNKNOWN, _CONTROL)]
    user = [vocabulary[i] for i, kind in marked if kind == _USER]
    built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    built.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    if built.get_vocab_size() != len(vocabulary):
        source.bad("its special tokens don't agree with its vocabulary")
    return built
