"""How the completions of a prompt differ among each other.

R rows of all processes · G prompts · n completions of each
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from numpy import ndarray
from torch import Tensor

from trl_opsd.methods.base import Method, Part
from trl_opsd.monitor.metrics import Logs, Metric
from trl_opsd.types.loss import columns

BY_PROMPT = ("weight", "divergence", "tokens")
"""Statistics of each row that the completions of a prompt are compared by."""
_GROUPS = Logs(
    "all processes; mean over prompts with at least two completions in the loss, then over steps",
    "`num_generations` above 1, in evaluations `num_generations_eval`; not where processes share rows",
)


@final
class Groups(Method):
    """Logs how the completions of a prompt differ; evaluations compare theirs themselves."""

    metrics: ClassVar = {
        "group/divergence_std": Metric("nats", "Standard deviation of the divergences of a prompt's rows.", _GROUPS),
        "group/length_std": Metric("tokens", "Standard deviation of the loss tokens of a prompt's rows.", _GROUPS),
    }

    @classmethod
    def of(cls, now: Any) -> Groups | None:
        return cls() if now.num_generations > 1 else None

    def tally(self, part: Part) -> Tensor:
        return by_place(part, self.host)

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        if tally is not None:
            for name, value in spread(torch.from_numpy(tally), self.host.args.num_generations).items():
                self.host.record(name, value)


def by_place(part: Part, host: Any) -> Tensor:
    """[R, 3], the statistics `BY_PROMPT` of the rows of a micro-batch, by their places in the generation batch."""
    rows = host.args.per_device_train_batch_size * host.args.gradient_accumulation_steps
    sums_R3 = part.sums.new_zeros(rows * host.accelerator.num_processes, len(BY_PROMPT), dtype=torch.float32)
    places = [row.place for row in part.rows]
    if places and None not in places:  # rows that no dataset gave have no place
        places_B = torch.tensor(places).to(part.sums.device, non_blocking=True)
        sums_R3.index_add_(0, places_B, columns(part.sums, *BY_PROMPT))
    return sums_R3


def spread(sums_R3: Tensor, number: int) -> dict[str, float]:
    """Mean over prompts of the standard deviation among their completions; empty if no prompt has two that count.

    `sums_R3` are the statistics `BY_PROMPT`; completions of a prompt are adjacent.
    """
    # Deviations are those of TRL's GRPO for rewards: n - 1.
    weight_Gn, divergence_Gn, tokens_Gn = sums_R3.double().view(-1, number, len(BY_PROMPT)).unbind(-1)
    counted_Gn = weight_Gn > 0
    several_G = counted_Gn.sum(1) > 1
    if not several_G.any():
        return {}
    mean_Gn = torch.where(counted_Gn, divergence_Gn / weight_Gn, torch.nan)
    return {
        "group/divergence_std": _deviation(mean_Gn[several_G]),
        "group/length_std": _deviation(torch.where(counted_Gn, tokens_Gn, torch.nan)[several_G]),
    }


def _deviation(values_Gn: Tensor) -> float:
    """Mean over prompts of the standard deviation of their values that are not NaN; each prompt has at least two."""
    squares_Gn = (values_Gn - values_Gn.nanmean(1, keepdim=True)).square()
    freedom_G = (~values_Gn.isnan()).sum(1) - 1
    return float((squares_Gn.nansum(1) / freedom_G).sqrt().mean())
