"""What the tokens of a byte-level tokenizer stand for, and the next byte after them, in float64 and one row at a time.

N tokens of a completion · V vocabulary · K nodes · P byte positions
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

OUTCOMES = 257
"""The bytes, and the end of the text or any other special token (docs/tokenizers.md)."""
FLOOR = 1e-6
"""Added to the probability of each outcome."""


def _letters() -> dict[str, int]:
    """The byte of each letter of a byte-level tokenizer, as in GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Spelling:
    """What the tokens of a byte-level tokenizer stand for."""

    def __init__(self, words: Any) -> None:
        letters, self.words = _letters(), words
        tokens = words.convert_ids_to_tokens(list(range(len(words))))
        special = set(words.all_special_ids)
        self.texts = [
            None if number in special else bytes(letters[one] for one in token) for number, token in enumerate(tokens)
        ]
        self.after = lru_cache(None)(self._after)

    def _after(self, begun: bytes) -> tuple[Tensor, Tensor]:
        """The tokens that begin with these bytes and go on, and the outcome of each."""
        on = [
            (number, OUTCOMES - 1 if text is None else text[len(begun)])
            for number, text in enumerate(self.texts)
            if (not begun if text is None else text.startswith(begun) and len(text) > len(begun))
        ]
        ids, outcomes = torch.tensor(on, dtype=torch.long).reshape(-1, 2).unbind(1)
        return ids, outcomes

    def nodes(self, ids: Sequence[int]) -> dict[tuple[int, ...], int]:
        """The tokens up to each border that counts, and how many bytes they are.

        Borders are the row's own, and those of the tokens that the tokenizer gives for each beginning of its text.
        Where no token has two bytes side by side, all sequences have a border, from which on a beginning is read.
        """
        texts = [self.texts[one] for one in ids]
        ends = {len(b"".join(one or b"-" for one in texts[:size])): size for size in range(len(ids) + 1)}
        text, found, start = b"".join(one or b"\0" for one in texts), {tuple(ids[:size]) for size in ends.values()}, 0
        for place in range(1, len(text)):
            size = ends.get(place)
            special = size is not None and None in texts[size - 1 : size + 1]
            if size is not None and (special or text[place - 1 : place + 1] not in self._pairs):
                start = place
            elif text[start:place].decode(errors="replace").encode() == text[start:place]:
                path = (*ids[: ends[start]], *self.words(text[start:place].decode())["input_ids"])
                found |= {path[:some] for some in range(len(path) + 1)}
        return {path: len(b"".join(self.texts[one] or b"-" for one in path)) for path in sorted(found)}

    @cached_property
    def _pairs(self) -> set[bytes]:
        return {text[at : at + 2] for text in self.texts if text for at in range(len(text) - 1)}

    def next_bytes(
        self, ids: Sequence[int], nodes: dict[tuple[int, ...], int], logs_KV: Tensor
    ) -> tuple[Tensor, list[int]]:
        """[P, 257], log-probabilities, from what a model says after each node; and the token of each position."""
        number = {path: one for one, path in enumerate(nodes)}
        none = torch.zeros(())
        path_K = [sum((logs_KV[number[path[:at]], one] for at, one in enumerate(path)), none) for path in nodes]
        own = [number[tuple(ids[:at])] for at in range(len(ids))]
        text = b"".join(self.texts[one] or b"\0" for one in ids)
        special = [at for at in range(len(ids)) if self.texts[ids[at]] is None]
        places, found, token = list(nodes.values()), [], []
        for at, one in enumerate(ids):
            for position in range(places[own[at]], places[own[at]] + len(self.texts[one] or b"-")):
                mass = torch.zeros(OUTCOMES, dtype=torch.float64)
                first = max([0, *(places[own[one]] + 1 for one in special if one < at)])
                for node, place in enumerate(places):
                    if first <= place <= position:
                        those, outcomes = self.after(text[place:position])
                        share = (path_K[node] - path_K[own[at]]).exp()
                        mass = mass.index_add(0, outcomes, logs_KV[node, those].exp() * share)
                found.append((mass / mass.sum() + FLOOR).log().log_softmax(-1))
                token.append(at)
        return torch.stack(found), token
