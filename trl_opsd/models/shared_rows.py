"""Lets a group of processes compute the same rows, each a part of the positions of every row (Ulysses).

B rows · L positions of one process · D head size · H teacher's hidden size
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_opsd._compat.deepspeed import exchanging_attention
from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import backbone_of, check_no_holes
from trl_opsd.models.padding import PADDED, BatchPolicy
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.targets import kept_by_row

_CAUSAL = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Attention implementations that are causal without a mask: no process has the mask of a whole row."""
_BEYOND = ("sliding_window", "s_aux", "sinks")
"""Arguments of attention that are refused: a window needs a mask, and sinks belong to heads of all processes."""


class RowGroup:
    """The processes that share rows with this one (`size` consecutive ones), and the student's attention among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.group, _ = distributed.new_subgroups(size)
        self.rank = distributed.get_rank(self.group)  # within the group
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._calls = 0

    @contextmanager
    def shares(self, student: CausalLM) -> Iterator[None]:
        """Makes a student's layers exchange positions for heads in training mode, from the first [`reads`] on."""
        name = student.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS[name]

        def over_the_group(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **more: Any
        ) -> Any:
            # In evaluation mode, and so when it generates or teaches, each process computes its own rows.
            if not (module.training and module in self._modules):
                return attend(module, query, key, value, *mask, **more)
            if asked := [one for one in _BEYOND if more.get(one) is not None]:
                raise ValueError(_unsupported(student, f"its attention uses `{asked[0]}`"))
            self._calls += 1
            groups = getattr(module, "num_key_value_groups", None)
            more.pop("attention_mask", None)
            try:
                exchanging = exchanging_attention(attend, query, key, self.group)
                return exchanging(module, query, key, value, None, **more)
            finally:
                if groups is not None:  # DeepSpeed changes the number where it repeats heads
                    module.num_key_value_groups = groups

        # Also for the backward pass: gradient checkpointing runs layers again in it.
        ALL_ATTENTION_FUNCTIONS[name] = over_the_group
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[name] = attend
            self._modules.clear()

    @contextmanager
    def reads(self, student: CausalLM) -> Iterator[None]:
        """Checks that every layer has exchanged positions in the student's forward pass in the body."""
        if not self._modules:
            self._modules.update(student.modules())
        self._calls = 0
        yield
        # A layer with its own attention would silently see its part of the positions only.
        layers = student.config.get_text_config().num_hidden_layers
        if self._calls < layers:
            raise ValueError(
                _unsupported(student, f"{self._calls} of its {layers} layers call transformers' attention")
            )


def check_shareable(student: CausalLM, attention: str | None) -> None:
    """Refuses a student whose attention cannot be divided by positions among processes."""
    config, kind = student.config.get_text_config(), student.config._attn_implementation
    expected = (attention,) if attention in _CAUSAL else _CAUSAL
    layers = set(getattr(config, "layer_types", None) or ())
    if not layers and getattr(config, "sliding_window", None) is not None:
        layers = {"sliding_attention"}
    if kind not in expected:
        why = f"its attention is {kind!r}: load it with `model_init_kwargs={{'attn_implementation': '{expected[0]}'}}`"
    elif others := layers - {"full_attention"}:
        why = f"it has layers of the kind {', '.join(map(repr, sorted(others)))}"
    elif "position_ids" not in inspect.signature(backbone_of(student).forward).parameters:
        why = "it takes no `position_ids`"
    else:
        return
    raise ValueError(_unsupported(student, why))


def _unsupported(student: CausalLM, why: str) -> str:
    return (
        f"`sp_size`: a {type(student).__name__} cannot process parts of rows, because {why}: remove `sp_size` from the "
        "accelerate file, or use a student with full attention in all layers."
    )


# ---- The parts of a micro-batch --------------------------------------------------------------------------------------


def parts_to_learn(
    group: RowGroup, rollout: Rollout, targets: TeacherTargets, model: Any, policy: BatchPolicy, device: torch.device
) -> Iterator[tuple[Rollout, TeacherTargets, bool]]:
    """For the micro-batch of each process of a group in turn, the part that this process trains on. Collective.

    Each process generates and scores its own rows; only the student's pass with gradients is shared. Each part, given
    with whether it is the last, needs its backward pass before the next: all at once would need as much memory as
    without sharing.
    """
    if policy != PADDED:  # under ZeRO-3 that is known since the first completions
        raise ValueError(
            "`sp_size`: padding changes the student's hidden states, so its rows cannot be divided: remove `sp_size`."
        )
    check_no_holes(rollout.measured())
    tensors = _unpadded(rollout, targets, device)
    rows, _, width = tensors["hidden"].shape
    longest = (rollout.attention_mask != 0).sum(-1).max()
    mine = torch.stack([longest.new_tensor(rows), longest, longest.new_tensor(width)])
    sizes = [torch.empty_like(mine) for _ in range(group.size)]
    distributed.all_gather(sizes, mine, group=group.group)
    for owner, (rows, tokens, width) in enumerate(torch.stack(sizes).tolist()):
        # Equal parts for all, rounded up.
        length = max(1, -(-(tokens - 1) // group.size))
        shapes = {
            "tokens": (rows, length + 1),
            "hidden": (rows, length, width),
            "teacher": (rows,),
            "nll_weight": (rows,),
        }
        part = {
            name: _scattered(group, owner, tensor, shapes.get(name, (rows, length)), length)
            for name, tensor in tensors.items()
        }
        # A part is a batch like any other: the first token of each row is its prompt, all others, also of the prompt,
        # its completion. Those of the prompt have no weight. Padding follows the completion, so no token attends to it.
        tokens_BN = part["tokens"]
        teacher = part["teacher"].cpu() if "teacher" in part else None
        kept = kept_by_row(TeacherTargets(hidden=part["hidden"], teacher=teacher), part["weights"])
        of_part = Rollout(
            prompt_ids=tokens_BN[:, :1],
            prompt_mask=torch.ones_like(tokens_BN[:, :1]),
            completion_ids=tokens_BN[:, 1:],
            completion_mask=part["mask"],
            weights=part["weights"],
            nll_weight=part.get("nll_weight"),
            logprobs=part.get("logprobs"),
            authors=part["authors"].long() if "authors" in part else None,
            begins_at=group.rank * length,
        )
        with group.reads(model):
            yield of_part, kept, owner == group.size - 1


def _unpadded(rollout: Rollout, targets: TeacherTargets, device: torch.device) -> dict[str, Tensor]:
    """Rows from their first token on, [B, L]; mask, weight, target, logprob and author of the L - 1 after it."""
    mask_BL = (rollout.attention_mask != 0).long()
    order_BL = mask_BL.argsort(dim=1, descending=True, stable=True)
    zeros_BP = torch.zeros_like(rollout.prompt_ids, dtype=torch.float32)
    each_BC = {"weights": rollout.weights, "logprobs": rollout.logprobs, "authors": rollout.authors}
    places_BL = (order_BL[:, 1:] - rollout.prompt_ids.size(1)).clamp(min=0)
    hidden_BCH = targets.hidden.to(device)
    if targets.teacher is not None:  # of several dtypes; other processes may have others
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
    of_rows = {"teacher": targets.teacher, "nll_weight": rollout.nll_weight}
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
