"""Splits micro-batches by position among the processes of a group, so that each trains on a part of every row.

B rows · L tokens, prompt and completion · N positions of one process · H teacher's hidden size
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from trl_opsd._compat.sharding import launched, sharing_rows_ourselves
from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.models.backbone import check_no_holes
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.models.shared_rows import RowGroup, check_shareable
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.kept import kept_by_row

__all__ = ["SharedRows"]


class SharedRows(DistillationTrainer):
    """A trainer that may compute a loss together with the other processes of a group, one micro-batch after the other.

    Each generates and teaches its own rows; only the student's pass with gradients is shared.
    """

    reading: Reading
    row_group: RowGroup | None = None
    """The processes that share rows with this one; `None` without sequence parallelism."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        sizes = launched(kwargs["args"])
        # Hidden from accelerate and transformers, which would divide batches of the dataset: prompts, here.
        with sharing_rows_ourselves(sizes):
            super().__init__(*args, **kwargs)
        if sizes.sp_enabled:
            check_shareable(self.model, sizes.sp_size, sizes.sp_handler.sp_attn_implementation)
            self.row_group = RowGroup(sizes.sp_size)

    def sharing_rows(self) -> AbstractContextManager[None]:
        """Lets the student exchange positions with its group within the context."""
        return nullcontext() if self.row_group is None else self.row_group.shares(self.model)

    def learned_apart(self, inputs: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
        """The batches of a micro-step, each with whether it is the last: backward runs before the next comes."""
        if self.row_group is None or not self.model.training:
            yield inputs, True
            return
        if self.reading != PADDED:  # under ZeRO-3 that is known since the first completions
            raise ValueError(
                "`sp_size`: padding changes what the student reads, so its rows cannot be divided: remove `sp_size`."
            )
        # In turn, each with a backward pass: all at once would need as much memory as without sharing.
        for number, part in enumerate(_parts(self.row_group, inputs, self.accelerator.device), start=1):
            with self.row_group.reads(self.model):
                yield part, number == self.row_group.size

    def backward_early(self, loss: Tensor) -> Tensor:
        """Adds the gradient of a loss to that of the micro-step, and returns the loss without it."""
        # DeepSpeed accepts several backward passes before a step.
        self.accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=False, scale_wrt_gas=False)
        return loss.detach()


def _parts(group: RowGroup, batch: Mapping[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """For the micro-batch of each process of a group in turn, the part that this process reads. Collective."""
    rollout = Rollout.unpack(batch)
    check_no_holes(rollout.measured())
    tensors = _unpadded(rollout, TeacherTargets.unpack(batch), device)
    rows, _, width = tensors["hidden"].shape
    longest = (rollout.attention_mask != 0).sum(-1).max()
    mine = torch.stack([longest.new_tensor(rows), longest, longest.new_tensor(width)])
    sizes = [torch.empty_like(mine) for _ in range(group.size)]
    distributed.all_gather(sizes, mine, group=group.group)
    for owner, (rows, tokens, width) in enumerate(torch.stack(sizes).tolist()):
        # Equal parts for all, rounded up.
        length = max(1, -(-(tokens - 1) // group.size))
        shapes = {"tokens": (rows, length + 1), "hidden": (rows, length, width), "teacher": (rows,), "pull": (rows,)}
        part = {
            name: _scattered(group, owner, tensor, shapes.get(name, (rows, length)), length)
            for name, tensor in tensors.items()
        }
        # A part is a batch like any other: the first token of each row is its prompt, all others, also of the prompt,
        # its completion. Those of the prompt have no weight. Padding follows the completion, so no token attends to it.
        tokens_BN = part["tokens"]
        teacher = part["teacher"].cpu() if "teacher" in part else None
        targets = TeacherTargets(hidden=part["hidden"], teacher=teacher)
        yield {
            "prompt_ids": tokens_BN[:, :1],
            "prompt_mask": torch.ones_like(tokens_BN[:, :1]),
            "completion_ids": tokens_BN[:, 1:],
            "completion_mask": part["mask"],
            "loss_weights": part["weights"],
            "begins_at": group.rank * length,
            **{name: part[name] for name in ("pull", "logprobs") if name in part},
            **kept_by_row(targets, part["weights"]).pack(),
        }


def _unpadded(rollout: Rollout, targets: TeacherTargets, device: torch.device) -> dict[str, Tensor]:
    """Rows from their first token on, [B, L]; mask, weight, target and logprob of the L - 1 after the first."""
    mask_BL = (rollout.attention_mask != 0).long()
    order_BL = mask_BL.argsort(dim=1, descending=True, stable=True)
    zeros_BP = torch.zeros_like(rollout.prompt_ids, dtype=torch.float32)
    each_BC = {"weights": rollout.weights, "logprobs": rollout.logprobs}
    places_BL = (order_BL[:, 1:] - rollout.prompt_ids.size(1)).clamp(min=0)
    hidden_BCH = targets.hidden.to(device)
    if targets.teacher is not None:  # of several dtypes, of which other processes may have others
        hidden_BCH = hidden_BCH.float()
    found = {
        "tokens": rollout.input_ids.gather(1, order_BL),
        "mask": mask_BL.gather(1, order_BL)[:, 1:],
        **{
            name: torch.cat([zeros_BP, one_BC], dim=1).gather(1, order_BL)[:, 1:]
            for name, one_BC in each_BC.items()
            if one_BC is not None
        },
        "hidden": hidden_BCH.gather(1, places_BL[..., None].expand(-1, -1, hidden_BCH.size(-1))),
    }
    of_rows = {"teacher": targets.teacher, "pull": rollout.pull}
    return found | {name: one.to(device) for name, one in of_rows.items() if one is not None}


def _scattered(group: RowGroup, owner: int, tensor: Tensor, shape: tuple[int, ...], length: int) -> Tensor:
    """This process's part of the owner's tensor: `length` positions, and what `shape` has beyond."""
    received = tensor.new_empty(shape)
    parts = None
    if owner == group.rank:
        if tensor.dim() == 1:
            parts = [tensor] * group.size  # one value per row, which every process needs
        else:
            # Parts of the tokens overlap by one: each begins with the token before its positions.
            beyond = shape[1] - length
            whole = group.size * length + beyond
            padding = [0, 0] * (tensor.dim() - 2) + [0, max(0, whole - tensor.size(1))]
            padded = pad(tensor[:, :whole], padding)
            starts = range(0, group.size * length, length)
            parts = [padded[:, start : start + length + beyond].contiguous() for start in starts]
    distributed.scatter(received, parts, group=group.group, group_src=owner)
    return received
