"""An optimizer step: a loop over micro-batches, of rows that have a completion or of rows that get theirs meanwhile.

transformers calls `training_step` as often as it accumulates; all of a step happens in the last of these calls. The
loss of each micro-batch is divided by the weight of all tokens of the step, in all processes. So nobody divides by the
number of micro-batches: TRL's `loss_is_scaled_for_ga` keeps transformers from it (by `compute_loss_func` in versions
that do not read it), and transformers tells accelerate of one call a step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Trainer

from trl_opsd.loop.batch import Batch
from trl_opsd.loop.dealing import dealt

if TYPE_CHECKING:
    from trl_opsd.loop.overlap import Overlap
    from trl_opsd.trainer import OPSDTrainer

MicroBatches: TypeAlias = Generator[tuple[Batch, Tensor, bool], None, None]
"""Each with the denominator of its loss, and whether it is the last of the step."""


class Step:
    """Trains on the rows of an optimizer step; the optimizer is transformers' affair."""

    def __init__(self, host: OPSDTrainer, overlap: Overlap | None) -> None:
        self._host, self._overlap = host, overlap

    def learn(self, model: Any, rows: Sequence[Any]) -> Tensor:
        """Adds the gradient of a step to the weights, and returns its loss. Collective."""
        host = self._host
        for one in (model, host.optimizer):  # an evaluation may have come before
            if callable(getattr(one, "train", None)):
                one.train()
        overlap = self._overlap if self._overlap is not None and self._overlap.is_on else None
        losses = []
        with closing(self._completed(rows) if overlap is None else overlap.arriving(rows)) as parts:
            for batch, weight, is_last in parts:
                # Processes' gradients are averaged, so each divides by its share. Of no token, the loss is 0.
                share = weight.where(weight > 0, 1.0) / host.accelerator.num_processes
                with (
                    nullcontext() if is_last else _accumulating(host.accelerator, model),
                    host.compiled([host.model]),  # the backward pass, too, where layers are computed again there
                ):
                    # transformers': `host.compute_loss`, then the backward pass. TRL's own would generate again.
                    losses.append(Trainer.training_step(host, model, batch, share))
        return reduce(torch.add, losses) if overlap is None else overlap.rescaled(model, losses)

    def _completed(self, rows: Sequence[Any]) -> MicroBatches:
        """The micro-batches of rows that get their completions and targets together, before the first of them."""
        batch = self._host.score(rows)  # generates, and asks the teachers: `Batches.make`
        weight = self._host.accelerator.gather(batch.rollout.weights.sum()).sum()
        *parts, last = dealt(self._host, batch)
        del batch
        for part in parts:
            yield part, weight, False
        yield last, weight, True


@contextmanager
def _accumulating(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Prevents gradient synchronization in the body, as transformers does in all calls but the last of a step.

    DDP then averages in the last; ZeRO-2, ZeRO-3 and, by default, FSDP2 reduce in each.
    """
    state = accelerator.gradient_state
    state._set_sync_gradients(False)
    try:
        # `sync_each_batch` is accelerate's option for less memory: gradients are reduced in each micro-batch.
        with nullcontext() if state.plugin_kwargs.get("sync_each_batch") else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(True)
