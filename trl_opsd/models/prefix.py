"""Rows that continue from the keys and values of a prefix that they share, and the probe whether a model can do that.

B rows · P tokens of the prefix · S of a segment, a part of it · C completion tokens · H hidden size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import hidden_states, padded_hidden, shape_of
from trl_opsd.models.padding import PADDED, BatchPolicy, agree, distances
from trl_opsd.models.probes import CANNOT_RUN, Probe, Probed, explaining
from trl_opsd.parallel.precision import least_precise
from trl_opsd.types import OutputHead, Rollout

Pair: TypeAlias = tuple[Tensor, Tensor]
"""The keys and the values of a segment in one layer, [1, heads, S, size] each, which may lie in host memory."""


@dataclass(frozen=True, slots=True)
class Past:
    """A prefix that was read: of each layer the keys and values of its segments, in order."""

    tokens: int = 0
    layers: tuple[tuple[Pair, ...], ...] = ()

    def cache(self, keeps: bool = False) -> Any:
        """What a model takes as `past_key_values`; one that `keeps` has in `layers[...].computed` what was computed."""
        if not self.tokens:
            return Cache(layer_class_to_replicate=partial(_Layer, keeps=keeps))
        return Cache(layers=[_Layer(self.tokens, pairs, keeps) for pairs in self.layers])


class _Layer(DynamicLayer):
    """Puts a prefix before each row of a pass; a copy for all rows lives only while the layer computes.

    It holds all tokens in layers with a window, too, which the masks of a pass leave out: so it can be cropped.
    """

    def __init__(self, tokens: int = 0, pairs: Sequence[Pair] = (), keeps: bool = False) -> None:
        super().__init__()
        self._tokens, self._pairs, self._keeps = tokens, pairs, keeps
        self.computed: Pair | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        if self._keeps:
            self.computed = key_states, value_states
        keys, values = (
            torch.cat([*(_repeated(one, of_rows) for one in before), of_rows], dim=-2) if before else of_rows
            for before, of_rows in zip(
                zip(*self._pairs, strict=True) if self._pairs else ((), ()), (key_states, value_states), strict=True
            )
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self._tokens


def _repeated(one: Tensor, rows: Tensor) -> Tensor:
    return one.to(rows.device, rows.dtype, non_blocking=True).expand(len(rows), *one.shape[1:])


def hidden_after(model: CausalLM, rollout: Rollout, past: Past, policy: BatchPolicy = PADDED) -> Tensor:
    """[`~models.backbone.completion_hidden`] of rows that all begin with the tokens of a prefix, which are not read."""
    return padded_hidden(model, rollout, rollout.measured(), policy, past.cache(), past.tokens)


def keys_and_values(
    model: CausalLM, segments: Sequence[Sequence[int]], past: Past, device: torch.device, where: torch.device
) -> list[list[Pair]]:
    """Of each segment after the same prefix, the keys and values in each layer, copied to `where`."""
    width, rows = max(map(len, segments)), len(segments)
    ids_BS = torch.tensor([[*segment, *[0] * (width - len(segment))] for segment in segments])
    lengths_B1 = torch.tensor([[len(segment)] for segment in segments])
    places_BS = torch.arange(width).expand(rows, -1)
    mask_BL = torch.cat([torch.ones(rows, past.tokens), places_BS < lengths_B1], dim=1).long()
    # The last positions of shorter segments are not counted on, which may lie beyond a context.
    places_BS = past.tokens + places_BS.minimum(lengths_B1 - 1)
    cache = past.cache(keeps=True)
    # Without padding no mask is needed, so that attention's fast kernels can run.
    mask = mask_BL.to(device) if lengths_B1.min() < width else None
    hidden_states(model, ids_BS.to(device), mask, places_BS.to(device), past=cache)
    return [
        [
            tuple(one[row : row + 1, ..., : len(segment), :].to(where, copy=True) for one in layer.computed)
            for layer in cache.layers
        ]
        for row, segment in enumerate(segments)
    ]


_FIRST, _LONGER, _SHARED = 5, 14, 11
"""Tokens of the probe's first segment, of both, and of the prefix that is cut from them."""


def _continues(one: Probed) -> str:
    head = OutputHead.of(one.model)
    device, step = head.weight.device, shape_of(head)[0] // 23
    ids = [step * number for number in range(1, 23)]
    rests = [ids[_SHARED : _SHARED + 6], ids[:_SHARED:-1]]
    both = Rollout.of([ids[: _SHARED + 1]] * 2, [rests[0][1:], rests[1]], device)

    def read() -> tuple[Tensor, Tensor]:
        whole = [one.run(hidden_after, both.select([row]).cut(), Past()) for row in range(2)]
        first: list[Any] = one.run(keys_and_values, [ids[:_FIRST]], Past(), device, device)
        past = Past(_FIRST, tuple((pair,) for pair in first[0]))
        second: list[Any] = one.run(keys_and_values, [ids[_FIRST:_LONGER], [step]], past, device, device)
        kept = _SHARED - _FIRST
        cut = (tuple(each[..., :kept, :] for each in pair) for pair in second[0])
        past = Past(_SHARED, tuple(zip(first[0], cut, strict=True)))
        continued_2CH: Tensor = one.run(hidden_after, both, past)
        found = [continued_2CH[row, : whole[row].size(1)] for row in range(2)]
        return torch.cat(found).to(rounded), torch.cat([each[0] for each in whole]).to(rounded)

    rounded = least_precise(one.model)
    with explaining(one, "continue from keys and values", "Rows are read whole.", (ValueError, *CANNOT_RUN)):
        found_NH, expected_NH = one.evaluate(read)
    if not agree(found_NH, expected_NH):
        raise ValueError(
            f"{one} changes the hidden state of a token by {distances(found_NH, expected_NH).max():.2g} of its norm if "
            "it continues from the keys and values of a prefix. Rows are read whole."
        )
    return "Rows continue from a shared prefix."


CONTINUING: Probe[Probed] = Probe("prefix", _continues)
"""Makes five passes."""
PASSES = 5
