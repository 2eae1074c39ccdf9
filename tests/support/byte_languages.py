"""Vocabularies and languages over bytes that are small enough to know everything about them."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from support import tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_opsd.bytes.table import CoveringTree
from trl_opsd.bytes.vocabulary import ByteVocabulary


def of_merges(merges: Sequence[tuple[bytes, bytes]], *, splits: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with two special tokens and these merges; where it `splits`, none goes across words."""
    vocabulary = ByteVocabulary(SimpleNamespace(), (), frozenset())  # type: ignore[arg-type]
    pairs = [(vocabulary.written(one), vocabulary.written(other)) for one, other in merges]
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokens = dict.fromkeys(["<s>", *sorted(letters), *(one + other for one, other in pairs), "</s>"])
    backend = Tokenizer(models.BPE({one: number for number, one in enumerate(tokens)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


def small_vocabulary() -> ByteVocabulary:
    """A vocabulary with two special tokens, and tokens that begin like others."""
    pairs = [b"a b", b"ab c", b"abc ab", b"_ a", b"_ ab", b"c a", b"ca b", b"b b", b"\xff a", b"b ca"]
    merges = [tuple(part.replace(b"_", b" ") for part in one.split(b" ")) for one in pairs]
    return ByteVocabulary.of(of_merges(merges), "it")


def wide_vocabulary() -> ByteVocabulary:
    """A vocabulary of 420 tokens in no order, whose ranges are up to 40 long."""
    texts = [bytes(one) for length in (2, 3, 4) for one in product(b"abc", repeat=length)]
    merges = [(one[:-1], one[-1:]) for one in texts] + [(b"\xc3", b"\xa9"), (b"\xc3\xa9", b"ab")]
    return ByteVocabulary.of(of_merges(merges), "it")


def outcomes(vocabulary: ByteVocabulary, ids: Sequence[int]) -> list[int]:
    """The bytes of tokens, 256 for special ones."""
    return [one for text in vocabulary.spelled(ids) for one in ([256] if text is None else text)]


def nodes_of(tree: CoveringTree, ids: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Of each state of a tree, in their order, the position and the path, as the dense loss takes them."""
    offsets = numpy.searchsorted(tree.token, numpy.arange(tree.tokens)).tolist()
    read = tree.read.nonzero()[0].tolist()
    nodes = [(offset, number) for number, offset in enumerate(offsets)]
    nodes += [(int(tree.fork[one, 0]), tree.tokens + one) for one in read]
    nodes.sort(key=lambda node: node[0])
    state = {node: number for number, (_, node) in enumerate(nodes)}

    def path(node: int) -> list[tuple[int, int]]:
        if node < tree.tokens:
            return [(state[one], ids[one]) for one in range(node)]
        _, parent, token = tree.fork[node - tree.tokens].tolist()
        return [*path(parent), (state[parent], token)]

    return [(offset, path(node)) for offset, node in nodes]


def dense_byte_logarithms(
    logits_SV: torch.Tensor,
    texts: Sequence[bytes | None],
    outcomes: Sequence[int],
    nodes: Sequence[tuple[int, Sequence[tuple[int, int]]]],
    floor: float,
) -> torch.Tensor:
    """What `byte_logarithms` must equal, [P, 257], with a loop over all tokens for each byte, in float64.

    `texts` are the bytes of each id, `None` for special tokens; ids beyond them do not exist. `outcomes` are the bytes
    of a row, 256 for a special token, and `nodes`, for each state, the position before which it is, and what leads
    there from the row's begin: states and the tokens that follow them.
    """
    log_SV = logits_SV[:, : len(texts)].double().log_softmax(-1)
    path_S = torch.stack([sum((log_SV[one, token] for one, token in path), log_SV.new_zeros(())) for _, path in nodes])
    found = []
    for position in range(len(outcomes)):
        masses = [log_SV.new_zeros(()) for _ in range(257)]
        here = [one for one, (place, _) in enumerate(nodes) if place <= position]
        highest = float(path_S[max(here, key=lambda one: nodes[one][0])].detach())
        for one in here:
            since = outcomes[nodes[one][0] : position]
            for token, text in enumerate(texts):
                if 256 in since or (text is not None and (len(text) <= len(since) or [*text[: len(since)]] != since)):
                    continue
                if text is None and since:
                    continue
                outcome = 256 if text is None else text[len(since)]
                masses[outcome] = masses[outcome] + (path_S[one] - highest + log_SV[one, token]).exp()
        total = torch.stack(masses)
        found.append((total / total.sum() + floor).log())
    return torch.stack(found)


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

    def __init__(self, texts: Mapping[str, float]) -> None:
        self.texts = {text: weight / sum(texts.values()) for text, weight in texts.items()}
        self._bytes = _Prefixes({(*text.encode(), 256): share for text, share in self.texts.items()})
        self._tokens: dict[int, _Prefixes] = {}

    @classmethod
    def of_sentences(cls, texts: int = 1500, seed: int = 0) -> Language:
        """Sentences of four of 120 words."""
        draw = random.Random(seed)
        words = sorted(set(re.findall(r"[A-Za-z`(]{3,9}", _text())))[::7][:120]
        return cls({" ".join(draw.choices(words, k=4)): draw.random() ** 2 + 0.01 for _ in range(texts)})

    def next_bytes(self, text: str) -> torch.Tensor:
        """[bytes + 1, 257], float64: the distribution of each byte of a text, given those before it, and of its end."""
        outcomes = (*text.encode(), 256)
        return torch.stack([self._bytes.after(outcomes[:at], 257) for at in range(len(outcomes))])

    def tokens(self, vocabulary: ByteVocabulary) -> _Prefixes:
        """What a model that is the language predicts after each beginning of the tokens of its texts."""
        if id(vocabulary) not in self._tokens:
            end = vocabulary.tokenizer.eos_token_id
            each = vocabulary.ids_of_each(list(self.texts))
            shares = {(*ids, end): share for ids, share in zip(each, self.texts.values(), strict=True)}
            self._tokens[id(vocabulary)] = _Prefixes(shares)
        return self._tokens[id(vocabulary)]

    def logits(self, text: str, vocabulary: ByteVocabulary) -> tuple[list[int], torch.Tensor]:
        """The tokens of a text and the end, and what a model that is the language predicts for each, [N, V]."""
        own = [*vocabulary.ids_of(text), vocabulary.tokenizer.eos_token_id]
        after = [self.tokens(vocabulary).after(tuple(own[:at]), len(vocabulary.texts)) for at in range(len(own))]
        return own, torch.stack(after).log().clamp(min=-60).float()

    def states(self, vocabulary: ByteVocabulary, ids: Sequence[int], tree: CoveringTree) -> torch.Tensor:
        """What such a model predicts after each state of a tree, [S, V]."""
        model, size = self.tokens(vocabulary), len(vocabulary.texts)
        paths = (tuple(token for _, token in path) for _, path in nodes_of(tree, ids))
        return torch.stack([model.after(path, size) for path in paths]).log().clamp(min=-60).float()


class _Prefixes:
    """The distribution of what comes next, after each beginning of sequences with probabilities."""

    def __init__(self, shares: Mapping[tuple[int, ...], float]) -> None:
        self.next: dict[tuple[int, ...], dict[int, float]] = {}
        for ids, share in shares.items():
            for at, one in enumerate(ids):
                here = self.next.setdefault(ids[:at], {})
                here[one] = here.get(one, 0.0) + share

    def after(self, ids: tuple[int, ...], size: int) -> torch.Tensor:
        """[size], float64; uniform after what never begins a sequence."""
        found = torch.zeros(size, dtype=torch.float64)
        if not (here := self.next.get(ids)):
            return found + 1 / size
        found[list(here)] = torch.tensor(list(here.values()), dtype=torch.float64)
        return found / found.sum()


THE_WORDS = ["the", "they", "there", "then", "a", "at", "ate", "cat", "cats", "he", "her", "heat"]
CJK_WORDS = ["中文", "中国", "文字", "字", "国", "丏", "丐人", "人中", "㐀", "天下"]
PATTERNS = {
    "GPT-2": "",
    "Qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How tokenizers cut text into pieces, within which bytes are merged; that of GPT-2 is built in."""


def small_languages() -> dict[str, tuple[Language, ByteVocabulary, ByteVocabulary]]:
    """Languages that are known in full, each with the tokenizers of two models, of which one has more merges."""
    three = [" ".join(one) for one in product(THE_WORDS, repeat=3)]
    strings = ["".join(one) for length in range(1, 8) for one in product("ab", repeat=length)]
    sums = [f"{one}+{other}={one + other}" for one in range(0, 130, 9) for other in range(0, 1100, 61)]
    written = ["".join(one) for one in product(CJK_WORDS, repeat=3)]
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\n  "]
    tables = ["".join(one) for one in product(["x", "if"], spaces, ["1", "12", "x", "="], spaces, ["7", "x", "", "\n"])]
    draw = random.Random(0)
    found = {}
    for name, texts, splits, sizes in (
        ("words", three, ("GPT-2", "GPT-2"), (16, 4)),
        ("words, joined", three, (None, None), (28, 4)),
        ("strings", strings, (None, None), (6, 3)),
        ("digits", sums, (None, None), (60, 12)),
        ("CJK", written, (None, None), (24, 7)),
        ("spaces", tables, ("Qwen2", "GPT-2"), (24, 9)),
    ):
        shares = {one: draw.random() ** 2 + 0.02 for one in texts}
        both = [ByteVocabulary.of(trained_pairs(texts, *one), name) for one in zip(sizes, splits, strict=True)]
        found[name] = (Language(shares), *both)
    return found


def trained_pairs(texts: Sequence[str], merges: int, splits: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the merges that are frequent in the pieces of these texts, or in the whole texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits == "GPT-2")
    if splits and PATTERNS[splits]:
        pieces = pre_tokenizers.Split(Regex(PATTERNS[splits]), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + 1 + merges, special_tokens=["</s>"], initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def _text() -> str:
    # Which does not change: a page of docs/ would change what the tests measure.
    return Path(__file__).parents[2].joinpath("LICENSE").read_text()
