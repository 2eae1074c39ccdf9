"""Vocabularies and languages over bytes that are small enough to know everything about them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_opsd.data.byte_vocabulary import ByteVocabulary

WORDS = (
    b"a",
    b"b",
    b"c",
    b" ",
    b"ab",
    b"abc",
    b"abcab",
    b" a",
    b" ab",
    b"ca",
    b"cab",
    b"bb",
    b"\xff",
    b"\xffa",
    b"bca",
)


def small_vocabulary() -> ByteVocabulary:
    """A vocabulary with two special tokens, and tokens that begin like others."""
    texts = (None, *WORDS, None)
    return ByteVocabulary(SimpleNamespace(), texts, frozenset({0, len(texts) - 1}))  # type: ignore[arg-type]


def byte_pairs(merges: int, *, start: int = 0, special: tuple[str, ...] = ("<|im_end|>",)) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges learned from a text of this project, the first ones left out of it."""
    text = Path(__file__).parents[1].joinpath("docs/design.md").read_text()[start:]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(alphabet) + len(special) + merges
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], pad_token=special[0], chat_template=tiny.CHAT_TEMPLATE
    )
