"""Assigns the rows of an optimizer step to processes and micro-batches by length, and trains on these in turn.

The loss has one denominator for the whole step, so the gradient does not depend on the assignment.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import chain, pairwise
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import Trainer

from trl_opsd._compat.sharding import is_split_model
from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd._compat.versions import set_known
from trl_opsd.config import OPSDConfig
from trl_opsd.models.grouping import equal_groups, even_groups, fewest_groups
from trl_opsd.models.padding import Reading
from trl_opsd.types import OnHost, lengths_of

__all__ = ["SEAMS", "Dealing"]

SEAMS: dict[str, tuple[str, ...]] = {
    "_prepare_inputs": ("self", "generation_batch"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
}
"""Overridden methods of TRL's trainer, with their parameters; a test compares them with the installed ones."""

EVEN = 1.05
"""Largest tokens per process relative to the mean; up to this no rows are exchanged, which would cost a gather."""

Parts = Generator[tuple[Mapping[str, Any], bool], None, None]
"""Micro-batches, each with whether it is the last of its call."""

PASSED_BY = ("_generate_and_score_completions", "_prepare_inputs", "compute_loss")
"""Methods that a batch passes; an override may change it."""


def of_package(method: Any) -> bool:
    """Whether a method is TRL's or ours."""
    ours = __name__.partition(".")[0]
    return str(getattr(method, "__module__", "")).startswith((f"{ours}.", DistillationTrainer.__module__))


