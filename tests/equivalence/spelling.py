"""What the tokens of a byte-level tokenizer stand for, and the next byte after them, in float64 and one row at a time.

N tokens of a completion · V vocabulary · P byte positions
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

OUTCOMES = 257
"""The bytes, and the end of the text or any other special token (docs/tokenizers.md)."""
FLOOR, BORDERS = 1e-6, 3
"""Added to the probability of each outcome; tokens that borders reach back."""


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

    def _after(self, begun: bytes) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that begin with these bytes and go on, the outcome of each; and those that are just the bytes."""
        on = [
            (number, OUTCOMES - 1 if text is None else text[len(begun)])
            for number, text in enumerate(self.texts)
            if (not begun if text is None else text.startswith(begun) and len(text) > len(begun))
        ]
        whole = [number for number, text in enumerate(self.texts) if begun and text == begun]
        ids, outcomes = torch.tensor(on, dtype=torch.long).reshape(-1, 2).unbind(1)
        return ids, outcomes, torch.tensor(whole, dtype=torch.long)

    def next_bytes(self, logs_NV: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """[P, 257], log-probabilities; [P], what is missed; and the token of each position."""
        probs = logs_NV.exp()
        found, escapes, token = [], [], []
        for at, number in enumerate(ids):
            text = self.texts[number]
            first = max([0, at - BORDERS, *(one + 1 for one in range(at) if self.texts[ids[one]] is None)])
            for end in range(1 if text is None else len(text)):
                here = b"" if text is None else text[:end]
                mass = torch.zeros(OUTCOMES, dtype=torch.float64)
                for border in range(first, at + 1):
                    begun = b"".join(self.texts[one] for one in ids[border:at]) + here  # type: ignore[misc]
                    those, outcomes, _ = self.after(begun)
                    path = sum((logs_NV[one, ids[one]] for one in range(border, at)), torch.zeros(()))
                    mass = mass.index_add(0, outcomes, probs[border, those] * (-path).exp())
                found.append((mass / mass.sum() + FLOOR).log().log_softmax(-1))
                those, _, whole = self.after(here)
                missed = float(probs[at, whole].sum().detach())
                escapes.append(missed / (missed + float(probs[at, those].sum().detach())))
                token.append(at)
        return torch.stack(found), torch.tensor(escapes), token
