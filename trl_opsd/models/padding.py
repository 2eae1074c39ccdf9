"""Determines by experiment which rows may share a batch; knows tensors only, neither models nor rollouts.

S tokens of a short row · L of a long one, L > S · H hidden size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trl_opsd.parallel.precision import rounds_float32
from trl_opsd.types.rollout import PromptIds

Read = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Maps token ids, attention mask and positions (`None`: derived from the mask), all [n, L], to hidden states [n, L, H].
With positions and no mask, a row is packed: they restart at 0 where a sequence begins. With neither, a row is whole."""

_SHORT, _LEFT, _WIDTH = 5, 4, 16
"""Tokens of the short row, padding tokens before it, and tokens of the long row."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Which rows may share a forward pass so that each gets the hidden states it would get alone."""

    padded_up_to: float = math.inf
    """Rows of at most this many tokens may be padded to one length."""
    batches_equal_lengths: bool = True
    """Whether longer rows of equal length may share a pass; otherwise each has its own."""
    packed: bool = False
    """Whether all rows are concatenated into one sequence, without padding."""
    multiple_of: int = 1
    """The width of padded rows is rounded up to a multiple of this."""
    dummy_image_prompt: PromptIds | None = None
    """A prompt with an image, read beside rows without: under DeepSpeed and FSDP2 all processes run its tower."""
    needs_mask: bool = field(default=True, compare=False)
    """Whether padding after a row has to be masked: a mask that changes nothing rules out attention's fast kernels."""

    def __str__(self) -> str:
        if self.packed:
            return "packed"
        longer = "rows of the same length together" if self.batches_equal_lengths else "one row at a time"
        if self.padded_up_to == math.inf:
            return "padded"
        return f"padded up to {self.padded_up_to} tokens, beyond {longer}" if self.padded_up_to else longer

    def groups(self, lengths: Sequence[int], collective: bool) -> list[list[int]]:
        """Row numbers of each forward pass, from the lengths of the rows."""
        # A collective forward must be called equally often by all processes, whose rows have other lengths.
        if collective and 0 < self.padded_up_to < max(lengths, default=0):
            raise ValueError(
                f"A row can have {max(lengths)} tokens, but beyond {self.padded_up_to} the rows of a batch change each "
                "other's hidden states in this model and must be processed one by one, which a sharded model cannot "
                "do: lower `max_completion_length`, remove longer prompts, or do not shard the model."
            )
        groups: dict[tuple[int, int], list[int]] = {}
        for row, length in enumerate(lengths):
            if length <= self.padded_up_to:
                key = (0, 0)
            else:
                key = (length, 0) if self.batches_equal_lengths and not collective else (length, row)
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def groups_to_continue(
        self, prompts: Sequence[int], max_new_tokens: Sequence[int], collective: bool
    ) -> list[list[int]]:
        """[`~Reading.groups`] for generation, where each row grows from its prompt by up to its room."""
        if not self.padded_up_to:
            return self.groups(prompts, collective)
        # Rows with prompts of one length may cross the border at different steps.
        apart = BatchPolicy(self.padded_up_to, batches_equal_lengths=False)
        return apart.groups([sum(both) for both in zip(prompts, max_new_tokens, strict=True)], collective)


PADDED = BatchPolicy()