class Dealing(DistillationTrainer):
    """A trainer whose micro-batches hold rows of similar length, and with a token budget as many as fit it.

    TRL assigns at random, `per_device_train_batch_size` rows each. Here an optimizer step has the same rows, and
    `training_step` is called as often; a call may have several micro-batches.
    """

    args: OPSDConfig
    reading: Reading
    _part: Mapping[str, Any] | None = None
    """The micro-batch that is trained on; `None` outside of `training_step`."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        if self._part is not None:
            return self._part
        self._fill(generation_batch)
        parts = self._buffered_inputs[self._call]
        if len(parts) > 1:
            raise ValueError(
                f"This call of `training_step` has {len(parts)} micro-batches, of which `_prepare_inputs` returns one "
                "outside of ours: call `super().training_step`, or leave `max_tokens_per_microbatch` out."
            )
        return parts[0]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As TRL's, with one forward and backward pass for each micro-batch of the call."""
        if not of_package(self._prepare_inputs):  # a user's, which takes the rows and may return anything
            if self.args.max_tokens_per_microbatch is not None:
                raise ValueError(
                    f"`max_tokens_per_microbatch` with `{type(self).__name__}._prepare_inputs`, which returns one "
                    "micro-batch for each call: leave the option out, or override `weigh` or `compare` instead."
                )
            return super().training_step(model, inputs, num_items_in_batch)
        return torch.stack(self._learned(self._parts(inputs), model, inputs, num_items_in_batch)).sum()

    def _parts(self, rows: Any) -> Parts:
        """The micro-batches of this call, each with whether it is the last."""
        self._fill(rows)
        parts = self._buffered_inputs[self._call]
        for number, part in enumerate(parts, start=1):
            yield part, number == len(parts)

    def _learned(self, parts: Parts, model: Any, *args: Any) -> list[Tensor]:
        """The losses of the micro-batches of a call, after their backward passes."""
        start, losses = perf_counter(), []
        for one in (model, self.optimizer):  # an evaluation may have come before
            if callable(getattr(one, "train", None)):
                one.train()
        try:
            with closing(parts):
                for self._part, is_last in parts:
                    if not is_last:
                        with self._accumulating(model):
                            # Past TRL's, which would count it as a call.
                            losses.append(Trainer.training_step(self, model, *args))
                        continue
                    # TRL times only its own call, which trains on the last micro-batch.
                    set_known(self, _current_train_step_time=self._current_train_step_time + perf_counter() - start)
                    losses.append(super().training_step(model, *args))  # counts the call
        finally:
            self._part = None
        return losses

    @property
    def may_be_changed(self) -> bool:
        """Whether the user overrides a method that a batch passes; the same in all processes."""
        return not all(of_package(getattr(self, name)) for name in PASSED_BY)

    @property
    def rows_stay(self) -> bool:
        """Whether each process has to train on the rows that it generated; the same in all processes."""
        return self.may_be_changed

    @property
    def _call(self) -> int:
        """Index of the next call of `training_step` within an optimizer step."""
        return int(self._step % self.args.gradient_accumulation_steps)

    @contextmanager
    def _accumulating(self, model: Any) -> Iterator[None]:
        """Prevents gradient synchronization in the body, as transformers does in all calls but the last of a step."""
        state = self.accelerator.gradient_state
        if not state.sync_gradients:
            yield
            return
        state._set_sync_gradients(False)
        try:
            # `sync_each_batch` is accelerate's option for less memory: gradients are reduced in each micro-batch.
            with nullcontext() if state.plugin_kwargs.get("sync_each_batch") else self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(True)

    # ---- Dealing ------------------------------------------------------------------------------------------------

    def _fill(self, rows: Any) -> None:
        """Generates a batch when an optimizer step begins, and splits it into micro-batches."""
        if self._call != 0 and self._buffered_inputs is not None:
            return
        batch = self._generate_and_score_completions(rows)
        if self.may_be_changed:
            # The override may have changed masks.
            batch = {**batch, "lengths": list(lengths_of(batch["prompt_mask"], batch["completion_mask"]))}
        order = torch.randperm(len(batch["lengths"])).tolist()  # TRL draws it, and later draws are to be the same
        batch = chosen(batch, order)
        calls = self.args.gradient_accumulation_steps
        multiple = self.args.pad_to_multiple_of or 1  # what padding will add counts against the budget
        groups = self._groups([-(-one.total // multiple) * multiple for one in batch["lengths"]])
        bounds = [len(groups) * call // calls for call in range(calls + 1)]
        dealt = [[chosen(batch, group) for group in groups[a:b]] for a, b in pairwise(bounds)]
        if (weights_BC := batch.get("loss_weights")) is not None:  # read once here, rather than in each micro-batch
            host_BC = weights_BC.cpu()
            for part, group in zip(chain.from_iterable(dealt), groups, strict=True):
                part["weights_on_host"] = OnHost.known(part["loss_weights"], host_BC[group])
        set_known(self, _buffered_inputs=dealt)

    def exchanged(self, batch: Mapping[str, Any], rows: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Exchanges rows so that processes have equally many, and about as many tokens. Collective."""
        accelerator = self.accelerator
        number = accelerator.num_processes
        if number == 1 or not self.model.training or self.rows_stay:
            # A user's override may have added values to the batch for exactly the rows that it was given.
            return dict(batch), list(rows)
        tokens = torch.tensor([one.total for one in lengths_of(batch["prompt_mask"], batch["completion_mask"])])
        each = accelerator.gather(tokens.to(accelerator.device)).view(number, -1).tolist()
        sums = [sum(theirs) for theirs in each]
        if max(sums) <= EVEN * sum(sums) / number:
            return dict(batch), list(rows)
        # From the same lengths every process computes the same groups.
        mine = equal_groups(list(chain(*each)), number, packed=True)[accelerator.process_index]
        padding = {"prompt_ids": self._tokenizer.pad_token_id, "completion_ids": self._tokenizer.pad_token_id}
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
        budget, calls = self.args.max_tokens_per_microbatch, self.args.gradient_accumulation_steps
        if budget is None:
            return equal_groups(lengths, calls, self.args.padding_free)
        self.check_budget()
        fewest = len(fewest_groups(lengths, lambda tokens, *_: tokens <= budget, self.args.padding_free))
        each = self.accelerator.gather(torch.tensor([fewest, calls], device=self.accelerator.device))
        # As many micro-batches everywhere, at least one per call: their passes may be collective.
        return even_groups(lengths, int(each.max()), self.args.padding_free)

    def check_budget(self) -> None:
        """Rejects a token budget for a sharded student that reads one row at a time, each with collectives."""
        if self.args.max_tokens_per_microbatch is None or self.reading.padded_up_to:
            return
        # Processes with fewer rows would make fewer collective calls, and the others would wait forever.
        if is_split_model(self.accelerator.unwrap_model(self.model)):
            raise ValueError(
                "`max_tokens_per_microbatch`: the student is split over the processes and reads one row at a time, so "
                "that every process has to have equally many rows in a micro-batch: leave the option out."
            )


def chosen(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The given rows of every tensor and list of a batch; other values are kept, as they belong to the whole batch."""
    return {name: _chosen(value, rows) for name, value in batch.items()}


def _chosen(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        return value[torch.tensor(rows, device=value.device)]
    return [value[row] for row in rows] if isinstance(value, list | tuple) else value
