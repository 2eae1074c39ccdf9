"""Logs how much the completions of a prompt differ from each other, with `num_generations` above 1.

OPSDTrainer(..., methods=[GroupSpread()])
"""

import numpy as np
import torch

from trl_opsd import Method
from trl_opsd.types.loss import columns


def by_place(part, host, names):
    """[R, columns], statistics of the rows of a micro-batch, by their places in the step over all processes."""
    rows = host.args.per_device_train_batch_size * host.args.gradient_accumulation_steps
    sums_R = part.sums.new_zeros(rows * host.accelerator.num_processes, len(names), dtype=torch.float32)
    places_B = torch.tensor([row.place for row in part.rows]).to(part.sums.device, non_blocking=True)
    return sums_R.index_add_(0, places_B, columns(part.sums, *names).float())


class GroupSpread(Method):
    """`group/divergence_std` and `group/length_std`: standard deviations among completions, mean over prompts."""

    def tally(self, part):
        return by_place(part, self.host, ("weight", "divergence", "tokens"))

    def stepped(self, sums, tally):
        number = self.host.args.num_generations
        weight_Gn, divergence_Gn, tokens_Gn = tally.astype(np.float64).reshape(-1, number, 3).transpose(2, 0, 1)
        counts_Gn = weight_Gn > 0
        groups = counts_Gn.sum(1) > 1  # one completion alone differs from none
        if groups.any():
            mean_Gn = np.divide(divergence_Gn, weight_Gn, out=np.full_like(weight_Gn, np.nan), where=counts_Gn)
            lengths_Gn = np.where(counts_Gn, tokens_Gn, np.nan)
            for name, values_Gn in {"divergence": mean_Gn, "length": lengths_Gn}.items():
                self.host.record(f"group/{name}_std", float(np.nanstd(values_Gn[groups], axis=1, ddof=1).mean()))
