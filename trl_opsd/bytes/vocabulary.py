"""The bytes that each token of a tokenizer stands for, proved on texts, and texts as tokens of exactly those bytes.

It knows no models.
"""

from __future__ import annotations

import random
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from os.path import commonprefix

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trl_opsd.bytes.covering import Cutter, valid_text
from trl_opsd.bytes.table import END, ROOT, ByteTable, CoveringTree, Numbers

_ANCHORS = ("\n", "a", ".", " ", "0", ";")
"""Texts before another one, which a tokenizer may not begin as the start of a text, with a space of its own."""
_TEXTS = (
    "Hello, world! It's 3.14 o'clock.",
    "def f(x):\n\treturn x  # comment\r\n\n    pass",
    "  two leading spaces, and trailing ones  ",
    "Größe, naïve, façade; Ελληνικά, Русский, 中文字符, 日本語, 한국어, العربية, हिन्दी",
    "\N{GRINNING FACE}\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4} and \N{PILE OF POO}!",
    '<b>not a token</b> {"key": [1, 2.5e-3, null]} \\frac{1}{2}',
    "MiXeD CaSe, ＦＵＬＬ width, ﬁ ligature, ① and ™, ½",
)
"""Texts of every kind, in the composed form (NFC) that most tokenizers turn text into."""


_CHARACTERS: dict[int, str] = bytes_to_unicode()
"""The characters that byte-level vocabularies write bytes as."""
_ALPHABET = {char: byte for byte, char in _CHARACTERS.items()}


def _byte_level(token: str) -> bytes | None:
    found = [_ALPHABET.get(char) for char in token]
    return None if None in found else bytes(one for one in found if one is not None)


def _sentence_piece(token: str) -> bytes:
    if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes([int(fallback[1], 16)])
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


_ALPHABETS: tuple[Callable[[str], bytes | None], ...] = (_byte_level, _sentence_piece, str.encode)


