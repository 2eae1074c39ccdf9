"""Trains on the rows of an optimizer step as they end, while others are still being generated.

Weights change only at the end of a step, so no row is generated or trained with old ones. The number of loss tokens is
known with the last row: until then losses are divided by a constant, and the gradient is rescaled before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_opsd._compat.deepspeed import rescaled
from trl_opsd.loop.batch import Batch, Batches
from trl_opsd.loop.dealing import check_budget
from trl_opsd.loop.generation import Generation
from trl_opsd.methods.rows import BatchRow, Written, whole
from trl_opsd.models.backbone import preserved_mode
from trl_opsd.parallel.prefetch import Prefetcher
from trl_opsd.types import Rollout

if TYPE_CHECKING:
    from trl_opsd.loop.step import MicroBatches
    from trl_opsd.trainer import OPSDTrainer


class Overlap:
    """Generates, teaches and trains on rows of one step concurrently."""

    def __init__(self, host: OPSDTrainer, generation: Generation, batches: Batches) -> None:
        self._host, self._generation, self._batches = host, generation, batches
        self._weight, self._constant, self._last_weight = 1.0, 1.0, 0.0
        """The denominator of the step: known at its end, provisional until then, and the last that was not 0."""

    @property
    def is_on(self) -> bool:
        """Whether rows are trained on as they come."""
        return self._generation.streams and self._generation.rollout.generates_out_of_process

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """What `complete` returns; a teacher that starts early is notified of each row when it has ended."""
        host = self._host
        if not self._generation.notifies_teacher:
            return host.complete(prompt_ids)
        host.teaching.teachers.forget_expected()
        found = {}
        with closing(self._generation.stream(prompt_ids)) as rows:
            for row, completion in rows:
                found[row] = completion
                whole_row = whole([self._generation.rows[row]], Written([prompt_ids[row]], [completion]))
                ended = host.padded(whole_row.prompt_ids, whole_row.completions, whole_row.authors)
                host.teaching.expect(ended, [self._generation.rows[row]])
        return [found[row] for row in range(len(prompt_ids))]

    def rescaled(self, model: Any, losses: Sequence[Tensor]) -> Tensor:
        """The loss of a step and its gradient, as if its denominator had been known from the beginning."""
        *early, last = losses
        factor = self._constant / self._weight
        if not self._host.is_deepspeed_enabled:  # which has stepped already, with the last divisor
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            last = last * factor
        return torch.stack([*(one * factor for one in early), last]).sum()

    def _expected(self) -> float:
        """A power of two near the probable denominator of the step: exact to multiply by, the same in all processes.

        In half precision a gradient that is divided by much more may underflow. The last step tells more than options.
        """
        args = self._host.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        most = rows * self._host.accelerator.num_processes * args.max_completion_length
        return 2.0 ** round(math.log2(self._last_weight or most))

    def arriving(self, inputs: Sequence[Any]) -> MicroBatches:
        """The micro-batches of a step as their rows come. Collective."""
        host, accelerator = self._host, self._host.accelerator
        start, learned = perf_counter(), []
        self._constant = self._expected()
        host.teaching.teachers.forget_expected()
        rows = self._generation.rows = self._batches.begin(inputs)
        prompt_ids = host.prompt_ids_of(rows)
        waiting = self._waiting(prompt_ids)
        weight = torch.zeros((), device=accelerator.device)
        with self._generation.rollout.session(), closing(self._begun(prompt_ids)) as prefetched:
            while True:
                part = self._next(waiting, prefetched, prompt_ids, rows)
                weight += part.rollout.weights.sum()
                # Every process takes part in each round until all have trained on their rows: a sharded student's
                # forward is collective.
                left = torch.tensor([waiting.left], device=accelerator.device)
                if not accelerator.gather(left).any():
                    break
                yield part, torch.tensor(self._constant, device=accelerator.device), False
                learned.append(perf_counter())
        # The last micro-batch trains after this: by now the denominator is known.
        completions = [waiting.completions[row] for row in range(len(rows))]
        self._generation.look_at_first(prompt_ids, completions, type(self._generation.rollout).__name__)
        written = self._generation.turned(prompt_ids, completions)
        if host.turns is not None:
            host.turns.end(rows)
        self._batches.counted(rows, written)
        torch.randperm(len(rows))  # drawn without overlap too: later draws are to be the same
        total = float(accelerator.gather(weight).sum())
        # A step without loss tokens has losses of 0, whatever divides them.
        self._weight, self._last_weight = total or 1.0, total or self._last_weight
        # DeepSpeed steps in the last backward pass, and divides the whole gradient by what it takes for a loss scale.
        scaled: AbstractContextManager[float] = nullcontext(self._constant)
        if host.is_deepspeed_enabled:
            scaled = rescaled(host.model_wrapped.optimizer, self._constant, self._weight)
        with scaled as divisor:
            yield part, torch.tensor(divisor, device=accelerator.device), True
        learned.append(perf_counter())
        host.record("overlap/first_backward", learned[0] - start)
        host.record("overlap/last_row", prefetched.last - start)
        host.record("overlap/end", learned[-1] - start)

    def _waiting(self, prompt_ids: Sequence[list[int]]) -> Waiting:
        args = self._host.args
        check_budget(self._host)
        return Waiting(
            list(map(len, prompt_ids)),
            rows=args.per_device_train_batch_size,
            budget=args.max_tokens_per_microbatch,
            packed=args.padding_free,
            multiple=args.pad_to_multiple_of or 1,
            in_order=args.deterministic,  # the order of rows decides how sums round
        )

    def _begun(self, prompt_ids: list[list[int]]) -> Prefetcher[tuple[int, list[int]]]:
        with self._host.phase("complete"), preserved_mode(self._host.model):
            return Prefetcher(self._generation.stream(prompt_ids))

    def _next(
        self,
        waiting: Waiting,
        prefetched: Prefetcher[tuple[int, list[int]]],
        prompt_ids: list[list[int]],
        rows: Sequence[BatchRow],
    ) -> Batch:
        """The next micro-batch, scored; of weight 0 if this process has trained on all its rows. Collective."""
        host = self._host

        def padded(numbers: Sequence[int]) -> Rollout:
            acted = {} if host.turns is None else host.turns.ended
            authors = [acted[row].mask for row in numbers] if acted else None
            written = Written(
                [prompt_ids[row] for row in numbers], [waiting.completions[row] for row in numbers], authors
            )
            written = whole([rows[row] for row in numbers], written)
            return host.padded(written.prompt_ids, written.completions, written.authors)

        def come(wait: bool) -> None:
            came = prefetched.take(wait)
            for row, completion in came:
                waiting.add(row, completion)
                if host.turns is not None:
                    host.turns.tell(row, rows[row])
                if host.reads_logprobs:
                    self._generation.note_logprobs(rows[row], prompt_ids[row], completion)
            if came and host.teaching.begins_early:
                numbers = [row for row, _ in came]
                host.teaching.expect(padded(numbers), [rows[row] for row in numbers])

        if waiting.left:
            come(wait=False)
        while (taken := waiting.take()) is None:
            with host.phase("complete"):
                come(wait=True)
        # A process without rows left repeats one to keep collectives matched; the shortest costs least.
        numbers = taken or [waiting.shortest()]
        batch = self._batches.taught(padded(numbers), [rows[row] for row in numbers])
        if not taken:
            none = replace(batch.rollout, weights=torch.zeros_like(batch.rollout.weights))
            return replace(batch, rollout=none)
        return batch


class Waiting:
    """The rows of a step that have come, and of these the ones that no micro-batch has taken yet.

    A micro-batch has `rows` rows or, with a `budget`, as many tokens at most, padding included (a longer row is alone);
    `packed` rows are not padded; `in_order` makes micro-batches independent of the order of arrival.
    """

    def __init__(
        self, prompts: Sequence[int], *, rows: int, budget: int | None, packed: bool, multiple: int, in_order: bool
    ) -> None:
        self._prompts, self._rows, self._budget = prompts, rows, budget
        self._packed, self._multiple, self._in_order = packed, multiple, in_order
        self._came: list[int] = []
        self.completions: dict[int, list[int]] = {}
        """By the number of the row."""
        self.left = len(prompts)
        """Rows that no micro-batch has taken yet."""

    def add(self, row: int, completion: list[int]) -> None:
        """Adds a row that has come."""
        self.completions[row] = completion
        self._came.append(row)

    def take(self) -> list[int] | None:
        """The rows of the next micro-batch; `None` if another row has to come first, empty if all were taken."""
        ready = self._came
        if self._in_order:
            first = len(self._prompts) - self.left
            ready = sorted(ready)  # of these only the rows that follow the last taken without a gap
            ready = [row for place, row in enumerate(ready, start=first) if row == place]
        group: list[int] = []
        for row in ready:
            if group and not self._fit([*group, row]):
                break
            group.append(row)
        is_full = len(group) < len(ready) or (self._budget is None and len(group) == self._rows)
        # With a budget rows are taken as they come: waiting for a full one would leave the device idle.
        takes_what_there_is = self._budget is not None and not self._in_order and bool(group)
        if not (is_full or takes_what_there_is or len(ready) == self.left):
            return None
        self._came = [row for row in self._came if row not in group]
        self.left -= len(group)
        return group

    def shortest(self) -> int:
        """The number of the shortest row that has come."""
        return min(self.completions, key=self._length)

    def _fit(self, rows: list[int]) -> bool:
        if self._budget is None:
            return len(rows) <= self._rows
        lengths = [-(-self._length(row) // self._multiple) * self._multiple for row in rows]
        return (sum(lengths) if self._packed else max(lengths) * len(lengths)) <= self._budget

    def _length(self, row: int) -> int:
        return self._prompts[row] + len(self.completions[row])
