"""Divides the rows of an optimizer step among processes and micro-batches.

The loss has one denominator for the whole step, so the gradient does not depend on the assignment.
Each process generates its own rows; before they are scored, some may move to another process.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from trl_opsd._compat.sharding import is_split_model
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.grouping import equal_groups, even_groups, fewest_groups
from trl_opsd.types import OnHost, Rollout

if TYPE_CHECKING:
    from trl_opsd.loop.batch import Batch
    from trl_opsd.trainer import OPSDTrainer

EVEN = 1.05
"""Largest tokens per process relative to the mean; up to this no rows are exchanged, which would cost a gather."""


def exchanged(host: OPSDTrainer, rollout: Rollout, rows: Sequence[BatchRow]) -> tuple[Rollout, Sequence[BatchRow]]:
    """Exchanges rows of a training, so that processes have about as many tokens. Collective."""
    accelerator = host.accelerator
    number = accelerator.num_processes
    if number == 1 or not host.model.training:
        return rollout, rows
    tokens = [one.total for one in rollout.measured()]
    has_images = [int(row.images is not None) for row in rows]
    both = accelerator.gather(torch.tensor([tokens, has_images], device=accelerator.device)).view(number, 2, -1)
    each = both[:, 0].tolist()
    sums = [sum(theirs) for theirs in each]
    if both[:, 1].any() or max(sums) <= EVEN * sum(sums) / number:  # sending images costs more than it saves
        return rollout, rows
    # From the same lengths every process computes the same groups.
    mine = equal_groups(list(chain(*each)), number, packed=True)[accelerator.process_index]
    padding = dict.fromkeys(("prompt_ids", "completion_ids"), host.processing_class.pad_token_id)
    found = {}
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "weights", "authors"):
        if (tensor := getattr(rollout, name)) is not None:
            # Processes have padded to different widths, and a gather needs one shape.
            wide = accelerator.pad_across_processes(
                tensor, dim=1, pad_index=padding.get(name, 0), pad_first=name.startswith("prompt")
            )
            found[name] = accelerator.gather(wide)[mine]
    everyone = gather_object(list(rows))
    return replace(rollout, **found), [everyone[row] for row in mine]


def dealt(host: OPSDTrainer, batch: Batch) -> list[Batch]:
    """The rows of an optimizer step as micro-batches of similar length, and with a token budget as many as fit it.

    TRL assigns at random, `per_device_train_batch_size` rows each.
    """
    batch = batch.select(torch.randperm(len(batch.rows)).tolist())  # TRL draws it, and later draws are to be the same
    multiple = host.args.pad_to_multiple_of or 1  # what padding will add counts against the budget
    groups = _groups(host, [-(-size // multiple) * multiple for size in batch.rollout.sizes])
    host_BC = batch.rollout.weights.cpu()  # read once here, rather than in each micro-batch
    found = []
    for group in groups:
        part = batch.select(group)
        known = OnHost.known(part.rollout.weights, host_BC[group])
        found.append(replace(part, rollout=replace(part.rollout, on_host=known)))
    return found


def _groups(host: OPSDTrainer, lengths: Sequence[int]) -> list[list[int]]:
    """The rows of each micro-batch; as many micro-batches in all processes. Collective where there is a budget."""
    args = host.args
    budget, calls = args.max_tokens_per_microbatch, args.gradient_accumulation_steps
    if budget is None:
        return equal_groups(lengths, calls, args.padding_free)
    check_budget(host)
    fewest = len(fewest_groups(lengths, lambda tokens, *_: tokens <= budget, args.padding_free))
    each = host.accelerator.gather(torch.tensor([fewest, calls], device=host.accelerator.device))
    # As many micro-batches everywhere, at least one per call: their passes may be collective.
    return even_groups(lengths, int(each.max()), args.padding_free)


def check_budget(host: OPSDTrainer) -> None:
    """Rejects a token budget for a sharded student that reads one row at a time, each with collectives."""
    if host.args.max_tokens_per_microbatch is None or host.batching.padded_up_to:
        return
    # Processes with fewer rows would make fewer collective calls, and the others would wait forever.
    if is_split_model(host.model):
        raise ValueError(
            "`max_tokens_per_microbatch`: the student is sharded and processes one row at a time, so every process "
            "needs the same number of rows in a micro-batch: remove the option."
        )
