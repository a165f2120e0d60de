"""Small byte-level tokenizers with chat templates, for tests that need no real model.

``chatml_tokenizer`` has one token a byte whose id is the byte's value, so that ids can be read
and written by hand; ``bpe_tokenizer`` has real merges, so that text tokenises differently when
more text follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IM_START = 256
IM_END = 257

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, in byte order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    for shift, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(256 + shift)
    return [letters[byte] for byte in range(256)]


def chatml_tokenizer(
    template: str | None = CHATML,
    specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    words: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """One token a byte, ids 0..255 equal to the bytes' values, then the special tokens.

    Args:
        template: the chat template; None for a tokenizer without one.
        specials: control tokens, ids from 256 (after ``words``); the last one ends a generation.
        words: tokens that decode but that no text is encoded into, ids from 256.
    """
    letters = byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    for word in words:
        vocabulary["".join(letters[byte] for byte in word.encode())] = len(vocabulary)
    return _finish(Tokenizer(models.BPE(vocab=vocabulary, merges=[])), template, specials)


def bpe_tokenizer(
    corpus: Iterable[str],
    template: str | None = CHATML,
    specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    size: int = 600,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges learnt from ``corpus``, special tokens at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return _finish(tokenizer, template, specials)


def _finish(
    tokenizer: Tokenizer, template: str | None, specials: Sequence[str]
) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[-1], clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made
