"""Which rows may be read in one batch, found by trying; this file knows tensors, and neither models nor rollouts.

S tokens of a short row · L of a long one, L > S · H hidden width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Read = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Token ids, attention mask and positions (`None`: as the mask counts them), all [n, L], to hidden states [n, L, H]."""

_SHORT, _LEFT, _WIDTH = 5, 4, 16
"""Tokens of the short row, padding before it, and tokens of the row beside it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Which rows a model reads together, so that each is read as it would be alone."""

    padded_up_to: float = math.inf
    """Rows of so many tokens and fewer may be padded to one length."""
    shares: bool = True
    """Whether longer rows of one length may share a batch. Otherwise each is read by itself."""

    def __str__(self) -> str:
        longer = "rows of one length together" if self.shares else "one row at a time"
        if self.padded_up_to == math.inf:
            return "padded"
        return f"padded up to {self.padded_up_to} tokens, beyond {longer}" if self.padded_up_to else longer

    def groups(self, lengths: Sequence[int], collective: bool) -> list[list[int]]:
        """Splits rows into those that are read together.

        Args:
            lengths (`Sequence[int]`):
                Tokens of each row.
            collective (`bool`):
                Whether a forward pass is collective. All processes, with as many rows each, then get as many groups.

        Returns:
            `list[list[int]]`: numbers of rows.

        Raises:
            ValueError: They cannot be given as many groups.
        """
        if collective and 0 < self.padded_up_to < max(lengths, default=0):
            raise ValueError(
                f"A row can have {max(lengths)} tokens, but beyond {self.padded_up_to} this model computes the rows of "
                "a batch differently and reads them apart, for which a model that is split over processes would need "
                "all of them together: lower `max_completion_length`, leave out prompts that are longer, or do not "
                "split the model."
            )
        groups: dict[tuple[int, int], list[int]] = {}
        for row, length in enumerate(lengths):
            if length <= self.padded_up_to:
                key = (0, 0)
            else:
                key = (length, 0) if self.shares and not collective else (length, row)
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def groups_to_continue(self, prompts: Sequence[int], rooms: Sequence[int], collective: bool) -> list[list[int]]:
        """As [`~Reading.groups`], for prompts of these lengths after each of which so many tokens may be written."""
        if not self.padded_up_to:
            return self.groups(prompts, collective)
        # Rows that start together may not pass the border together.
        apart = Reading(self.padded_up_to, shares=False)
        return apart.groups([sum(both) for both in zip(prompts, rooms, strict=True)], collective)


PADDED = Reading()


def prove_reading(read: Read, vocabulary: int, device: torch.device, borders: Collection[int], called: str) -> Reading:
    """Finds out by computing which rows can share a batch: a row must have the states that it has alone.

    Args:
        read (`Callable`):
            Runs the model.
        vocabulary (`int`):
            Token ids to choose from.
        device (`torch.device`):
            Where the model expects its inputs.
        borders (`Collection[int]`):
            Positions beyond which the model may compute differently.
        called (`str`):
            The model, for a message.

    Raises:
        ValueError: A row is not even read the same twice, or a token is read differently for what comes after it.
    """
    ids_L = torch.arange(1, _WIDTH + 1, device=device).mul(vocabulary // (_WIDTH + 1))
    alone_SH = _plain(read, ids_L[None, :_SHORT])[0]
    short_S = slice(_LEFT, _LEFT + _SHORT)
    pair_2L = torch.stack([ids_L.roll(_LEFT), ids_L])
    mask_2L = torch.ones_like(pair_2L)
    mask_2L[0] = 0
    mask_2L[0, short_S] = 1
    beside_SH, begun_LH = read(pair_2L * mask_2L, mask_2L, None)
    if agree(beside_SH[short_S], alone_SH) and agree(begun_LH[:_SHORT], alone_SH):
        return _within_borders(read, ids_L[:_SHORT], borders)
    if gap := _gap(_plain(read, ids_L[None, :_SHORT])[0], alone_SH, called, "when it is read a second time"):
        raise ValueError(gap)
    if gap := _gap(_plain(read, ids_L[None])[0, :_SHORT], alone_SH, called, "when more tokens follow"):
        raise ValueError(gap)
    together_SH = _plain(read, torch.stack([ids_L[:_SHORT], ids_L[_SHORT : 2 * _SHORT]]))[0]
    return Reading(0, shares=agree(together_SH, alone_SH))


def _within_borders(read: Read, ids_S: Tensor, borders: Collection[int]) -> Reading:
    """Puts a row beside one whose positions lie beyond a border: memory for so many tokens is not needed to try it."""
    if not borders:
        return PADDED
    ids_2S = torch.stack([ids_S, ids_S])
    near_S = torch.arange(len(ids_S), device=ids_S.device)
    near_SH = read(ids_2S, torch.ones_like(ids_2S), torch.stack([near_S, near_S]))[0]
    for border in sorted(borders):
        beside_SH = read(ids_2S, torch.ones_like(ids_2S), torch.stack([near_S, near_S + border]))[0]
        # Of the same shape, so that rounding hides less.
        if not agree(beside_SH, near_SH, half=1e-2):
            return Reading(border)
    return PADDED


def _plain(read: Read, ids_nL: Tensor) -> Tensor:
    return read(ids_nL, torch.ones_like(ids_nL), None)


def _gap(found_SH: Tensor, expected_SH: Tensor, called: str, when: str) -> str | None:
    if agree(found_SH, expected_SH):
        return None
    return (
        f"The {called} changes the hidden state of a token by {_distances(found_SH, expected_SH).max():.2g} of its "
        f"norm {when}, also without padding, so what a token predicts is not a function of the tokens before it: "
        "take a causal language model that looks back only and draws no random numbers."
    )


def agree(found_SH: Tensor, expected_SH: Tensor, half: float = 5e-2) -> bool:
    """Whether the vectors of [S, H] are the same but for rounding; `half` is how far those of half precision may be."""
    # What is not a number here is not one there: those who look for it name the phase in which it came.
    distance_S = _distances(found_SH, expected_SH).nan_to_num(nan=0.0)
    full = found_SH.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(found_SH.device.type)
    if full and torch.get_float32_matmul_precision() == "highest":
        return bool(distance_S.max() <= 1e-3)
    # Half precision may send a token to another expert when a sum is rounded otherwise: most tokens have to agree.
    return bool(distance_S.median() <= half)


def _distances(found_SH: Tensor, expected_SH: Tensor) -> Tensor:
    """[S], relative to each token's norm."""
    expected_SH = expected_SH.to(found_SH.device).float()
    return (found_SH.float() - expected_SH).norm(dim=-1) / expected_SH.norm(dim=-1).clamp(min=1e-30)
