"""Splits micro-batches by position among the processes of a group, so that each trains on a part of every row.

Each process generates and teaches its own rows; only the student's pass with gradients is shared.

B rows · L tokens, prompt and completion · N positions of one process · H teacher's hidden size
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from trl_opsd.models.backbone import check_no_holes
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.models.shared_rows import RowGroup
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.targets import kept_by_row


def parts_to_learn(
    group: RowGroup | None, batch: Mapping[str, Any], model: Any, reading: Reading, device: torch.device
) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """The batches that this process learns from of a micro-batch, each with whether it is the last.

    Each needs its backward pass before the next comes: all at once would need as much memory as without sharing.
    """
    if group is None or not model.training:
        yield batch, True
        return
    if reading != PADDED:  # under ZeRO-3 that is known since the first completions
        raise ValueError(
            "`sp_size`: padding changes what the student reads, so its rows cannot be divided: remove `sp_size`."
        )
    for number, part in enumerate(_parts(group, batch, device), start=1):
        with group.reads(model):
            yield part, number == group.size


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
