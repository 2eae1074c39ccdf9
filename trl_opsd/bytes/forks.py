"""Reads rows together with tokens that branch off them, in one pass: each token attends to those on its own path.

B rows · L tokens of the longest · F forks of the row that has most · C columns of completions · H hidden size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.nn.functional import pad

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import context_of, hidden_states, shape_of
from trl_opsd.models.padding import PADDED, BatchPolicy, agree
from trl_opsd.models.probes import CANNOT_RUN, Probed
from trl_opsd.parallel.precision import least_precise
from trl_opsd.types import OutputHead, Rollout
from trl_opsd.types.rollout import OnHost

logger = get_logger(__name__)

_KINDS = ("full_attention", "sliding_attention")
"""Layers that take a mask of one's own."""


@dataclass(frozen=True, kw_only=True)
class ForkedRollout(Rollout):
    """Rows with tokens that branch off them, to be read in the same pass.

    The last columns of completions, which are masked and have no weight, are for the states after these.
    """

    column: int
    """The first of these columns."""
    forks: tuple[tuple[list[int], list[int]], ...]
    """For each row its forks' tokens, and what each follows: the index of the completion token that it takes the place
    of or, from `column` on, a fork before it."""

    @classmethod
    def branching(cls, rollout: Rollout, forks: Sequence[tuple[list[int], list[int]]]) -> ForkedRollout:
        """The rows with these forks."""
        given: dict[str, Any] = {one.name: getattr(rollout, one.name) for one in fields(rollout)} | {"on_host": None}
        most = max([1, *(len(tokens) for tokens, _ in forks)])
        for name in ("completion_ids", "completion_mask", "weights", "authors", "logprobs"):
            given[name] = None if given[name] is None else pad(given[name], (0, most))
        known = rollout.on_host
        if known is not None and known.holds(rollout.weights):
            given["on_host"] = OnHost.known(given["weights"], pad(known.copy, (0, most)))
        given |= {"lengths": rollout.measured(), "column": rollout.completion_ids.size(1), "forks": tuple(forks)}
        return cls(**given)

    @property
    def sizes(self) -> list[int]:
        return [size + len(tokens) for size, (tokens, _) in zip(super().sizes, self.forks, strict=True)]

    def select(self, rows: Sequence[int]) -> Self:
        chosen = replace(super().select(rows), forks=tuple(self.forks[row] for row in rows))
        return chosen.of_columns(self.column + max([1, *(len(tokens) for tokens, _ in chosen.forks)]))

    def cut(self) -> Self:
        """The same, as the states have their columns."""
        return self