def prove_batch_policy(
    read: Read, vocabulary: int, device: torch.device, borders: Collection[int], called: str
) -> BatchPolicy:
    """Determines which rows can share a pass by comparing a row's hidden states in a batch with those it has alone."""
    ids_L = torch.arange(1, _WIDTH + 1, device=device).mul(vocabulary // (_WIDTH + 1))
    alone_SH = _plain(read, ids_L[None, :_SHORT])[0]
    short_S = slice(_LEFT, _LEFT + _SHORT)
    # One pass tests both: the short row with padding on either side, and a longer row beside it that begins alike.
    pair_2L = torch.stack([ids_L.roll(_LEFT), ids_L])
    mask_2L = torch.ones_like(pair_2L)
    mask_2L[0] = 0
    mask_2L[0, short_S] = 1
    beside_SH, begun_LH = read(pair_2L * mask_2L, mask_2L, None)
    # Beyond some positions (`borders`) a model may compute differently, so short rows prove nothing about long ones.
    if agree(beside_SH[short_S], alone_SH) and agree(begun_LH[:_SHORT], alone_SH):
        # The short row with other tokens after it, as a pass without a mask has them.
        bare_2LH = read(torch.stack([torch.cat([ids_L[:_SHORT], ids_L.flip(0)[_SHORT:]]), ids_L]), None, None)
        needs_mask = not all(agree(one_LH[:_SHORT], alone_SH) for one_LH in bare_2LH)
        return replace(_within_borders(read, ids_L[:_SHORT], borders), needs_mask=needs_mask)
    # They differ. First exclude causes other than batching, so that the message names the right one.
    for tokens, when in ((_SHORT, "in a second forward pass"), (_WIDTH, "if more tokens follow")):
        found_SH = _plain(read, ids_L[None, :tokens])[0, :_SHORT]
        if not agree(found_SH, alone_SH):
            raise ValueError(
                f"The {called} changes the hidden state of a token by {distances(found_SH, alone_SH).max():.2g} of its "
                f"norm {when}, even without padding, so its predictions do not depend only on the preceding tokens: "
                "use a causal language model that is deterministic in eval mode."
            )
    # Padding fails, but rows of equal length need none.
    together_SH = _plain(read, torch.stack([ids_L[:_SHORT], ids_L[_SHORT : 2 * _SHORT]]))[0]
    return BatchPolicy(0, batches_equal_lengths=agree(together_SH, alone_SH))


def _within_borders(read: Read, ids_S: Tensor, borders: Collection[int]) -> BatchPolicy:
    """Batches a row with one at positions beyond each border, without allocating that many tokens."""
    if not borders:
        return PADDED
    ids_2S = torch.stack([ids_S, ids_S])
    near_S = torch.arange(len(ids_S), device=ids_S.device)
    near_SH = read(ids_2S, torch.ones_like(ids_2S), torch.stack([near_S, near_S]))[0]
    for border in sorted(borders):
        beside_SH = read(ids_2S, torch.ones_like(ids_2S), torch.stack([near_S, near_S + border]))[0]
        # Both batches have the same shape, so rounding differs less and the tolerance can be smaller.
        if not agree(beside_SH, near_SH, half=1e-2):
            return BatchPolicy(border)
    return PADDED


def gap_of_packing(read: Read, vocabulary: int, device: torch.device) -> float | None:
    """Largest relative distance of hidden states of packed rows from those of each alone; `None` if only rounding."""
    ids_L = torch.arange(1, _WIDTH + 1, device=device).mul(vocabulary // (_WIDTH + 1))
    rows = [ids_L[:_SHORT], ids_L.flip(0), ids_L[-_SHORT:]]
    positions_N = torch.cat([torch.arange(len(row), device=device) for row in rows])
    packed_NH, beside_NH = (
        read(torch.cat(each)[None], None, positions_N[None])[0]
        for each in (rows, [ids_L[_SHORT : 2 * _SHORT], ids_L.roll(_LEFT), rows[2]])
    )
    alone_NH = torch.cat([_plain(read, row[None])[0] for row in rows])
    if not agree(packed_NH, alone_NH):
        return float(distances(packed_NH, alone_NH).max())
    # Compare two packed passes of one shape, which half precision rounds alike: a small influence of the other rows on
    # the last one shows, which the tolerance above hides.
    beside = float(distances(beside_NH[-_SHORT:], packed_NH[-_SHORT:]).nan_to_num(nan=0.0).max())
    return beside if beside > 1e-3 else None


def _plain(read: Read, ids_nL: Tensor) -> Tensor:
    return read(ids_nL, torch.ones_like(ids_nL), None)


def agree(found_SH: Tensor, expected_SH: Tensor, half: float = 5e-2) -> bool:
    """Whether the vectors of two [S, H] tensors are equal up to rounding; `half` is the tolerance in half precision."""
    # NaN is ignored here: other checks report it with the phase in which it arose.
    distance_S = distances(found_SH, expected_SH).nan_to_num(nan=0.0)
    full = found_SH.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(found_SH.device.type)
    if full and not rounds_float32():
        return bool(distance_S.max() <= 1e-3)
    # In half precision rounding may route a token to another expert: only most tokens have to agree.
    return bool(distance_S.median() <= half)


def distances(found_SH: Tensor, expected_SH: Tensor) -> Tensor:
    """[S], the distance of each token's vectors relative to the expected norm."""
    expected_SH = expected_SH.to(found_SH.device).float()
    return (found_SH.float() - expected_SH).norm(dim=-1) / expected_SH.norm(dim=-1).clamp(min=1e-30)