@dataclass(frozen=True)
class ByteVocabulary:
    """What each token of a tokenizer adds to a text.

    Raises:
        ValueError: The tokens of a text do not spell it: it is lowercased, decomposed or otherwise changed.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: tuple[bytes | None, ...]
    """The bytes of each id; `None` for special tokens and for ids that are no tokens."""
    special: frozenset[int]
    """Ids of special tokens."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, called: str, more: Iterable[str] = ()) -> ByteVocabulary:
        """Finds out what tokens stand for, and proves it on texts of many kinds, and on these."""
        wrong = 0, ""
        proofs = [*_TEXTS, *_drawn(), *(unicodedata.normalize("NFC", one) for one in more)]
        for alphabet in _ALPHABETS:
            found = cls._written_in(tokenizer, alphabet)
            failed = next((at for at, one in enumerate(proofs) if found.changed(one)), None)
            if failed is None:
                return found
            ids = found.ids_of(proofs[failed])
            read = tokenizer.decode(ids)
            if read == proofs[failed]:
                read = b"".join(one or b"" for one in found.spelled(ids)).decode(errors="replace")
            # Told of the alphabet that got furthest.
            wrong = max(wrong, (failed + 1, f"{proofs[failed]!r} becomes {read!r}"))
        raise ValueError(
            f"`cross_tokenizer='bytes'`: the tokens of {called} do not decode to the text they were made of: "
            f"{wrong[1]}. Text that a tokenizer changes (by lowercasing, NFKC, unknown words) has no next byte: use a "
            "model whose tokenizer keeps text as it is (byte-level BPE, or SentencePiece with byte fallback)."
        )

    @classmethod
    def _written_in(cls, tokenizer: PreTrainedTokenizerBase, alphabet: Callable[[str], bytes | None]) -> ByteVocabulary:
        added = tokenizer.added_tokens_decoder
        special = {number for number, one in added.items() if one.special} | set(tokenizer.all_special_ids)
        ids = tokenizer.get_vocab()
        texts: list[bytes | None] = [None] * (max(ids.values()) + 1)
        for token, number in ids.items():
            if number not in special:
                # Added tokens are text, but runs of spaces, which SentencePiece's also are, have its symbol.
                is_text = number in added and alphabet is _byte_level
                texts[number] = token.encode() if is_text else alphabet(token)
        # a token that adds nothing cannot be counted by the bytes that it adds
        special |= {number for number in ids.values() if not texts[number]}
        return cls(tokenizer, tuple(one or None for one in texts), frozenset(special))

    def within(self, rows: int) -> ByteVocabulary:
        """The tokens that a model with so many ids has: tokenizers may add some that it never learned."""
        return replace(self, texts=self.texts[:rows], special=frozenset(one for one in self.special if one < rows))

    @cached_property
    def digest(self) -> str:
        """Of the bytes of all tokens."""
        return sha256(repr(self.texts).encode()).hexdigest()

    def spelled(self, ids: Iterable[int]) -> list[bytes | None]:
        """The bytes of each token, `None` for special ones."""
        return [self.texts[one] if one < len(self.texts) else None for one in ids]

    def sizes(self, ids: Iterable[int]) -> list[int]:
        """The byte positions of each token."""
        return [len(one or b"-") for one in self.spelled(ids)]

    @cached_property
    def _specials(self) -> dict[str, int]:
        added = self.tokenizer.added_tokens_decoder
        return {str(added[one]): one for one in self.special if one in added}

    def changed(self, text: str) -> bool:
        """Whether the tokens of a text do not spell it."""
        return b"".join(one or b"" for one in self.spelled(self.ids_of(text))) != text.encode()

    def ids_of(self, text: str) -> list[int]:
        """The tokens of a text, as [`~ByteVocabulary.ids_of_each`] reads it."""
        return self.ids_of_each([text])[0]

    def ids_of_each(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, which continues another, without a space or a start token before it.

        Where the tokenizer changes the text, they spell it up to there.
        """
        best: list[list[int]] = [[] for _ in texts]
        agreed, left = [-1] * len(texts), [number for number, text in enumerate(texts) if text]
        for anchor in ("", *_ANCHORS):
            # All at once, which tokenizers do in several threads.
            each, missed = self._read([anchor + texts[number] for number in left]) if left else [], list[int]()
            for number, ids in zip(left, each, strict=True):
                text, before = texts[number].encode(), _without(self.spelled(ids), anchor.encode()) if anchor else 0
                if before is None:
                    missed.append(number)
                    continue
                ids = ids[before:]
                spelled = b"".join(one or b"\0" for one in self.spelled(ids))
                if spelled == text:
                    best[number] = ids
                    continue
                missed.append(number)
                if (same := len(commonprefix([spelled, text]))) > agreed[number]:  # noqa: RUF071 (bytes are meant)
                    best[number], agreed[number] = ids, same
            left = missed
        return best

    def _read(self, texts: list[str]) -> list[list[int]]:
        # what looks like a special token in a text is text
        given = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False)
        ids: list[list[int]] = given["input_ids"]
        return ids

    @cached_property
    def table(self) -> ByteTable:
        """The vocabulary as ranges of its sorted order."""
        return self._nodes[0]

    @cached_property
    def _nodes(self) -> tuple[ByteTable, tuple[Numbers, Numbers]]:
        """The table; and for each `256 * node + byte`, ascending, the node that it leads to."""
        order = sorted((text, number) for number, text in enumerate(self.texts) if text)
        children: dict[tuple[int, int], int] = {}
        lows, highs, last = [0], [len(order)], b""
        path = [ROOT]
        for rank, (text, _) in enumerate(order):
            same = 0
            for one, other in zip(text, last, strict=False):
                if one != other:
                    break
                same += 1
            for node in path[same + 1 :]:
                highs[node] = rank
            del path[same + 1 :]
            for byte in text[same:]:
                children[path[-1], byte] = node = len(lows)
                path.append(node)
                lows.append(rank)
                highs.append(len(order))
            last = text
        specials = sorted(self.special)
        parents, bytes_, nodes = np.array([(*pair, node) for pair, node in children.items()], np.int64).T
        low, high = np.array(lows)[nodes], np.array(highs)[nodes]
        keys = parents << 8 | bytes_
        by_key = keys.argsort()
        # The last key is none, so that a search for any finds one.
        steps = np.append(keys[by_key], np.iinfo(np.int64).max), np.append(nodes[by_key], ROOT)
        if specials:
            parents, bytes_ = np.append(parents, ROOT), np.append(bytes_, END)
            low, high = np.append(low, len(order)), np.append(high, len(order) + len(specials))
        by_node = np.lexsort((bytes_, parents))
        ids = [number for _, number in order] + specials
        rank_V = np.zeros(max(ids) + 1, np.int64)
        rank_V[ids] = np.arange(len(ids))
        length_V = np.array([1 if text is None else len(text) for text in self.texts])
        first = np.searchsorted(parents[by_node], np.arange(len(lows) + 1))
        columns = ids, rank_V, first, bytes_[by_node], low[by_node], high[by_node], length_V
        return ByteTable(*(torch.from_numpy(np.asarray(one, np.int32)) for one in columns)), steps

    @property
    def steps(self) -> tuple[Numbers, Numbers]:
        """For each `256 * node + byte` of the table, ascending, the node that it leads to; a last key that is none."""
        return self._nodes[1]

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self)

    def trees(self, rows: Sequence[Sequence[int]]) -> list[CoveringTree]:
        """Where other tokens than those of each row have borders; none is read yet."""
        return self._cutter.trees(rows)

    def retokenized(self, rows: Sequence[Sequence[int]], theirs: ByteVocabulary) -> list[tuple[list[int], int, bool]]:
        """What the tokens of another tokenizer spell, in these: of each row tokens, up to the text that they do not
        spell, how many byte positions both have, and whether a special token follows for which there is none here.

        A special token is the one of this name.
        """
        texts = [theirs.spelled(ids) for ids in rows]
        parts = [[(one, valid_text(one)[0]) for one in _between(each)] for each in texts]
        known = iter(self.ids_of_each([text for each in parts for _, text in each]))
        found = []
        for ids, each, some in zip(rows, parts, texts, strict=True):
            specials = [one for one, text in zip(ids, some, strict=True) if text is None]
            mine, agreed, lacks = list[int](), 0, False
            for number, (spelled, text, more) in enumerate([(*part, next(known)) for part in each]):
                read = b"".join(one or b"\0" for one in self.spelled(more))
                same = len(commonprefix([read, text.encode()]))  # noqa: RUF071 (bytes are meant)
                mine, agreed = mine + more, agreed + same
                if same < len(spelled) or number == len(specials):
                    break
                special = self._specials.get(str(theirs.tokenizer.convert_ids_to_tokens(specials[number])))
                if lacks := special is None:
                    break
                mine, agreed = [*mine, special], agreed + 1
            found.append((mine, agreed, lacks))
        return found

    def retold(self, ids: Sequence[int], theirs: ByteVocabulary) -> tuple[list[int], int]:
        """The tokens of what those of another tokenizer spell, up to the first byte that these do not; its place."""
        ((mine, agreed, _),) = self.retokenized([ids], theirs)
        ends = [*accumulate(self.sizes(mine), initial=0)]
        kept = bisect_right(ends, agreed) - 1
        return mine[:kept], ends[kept]

    def written(self, some: bytes) -> str:
        """Bytes as the tokens of a byte-level vocabulary write them."""
        return "".join(_CHARACTERS[byte] for byte in some)


def _without(texts: Sequence[bytes | None], anchor: bytes) -> int | None:
    """How many tokens spell an anchor, with a space before it or not; `None` if the next token does not begin there."""
    spelled = b""
    for number, text in enumerate(texts, 1):
        spelled += text or b""
        if spelled in (anchor, b" " + anchor):
            return number
        if len(spelled) > len(anchor) + 1:
            return None
    return None


def _between(texts: Sequence[bytes | None]) -> Iterator[bytes]:
    """The bytes before, between and after special tokens."""
    start = 0
    for end in [*(at for at, one in enumerate(texts) if one is None), len(texts)]:
        yield b"".join(one or b"" for one in texts[start:end])
        start = end + 1


def _drawn() -> list[str]:
    """Random texts, always the same, of characters from all over Unicode that have one form."""
    draw = random.Random(0)
    some = [*map(chr, range(32, 127)), *"\t\n éßñøжשعक字あ한𝄞\N{ROCKET}"]
    return ["".join(draw.choices(some, k=40)) for _ in range(20)]