def forked_hidden(model: CausalLM, rollout: ForkedRollout, policy: BatchPolicy = PADDED) -> Tensor:
    """[`~models.backbone.completion_hidden`], [B, C, H], in whose last columns are the states *after* each fork."""
    lengths, (rows, prompt) = rollout.measured(), rollout.prompt_ids.shape
    device, width = rollout.prompt_ids.device, max(one.total for one in lengths)
    most, column = rollout.completion_ids.size(1) - rollout.column, rollout.column
    count = -(-(width + most) // policy.multiple_of) * policy.multiple_of - width
    ids, upto, depth = np.zeros((3, rows, count), np.int64)
    path = np.zeros((rows, count, count), bool)
    path[:, np.arange(count), np.arange(count)] = True  # padding attends to itself, so that there are no NaN
    for row, (length, (tokens, parents)) in enumerate(zip(lengths, rollout.forks, strict=True)):
        ids[row, : len(tokens)] = tokens
        for number, parent in enumerate(parents):
            if (before := parent - column) >= 0:
                upto[row, number], depth[row, number] = upto[row, before], depth[row, before] + 1
                path[row, number] |= path[row, before]
            else:  # the state that predicts a token is that of the one before it
                upto[row, number], depth[row, number] = length.prompt - 1 + parent, 1
    of_forks = torch.from_numpy(np.stack([ids, upto, depth])).to(device, non_blocking=True)
    ids_BF, upto_BF, depth_BF = of_forks
    path_BFF = torch.from_numpy(path).to(device, non_blocking=True)
    of_rows = torch.tensor([[one.prompt, one.total] for one in lengths]).to(device, non_blocking=True)
    prompts_B, totals_B = of_rows.unbind(1)
    column_L = torch.arange(width, device=device)
    index_BL = (prompt - prompts_B[:, None] + column_L).clamp(max=rollout.input_ids.size(1) - 1)
    ids_BW = torch.cat([rollout.input_ids.gather(1, index_BL), ids_BF], 1)
    real_BL = column_L < totals_B[:, None]
    causal_BLL = (column_L <= column_L[:, None]) & (real_BL[:, None] | (column_L == column_L[:, None]))
    own_BFL = (column_L <= upto_BF[..., None]) & (depth_BF[..., None] > 0)
    mask_BWW = torch.cat([pad(causal_BLL, (0, count)), torch.cat([own_BFL, path_BFF], 2)], 1)
    last_B1 = (totals_B - 1)[:, None]  # padding may lie beyond a context
    last = (context_of(model) or width + count) - 1
    places_BW = torch.cat([column_L.minimum(last_B1), (upto_BF + depth_BF).clamp(max=last)], 1)
    hidden_BWH = hidden_states(model, ids_BW, _masks(model, mask_BWW[:, None], places_BW), places_BW)
    columns_C = torch.arange(column, device=device)
    predicting_BC = (prompts_B[:, None] - 1 + columns_C).clamp(max=width - 1)
    places_BC = torch.cat([predicting_BC, width + torch.arange(most, device=device).expand(rows, -1)], 1)
    return hidden_BWH.gather(1, places_BC[..., None].expand(-1, -1, hidden_BWH.size(-1)))


def _masks(model: CausalLM, mask_B1WW: Tensor, places_BW: Tensor) -> Any:
    """The mask in the form that a model's attention takes, of each kind of its layers."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [_KINDS[1] if window is not None else _KINDS[0]])
    if getattr(config, "use_sliding_window", True) is False and not getattr(config, "layer_types", None):
        kinds = {_KINDS[0]}

    def of(kind: str) -> Tensor:
        mask = mask_B1WW
        if kind == _KINDS[1] and window is not None:
            mask = mask & (places_BW[:, None, :, None] - places_BW[:, None, None, :] < window)
        if config._attn_implementation == "sdpa":
            return mask
        least = torch.finfo(model.dtype).min
        return torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, least)

    found = {kind: of(kind) for kind in kinds}
    return found if getattr(config, "layer_types", None) and len(kinds) > 1 else next(iter(found.values()))


def _reads_forks(one: Probed) -> bool:
    head, config = OutputHead.of(one.model), one.model.config.get_text_config()
    device, step = head.weight.device, shape_of(head)[0] // 17
    ids, more = [step * number for number in range(1, 13)], [step * number for number in (14, 13, 15, 12)]
    kinds = set(getattr(config, "layer_types", None) or _KINDS[:1])
    if config._attn_implementation not in ("sdpa", "eager") or not kinds <= set(_KINDS):
        return False  # it takes no mask of one's own
    # After the prompt's three tokens, four of the completion's and two forks; after seven, another.
    rows = Rollout.of([ids[:3], ids[5:7]], [[*ids[3:], ids[0]], ids[7:]], device)
    rows = replace(rows, completion_mask=rows.completion_mask * (torch.arange(10, device=device) < 9))
    rows = ForkedRollout.branching(rows, [([more[0], more[1], more[2]], [4, 10, 7]), ([more[3]], [1])])
    whole = [(ids, 0), ([*ids[:7], *more[:2]], 10), ([*ids[:10], more[2]], 12), ([*ids[5:8], more[3]], 10)]

    def read() -> tuple[Tensor, Tensor]:
        found = one.run(forked_hidden, rows)
        expected = [one.run(hidden_states, torch.tensor([each], device=device), None)[0] for each, _ in whole]
        states = torch.cat([found[0, :9], found[0, 10:13], found[1, 10:11]])
        of_whole = torch.cat([expected[0][2:11], expected[1][7:9], expected[2][-1:], expected[3][-1:]])
        return states.to(least_precise(one.model)), of_whole.to(least_precise(one.model))

    try:
        found_NH, expected_NH = one.evaluate(read)
    except (ValueError, *CANNOT_RUN):
        return False
    return one.batching.padded_up_to == PADDED.padded_up_to and agree(found_NH, expected_NH)


class Forking:
    """Whether a model can be read with forks, once that was tried."""

    def __init__(self, role: str, most_missed: float) -> None:
        self.works, self._role, self._most_missed = False, role, most_missed

    def probe(self, one: Probed) -> None:
        """Makes five passes; warns if it cannot."""
        self.works = _reads_forks(one)
        if not self.works:
            self.warn()

    def warn(self) -> None:
        """Says that its distributions are summed without forks."""
        logger.warning(
            f"`cross_tokenizer='bytes'`: the {self._role} cannot score alternative tokens (docs/tokenizers.md). Bytes "
            f"with more than `cross_tokenizer_missed={self._most_missed:g}` of the probability missing are not "
            "compared: watch the metric `cross/used`."
        )
