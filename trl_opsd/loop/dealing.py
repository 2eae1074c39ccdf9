"""Divides the rows of an optimizer step among processes, micro-batches and, with sequence parallelism, positions.

The loss has one denominator for the whole step, so the gradient does not depend on the assignment.
Each process generates its own rows; before they are scored, some may move to another process.

B rows · L tokens, prompt and completion · N positions of one process · H teacher's hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, distributed
from torch.nn.functional import pad

from trl_opsd._compat.sharding import is_split_model
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import check_no_holes
from trl_opsd.models.grouping import equal_groups, even_groups, fewest_groups
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.types import OnHost, Rollout, TeacherTargets, lengths_of
from trl_opsd.types.targets import kept_by_row

if TYPE_CHECKING:
    from trl_opsd.models.shared_rows import RowGroup
    from trl_opsd.trainer import OPSDTrainer

EVEN = 1.05
"""Largest tokens per process relative to the mean; up to this no rows are exchanged, which would cost a gather."""

Parts = Generator[tuple[Mapping[str, Any], bool], None, None]
"""Micro-batches, each with whether it is the last of its call."""


class Dealer:
    """Micro-batches of rows of similar length, and with a token budget as many as fit it.

    TRL assigns at random, `per_device_train_batch_size` rows each. Here an optimizer step has the same rows, and
    `training_step` is called as often; a call may have several micro-batches.
    """

    def __init__(self, host: OPSDTrainer, generate: Callable[[Any], dict[str, Any]]) -> None:
        self._host, self._generate = host, generate
        self.current: Mapping[str, Any] | None = None
        """The micro-batch that is trained on; `None` outside of `training_step`."""
        self._dealt: list[list[dict[str, Any]]] | None = None
        """The micro-batches of each call of an optimizer step."""

    @property
    def is_dealt(self) -> bool:
        """Whether rows of an optimizer step are held."""
        return self._dealt is not None

    def forget(self) -> None:
        """Drops the rows of a step, with the teacher's targets in them."""
        self._dealt = None

    def only_part(self, rows: Any, call: int) -> Mapping[str, Any]:
        """The micro-batch of a call, for a `training_step` of the user's, which takes one."""
        if self.current is not None:
            return self.current
        parts = self._of_call(rows, call)
        if len(parts) > 1:
            raise ValueError(
                f"This call of `training_step` has {len(parts)} micro-batches, but `_prepare_inputs` returns only one "
                "when it is not called by the trainer's own method: call `super().training_step`, or remove "
                "`max_tokens_per_microbatch`."
            )
        return parts[0]

    def parts(self, rows: Any, call: int) -> Parts:
        """The micro-batches of a call, each with whether it is the last."""
        parts = self._of_call(rows, call)
        for number, part in enumerate(parts, start=1):
            yield part, number == len(parts)

    def losses(self, parts: Parts, model: Any, learn: Callable[[bool], Tensor]) -> list[Tensor]:
        """Calls `learn` with whether it is the last for each micro-batch, which `current` is meanwhile."""
        for one in (model, self._host.optimizer):  # an evaluation may have come before
            if callable(getattr(one, "train", None)):
                one.train()
        losses = []
        try:
            with closing(parts):
                for self.current, is_last in parts:
                    with nullcontext() if is_last else _accumulating(self._host.accelerator, model):
                        losses.append(learn(is_last))
        finally:
            self.current = None
        return losses

    def _of_call(self, rows: Any, call: int) -> list[dict[str, Any]]:
        if call == 0 or self._dealt is None:  # also in a run that resumes or was interrupted
            self._dealt = self._deal(self._generate(rows))
        return self._dealt[call]

    def _deal(self, batch: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """The rows of an optimizer step as micro-batches for each call."""
        order = torch.randperm(len(batch["lengths"])).tolist()  # TRL draws it, and later draws are to be the same
        batch = chosen(batch, order)
        calls = self._host.args.gradient_accumulation_steps
        multiple = self._host.args.pad_to_multiple_of or 1  # what padding will add counts against the budget
        groups = self._groups([-(-size // multiple) * multiple for size in Rollout.unpack(batch).sizes])
        bounds = [len(groups) * call // calls for call in range(calls + 1)]
        dealt = [[chosen(batch, group) for group in groups[a:b]] for a, b in pairwise(bounds)]
        if (weights_BC := batch.get("loss_weights")) is not None:  # read once here, rather than in each micro-batch
            host_BC = weights_BC.cpu()
            for part, group in zip(chain.from_iterable(dealt), groups, strict=True):
                part["weights_on_host"] = OnHost.known(part["loss_weights"], host_BC[group])
        return dealt

    def exchanged(
        self, batch: Mapping[str, Any], rows: Sequence[BatchRow], stay: bool
    ) -> tuple[dict[str, Any], list[BatchRow]]:
        """Exchanges rows, unless they have to `stay`, so that processes have about as many tokens. Collective."""
        accelerator = self._host.accelerator
        number = accelerator.num_processes
        if number == 1 or not self._host.model.training or stay:
            return dict(batch), list(rows)
        tokens = [one.total for one in lengths_of(batch["prompt_mask"], batch["completion_mask"])]
        has_images = [int(row.images is not None) for row in rows]
        both = accelerator.gather(torch.tensor([tokens, has_images], device=accelerator.device)).view(number, 2, -1)
        each = both[:, 0].tolist()
        sums = [sum(theirs) for theirs in each]
        if both[:, 1].any() or max(sums) <= EVEN * sum(sums) / number:  # sending images costs more than it saves
            return dict(batch), list(rows)
        # From the same lengths every process computes the same groups.
        mine = equal_groups(list(chain(*each)), number, packed=True)[accelerator.process_index]
        padding = dict.fromkeys(("prompt_ids", "completion_ids"), self._host.processing_class.pad_token_id)
        found = dict(batch)
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"):
            if name in batch:
                # Processes have padded to different widths, and a gather needs one shape.
                wide = accelerator.pad_across_processes(
                    batch[name], dim=1, pad_index=padding.get(name, 0), pad_first=name.startswith("prompt")
                )
                found[name] = accelerator.gather(wide)[mine]
        everyone = gather_object(list(rows))
        return found, [everyone[row] for row in mine]

    def _groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each micro-batch; as many micro-batches in all processes. Collective where there is a budget."""
        args = self._host.args
        budget, calls = args.max_tokens_per_microbatch, args.gradient_accumulation_steps
        if budget is None:
            return equal_groups(lengths, calls, args.padding_free)
        self.check_budget()
        fewest = len(fewest_groups(lengths, lambda tokens, *_: tokens <= budget, args.padding_free))
        each = self._host.accelerator.gather(torch.tensor([fewest, calls], device=self._host.accelerator.device))
        # As many micro-batches everywhere, at least one per call: their passes may be collective.
        return even_groups(lengths, int(each.max()), args.padding_free)

    def check_budget(self) -> None:
        """Rejects a token budget for a sharded student that reads one row at a time, each with collectives."""
        if self._host.args.max_tokens_per_microbatch is None or self._host.reading.padded_up_to:
            return
        # Processes with fewer rows would make fewer collective calls, and the others would wait forever.
        if is_split_model(self._host.accelerator.unwrap_model(self._host.model)):
            raise ValueError(
                "`max_tokens_per_microbatch`: the student is sharded and processes one row at a time, so every process "
                "needs the same number of rows in a micro-batch: remove the option."
            )


@contextmanager
def _accumulating(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Prevents gradient synchronization in the body, as transformers does in all calls but the last of a step."""
    state = accelerator.gradient_state
    if not state.sync_gradients:
        yield
        return
    state._set_sync_gradients(False)
    try:
        # `sync_each_batch` is accelerate's option for less memory: gradients are reduced in each micro-batch.
        with nullcontext() if state.plugin_kwargs.get("sync_each_batch") else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(True)


def chosen(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The given rows of every tensor and list of a batch; other values are kept, as they belong to the whole batch."""
    return {name: _chosen(value, rows) for name, value in batch.items()}


def _chosen(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        return value.index_select(0, torch.tensor(rows).to(value.device, non_blocking=True))
    return [value[row] for row in rows] if isinstance(value, list | tuple) else value


def parts_to_learn(
    group: RowGroup, batch: Mapping[str, Any], model: Any, reading: Reading, device: torch.device
) -> Iterator[tuple[dict[str, Any], bool]]:
    """For the micro-batch of each process of a group in turn, the part that this process trains on. Collective.

    Each process generates and scores its own rows; only the student's pass with gradients is shared. Each part, given
    with whether it is the last, needs its backward pass before the next: all at once would need as much memory as
    without sharing.
    """
    if reading != PADDED:  # under ZeRO-3 that is known since the first completions
        raise ValueError(
            "`sp_size`: padding changes the student's hidden states, so its rows cannot be divided: remove `sp_size`."
        )
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
        found: dict[str, Any] = {
            "prompt_ids": tokens_BN[:, :1],
            "prompt_mask": torch.ones_like(tokens_BN[:, :1]),
            "completion_ids": tokens_BN[:, 1:],
            "completion_mask": part["mask"],
            "loss_weights": part["weights"],
            "begins_at": group.rank * length,
            **{name: part[name] for name in ("pull", "logprobs") if name in part},
            **kept_by_row(targets, part["weights"]).pack(),
        }
        with group.reads(model):
            yield found, owner == group.size - 1


def _unpadded(rollout: Rollout, targets: TeacherTargets, device: torch.device) -> dict[str, Tensor]:
    """Rows from their first token on, [B, L]; mask, weight, target and logprob of the L - 1 after the first."""
    mask_BL = (rollout.attention_mask != 0).long()
    order_BL = mask_BL.argsort(dim=1, descending=True, stable=True)
    zeros_BP = torch.zeros_like(rollout.prompt_ids, dtype=torch.float32)
    each_BC = {"weights": rollout.weights, "logprobs": rollout.logprobs}
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
