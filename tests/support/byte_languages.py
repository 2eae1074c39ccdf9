"""Vocabularies and languages over bytes that are small enough to know everything about them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
from support import tiny
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


def wide_vocabulary() -> ByteVocabulary:
    """A vocabulary of 171 tokens in no order, whose ranges are up to 85 long."""
    texts = [bytes(one) for length in (1, 2, 3, 4) for one in product(b"abc", repeat=length)]
    texts += [b"\xff" + one for one in texts[:50]]
    random.Random(0).shuffle(texts)
    return ByteVocabulary(SimpleNamespace(), (None, *texts), frozenset({0}))  # type: ignore[arg-type]


def byte_pairs(merges: int, *, start: int = 0, special: tuple[str, ...] = ("<|im_end|>",)) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges learned from the license, the first ones left out of it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(alphabet) + len(special) + merges
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([_text()[start:]], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], pad_token=special[0], chat_template=tiny.CHAT_TEMPLATE
    )


class Language:
    """Finitely many texts with probabilities, of which both the next byte and the next token are known."""

    def __init__(self, texts: int = 1500, seed: int = 0) -> None:
        draw = random.Random(seed)
        words = sorted(set(re.findall(r"[A-Za-z`(]{3,9}", _text())))[::7][:120]
        weights = {" ".join(draw.choices(words, k=4)): draw.random() ** 2 + 0.01 for _ in range(texts)}
        self.texts = {text: weight / sum(weights.values()) for text, weight in weights.items()}

    def next_bytes(self, text: str) -> torch.Tensor:
        """[bytes + 1, 257], float64: the distribution of each byte of a text, given those before it, and of its end."""
        found = torch.zeros(len(text.encode()) + 1, 257, dtype=torch.float64)
        for other, share in self.texts.items():
            for at in range(_common(text.encode(), other.encode()) + 1):
                found[at, [*other.encode(), 256][at]] += share
        return found / found.sum(1, keepdim=True)

    def logits(self, text: str, vocabulary: ByteVocabulary) -> tuple[list[int], torch.Tensor]:
        """The tokens of a text and the end, and what a model that is the language predicts for each, [N, V]."""
        end = vocabulary.tokenizer.eos_token_id
        own = [*vocabulary.ids_of(text), end]
        found = torch.zeros(len(own), len(vocabulary.texts), dtype=torch.float64)
        for other, share in self.texts.items():
            ids = [*_ids(vocabulary, other), end]
            for at in range(min(_common(own, ids) + 1, len(own))):
                found[at, ids[at]] += share
        return own, (found / found.sum(1, keepdim=True)).log().clamp(min=-60).float()


@cache
def _ids(vocabulary: ByteVocabulary, text: str) -> list[int]:
    return vocabulary.ids_of(text)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _text() -> str:
    # Which does not change: a page of docs/ would change what the tests measure.
    return Path(__file__).parents[2].joinpath("LICENSE").read_text()
