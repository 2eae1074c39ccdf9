"""Trains on the rows of an optimizer step as they end, while others are still being generated.

Weights change only at the end of a step, so no row is generated or trained with old ones. The number of loss tokens is
known with the last row: until then losses are divided by a constant, and the gradient is rescaled before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from copy import deepcopy
from time import perf_counter
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd._compat.deepspeed import rescaled
from trl_opsd._compat.versions import set_known
from trl_opsd.config import OPSDConfig
from trl_opsd.data.intake import Request
from trl_opsd.loop.dealing import PASSED_BY, Parts, of_package
from trl_opsd.loop.scoring import Scoring
from trl_opsd.loop.waiting import Waiting
from trl_opsd.models.mode import preserved_mode
from trl_opsd.parallel.pulled import Pulled
from trl_opsd.types import Rollout

__all__ = ["Overlapping", "check_methods"]

_NOT_CALLED = ("_generate", "_generate_single_turn")
"""Methods that generate a whole batch; with overlap they are called for the log only, after the last row."""

logger = get_logger(__name__)


class Overlapping(Scoring):
    """A trainer that may generate, teach and train on rows of one step concurrently.

    `training_step` is called as often as without, and does all of an optimizer step in the last of these calls.
    """

    begin_batch: Callable[[Any], list[Request]]
    trl_batch: Callable[[Sequence[Request]], dict[str, Any]]
    padded: Callable[[Sequence[list[int]], Sequence[list[int]]], dict[str, Tensor]]
    record: Callable[[str, float], None]
    model_wrapped: Any
    rollout: Any
    _completions: list[list[int]] | None = None
    """Completions of the step that `_count` logs; `None` elsewhere, where the rollout generates them."""
    _requests: Sequence[Request] = ()
    """The rows being generated."""
    _weight: float = 1.0
    """The sum of the token weights of the step, over all processes: the denominator of its loss."""
    _constant: float = 1.0
    """Provisional denominator, until that is known."""
    _last_weight: float = 0.0
    """That sum in the last step in which it was not 0."""

    def say_overlap(self) -> None:
        """Warns about what does not overlap."""
        if self.args.overlap != "step":
            return
        option, name = f"`overlap={self.args.overlap!r}`", type(self).__name__
        none = f"{option} has no effect"
        if not self.streams:
            why = "tools are called" if self.tools else f"`{name}.complete` returns"
            logger.warning(f"{none}: {why} when all rows are written.")
        elif not (self.writes_apart or self.teaches_early):
            logger.warning(
                f"{none}: {self.rollout} writes in the trainer's own process, so that nothing can be learned "
                "meanwhile, and no teacher reads in another one. A vLLM server writes apart: `use_vllm=True` with "
                "`vllm_mode='server'`."
            )
        elif self.writes_apart and self.args.teacher_offload in ("cpu", "stream"):
            logger.warning(
                f"{option} with `teacher_offload={self.args.teacher_offload!r}`: the teacher's weights are copied to "
                "the device for each micro-batch, and not once in a step: leave one of them out if that is slow."
            )

    @property
    def overlaps(self) -> bool:
        """Whether rows are trained on as they come."""
        return self.args.overlap == "step" and self.streams and self.writes_apart

    @property
    def tells_early(self) -> bool:
        """Whether a teacher is notified of each row when it has ended."""
        return self.args.overlap == "step" and self.streams and self.teaches_early

    @property
    def rows_stay(self) -> bool:
        return super().rows_stay or self.tells_early  # a teacher was notified by the process that generated them

    def _from_rollout(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """What `complete` returns; a teacher that starts early is notified of each row when it has ended."""
        if self._completions is not None:
            return self._completions
        if not (self.model.training and self.tells_early):
            return self.complete(prompt_ids)
        self.forget_expected()
        found = {}
        with closing(self.stream(prompt_ids)) as rows:
            for row, completion in rows:
                found[row] = completion
                self.expect(Rollout.unpack(self.padded([prompt_ids[row]], [completion])), [self._requests[row]])
        return [found[row] for row in range(len(prompt_ids))]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As TRL's; where steps overlap, the loss of a whole step is that of its last call, and 0 in all before."""
        if not self.overlaps:
            return super().training_step(model, inputs, num_items_in_batch)
        if not self.accelerator.gradient_state.sync_gradients:  # the step is taken after a later call
            set_known(self, _step=self._step + 1)
            return torch.zeros((), device=self.args.device)
        *early, last = self._learned(self._arriving(inputs), model, inputs, num_items_in_batch)
        factor = self._constant / self._weight
        if not self.is_deepspeed_enabled:  # which has stepped already, with `_scaled_last`
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            last = last * factor
        return torch.stack([*(one * factor for one in early), last]).sum()

    def _expected(self) -> float:
        """A power of two near the probable denominator of the step: exact to multiply by, the same in all processes.

        In half precision a gradient that is divided by much more may underflow. The last step tells more than options.
        """
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        most = rows * self.accelerator.num_processes * self.args.max_completion_length
        return 2.0 ** round(math.log2(self._last_weight or most))

    def _arriving(self, inputs: Any) -> Parts:
        """The micro-batches of a step as their rows come, each with whether it is the last. Collective."""
        start, learned = perf_counter(), []
        self._constant = self._expected()
        self.forget_expected()
        rows = self.begin_batch(inputs)
        prompt_ids = self._tokenize_prompts(deepcopy([row["prompt"] for row in rows]))[0]
        waiting = self._waiting(prompt_ids)
        device = self.accelerator.device
        weight = torch.zeros((), device=device)
        with self.session(), closing(self._begun(prompt_ids)) as pulled:
            while True:
                part = self._next(waiting, pulled, prompt_ids, rows)
                weight += part["loss_weights"].sum()
                # Every process takes part in each round until all have trained on their rows: a sharded student's
                # forward is collective.
                left = torch.tensor([waiting.left], device=device)
                if not self.accelerator.gather(left).any():
                    break
                yield {**part, "num_items_in_batch": torch.tensor(self._constant, device=device)}, False
                learned.append(perf_counter())
        # The last micro-batch trains after this: by now the denominator is known.
        self._count(rows, [waiting.completions[row] for row in range(len(rows))])
        total = float(self.accelerator.gather(weight).sum())
        # A step without loss tokens has losses of 0, whatever divides them.
        self._weight, self._last_weight = total or 1.0, total or self._last_weight
        with self._scaled_last() as divisor:
            yield {**part, "num_items_in_batch": torch.tensor(divisor, device=device)}, True
        learned.append(perf_counter())
        self.record("overlap/first_backward", learned[0] - start)
        self.record("overlap/last_row", pulled.last - start)
        self.record("overlap/end", learned[-1] - start)

    def _waiting(self, prompt_ids: Sequence[list[int]]) -> Waiting:
        self.check_budget()
        return Waiting(
            list(map(len, prompt_ids)),
            rows=self.args.per_device_train_batch_size,
            budget=self.args.max_tokens_per_microbatch,
            packed=self.args.padding_free,
            multiple=self.args.pad_to_multiple_of or 1,
            in_order=self.args.deterministic,  # the order of rows decides how sums round
        )

    def _begun(self, prompt_ids: list[list[int]]) -> Pulled[tuple[int, list[int]]]:
        with self.phase("complete"), preserved_mode(self.model):
            return Pulled(self.stream(prompt_ids))

    def _next(
        self,
        waiting: Waiting,
        pulled: Pulled[tuple[int, list[int]]],
        prompt_ids: list[list[int]],
        rows: Sequence[Request],
    ) -> dict[str, Any]:
        """The next micro-batch, scored; of weight 0 if this process has trained on all its rows. Collective."""

        def padded(numbers: Sequence[int]) -> dict[str, Tensor]:
            return self.padded([prompt_ids[row] for row in numbers], [waiting.completions[row] for row in numbers])

        def come(wait: bool) -> None:
            came = pulled.take(wait)
            for row, completion in came:
                waiting.add(row, completion)
                self.note_logprobs(rows[row], prompt_ids[row], completion)
            if came and self.teaches_early:
                numbers = [row for row, _ in came]
                self.expect(Rollout.unpack(padded(numbers)), [rows[row] for row in numbers])

        if waiting.left:
            come(wait=False)
        while (taken := waiting.take()) is None:
            with self.phase("complete"):
                come(wait=True)
        # A process without rows left repeats one to keep collectives matched; the shortest costs least.
        numbers = taken or [waiting.shortest()]
        batch: dict[str, Any] = padded(numbers)
        batch.update(self.score(batch, [rows[row] for row in numbers]))
        if not taken:
            batch["loss_weights"] = torch.zeros_like(batch["loss_weights"])
        return batch

    def _count(self, rows: Sequence[Request], completions: list[list[int]]) -> None:
        """Lets TRL count and log a step that was generated row by row."""
        self._completions = completions
        try:
            self.trl_batch(rows)
        finally:
            self._completions = None
        torch.randperm(len(rows))  # drawn without overlap too: later draws are to be the same

    def _scaled_last(self) -> AbstractContextManager[float]:
        """Context of the last micro-batch, which gives the divisor of its loss.

        DeepSpeed steps in the last backward pass, and divides the whole gradient by what it takes for a loss scale.
        """
        if not self.is_deepspeed_enabled:
            return nullcontext(self._constant)
        return rescaled(self.model_wrapped.optimizer, self._constant, self._weight)


def check_methods(trainer: type, args: OPSDConfig) -> None:
    """Rejects overrides of methods that need a whole batch: overlap trains before its last row is generated."""
    for name in (*PASSED_BY, *_NOT_CALLED) if args.overlap == "step" else ():
        if not of_package(getattr(trainer, name)):
            raise TypeError(
                f"`overlap={args.overlap!r}` with `{trainer.__name__}.{name}`, which a batch passes as a whole, and "
                "rows are learned before the last is written: override `weigh` or `compare` instead, or leave the "
                "option out."
            )
