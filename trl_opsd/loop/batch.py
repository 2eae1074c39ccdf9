"""Makes a batch: rows of a dataset in, what the loss reads out, on one path for all who need one.

B rows · P prompt tokens · C completion tokens · R rows of all processes
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_opsd._compat.threads import device_setter
from trl_opsd.loop.dealing import exchanged
from trl_opsd.loop.generation import Generation
from trl_opsd.loop.step_stats import StepStats
from trl_opsd.methods.base import Generated
from trl_opsd.methods.order import checked_weights
from trl_opsd.methods.rows import BatchRow, Written, whole
from trl_opsd.models.backbone import preserved_mode
from trl_opsd.parallel.failure import set_group_timeout
from trl_opsd.parallel.precision import autocast
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.rollout import images_of
from trl_opsd.types.targets import check_targets, kept_by_row

if TYPE_CHECKING:
    from trl_opsd.loop.loader import NextRows
    from trl_opsd.trainer import OPSDTrainer

_THREADS = min(4, os.cpu_count() or 1)
"""Threads that read pictures, which mostly releases the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of this process that have a completion and were scored: what `compute_loss` takes."""

    rollout: Rollout
    """Prompts, completions, and the weight of each token in the loss."""
    targets: TeacherTargets
    """The teacher's targets of the same rows."""
    rows: tuple[BatchRow, ...]
    """B of them: their columns, and what the step has learned of each."""

    def select(self, numbers: Sequence[int]) -> Batch:
        """The given rows, in the given order."""
        rows = tuple(self.rows[number] for number in numbers)
        return Batch(self.rollout.select(numbers), self.targets.select(numbers), rows)


class Batches:
    """Batches of trainings and evaluations.

    parse → methods: before → tokenize → generate → count → methods: generated → exchange between processes → methods:
    select → teach → methods: token_weights → methods: final_weights
    """

    def __init__(
        self,
        host: OPSDTrainer,
        generation: Generation,
        stats: StepStats,
        next_rows: NextRows,
        metrics: Mapping[str, dict[str, list[float]]],
        texts: Mapping[str, Any],
    ) -> None:
        self._host, self._generation, self._stats, self._next = host, generation, stats, next_rows
        self._metrics, self._texts = metrics, texts
        self._threads: ThreadPoolExecutor | None = None
        """What reads the pictures of this step and the next."""

    def make(self, inputs: Sequence[Mapping[str, Any]]) -> Batch:
        """The batch of these rows. Collective."""
        return self.taught(*self.completed(inputs))

    def completed(self, inputs: Sequence[Mapping[str, Any]]) -> tuple[Rollout, Sequence[BatchRow]]:
        """These rows with their completions, in the process that will score them. Collective."""
        host = self._host
        rows: Sequence[BatchRow] = self.begin(inputs)
        written = self._generation.write(rows, host.prompt_ids_of(rows))
        if host.turns is not None:
            host.turns.end(rows)
        rollout = self.counted(rows, written)
        if not self._generation.notifies_teacher:  # which reads a row in the process that generated it
            rollout, rows = exchanged(host, rollout, rows)
        return rollout, rows

    def begin(self, inputs: Sequence[Mapping[str, Any]]) -> list[BatchRow]:
        """Reads and checks the rows of a batch, and counts it. Collective."""
        host, accounts = self._host, self._stats.now
        is_training = bool(host.model.training)
        if host.accelerator.num_processes > 1:
            set_group_timeout(host.args.ddp_timeout_delta)  # in each batch: a library may have made a group since
            host.check_same_rows("train" if is_training else "eval")
        if host.turns is not None:
            inputs = host.turns.begin(inputs, host.teaching.batch_name, accounts.batches)
        rows = host.teaching.read_rows(inputs)
        if host.reads_images is not False:
            self._read_images([row.request for row in rows], is_training)
        self._generation.mark(rows)
        host.methods.before(rows)
        accounts.batches += 1
        return rows

    def _read_images(self, requests: Sequence[Any], is_training: bool) -> None:
        """Begins to read the images of these rows, and in a training those of the next step, in threads."""
        host, readings = self._host, self._host.teaching.readings_of
        host.pictures.begin(is_training)
        later = self._next.rows if is_training else []
        self._threads = ThreadPoolExecutor(_THREADS, "trl_opsd images", device_setter())
        for task in (*readings(requests, ahead=False), *readings(later, ahead=True)):
            self._threads.submit(task)
        self._threads.shutdown(wait=False)  # once these are done

    def stop_reading(self) -> None:
        """Drops readings of images for a step that never comes."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def counted(self, rows: Sequence[BatchRow], written: Written) -> Rollout:
        """The tokens and masks of what was generated for all rows of a batch, counted and shown to methods.

        A skipped row is in no count. Collective.
        """
        host = self._host
        is_training, written = bool(host.model.training), whole(rows, written)
        of_all = self._stats.completed(rows, written)
        asked_R = of_all["asked"] > 0
        counts = {name: column_R[asked_R] for name, column_R in of_all.items()}
        if is_training:
            host.state.num_input_tokens_seen += int((counts["prompt"] + counts["length"]).sum())
        numbers = self._metrics["train" if is_training else "eval"]
        for name, value in self._stats.of_completions(counts).items():
            numbers[name].append(value)
        numbers["num_tokens"] = [host.state.num_input_tokens_seen]
        rollout = host.padded(written.prompt_ids, written.completions, written.authors)
        if host.log_completions:
            for name, ids in {"prompt": rollout.prompt_ids, "completion": rollout.completion_ids}.items():
                texts = host.processing_class.batch_decode(ids, skip_special_tokens=True)
                self._texts[name].extend(gather_object(texts))
        for number, row in enumerate(rows):
            if not row.prompt_weight:  # one token of its prompt is left, as a row has to have one
                rollout.prompt_mask[number, :-1], row.images = 0, None
        # Before rows are exchanged: the completions of a prompt are adjacent.
        host.methods.generated(Generated(rows, written, rollout, of_all, is_training))
        return rollout

    def taught(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Batch:
        """The batch with its teachers' targets, weights, and what is added to the divergence. Collective."""
        host, name = self._host, type(self._host).__name__
        nll_weight = None
        if host.model.training and host.methods.any("adds_nll"):
            nll_weight = torch.tensor(
                [row.nll_weight for row in rows], dtype=torch.float32, device=host.accelerator.device
            )
        rollout = replace(rollout, nll_weight=nll_weight, lengths=rollout.measured(), images=images_of(rows))
        versions = _versions(rollout)
        rollout = replace(rollout, weights=host.methods.select(rollout.weights, rollout, rows))
        selected = rollout.weights.clone()  # `weigh` may change them in place
        with preserved_mode(host.model):
            models = host.teaching.teachers.models
            with host.phase("teach"), autocast(host.accelerator), host.compiled(models):
                targets = host.teach(rollout, rows)
            check_targets(targets, rollout, f"{name}.teach")
            if missing := host.methods.reads - set(targets.reference_states):
                raise ValueError(
                    f"`{name}.teach` returned targets without those of {sorted(missing)}, which the objective needs: "
                    "change those of `super().teach(rollout, rows)`."
                )
            weights = host.weigh(rollout, rows, targets)
        # A `Rollout` is frozen, but not what its tensors hold: with a mask that is changed in place the student would
        # attend to other tokens than the teacher did.
        if versions != _versions(rollout):
            raise ValueError(
                f"`{name}.teach`, `{name}.weigh`, or the teacher changed the tokens or masks of the rollout in place: "
                "change a copy. To exclude a token from the loss, return a weight of 0 for it from `weigh`."
            )
        targets, rollout = kept_by_row(targets, selected), replace(rollout, weights=selected)
        weights = host.methods.final_weights(checked_weights(weights, selected, "weigh"), rollout, rows)
        rollout = replace(rollout, weights=weights)
        logprobs = self._logprobs(rollout, rows) if host.reads_logprobs else None
        return Batch(replace(rollout, lengths=rollout.ended().lengths, logprobs=logprobs), targets, tuple(rows))

    def _logprobs(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor | None:
        """What tokens were sampled with, [B, C], NaN where it is not known; `None` without any. Collective.

        A loss that weighs tokens by it gets those of all rows of the student in all processes, or none.
        """
        logprobs_BC = torch.full(rollout.completion_ids.shape, torch.nan)
        for number, row in enumerate(rows):
            if row.logprobs is not None:
                start = len(row.given.ids)
                logprobs_BC[number, start : start + len(row.logprobs)] = torch.tensor(row.logprobs)
        device, weighs = self._host.accelerator.device, self._host.learns_from_draws
        drawn = [row.logprobs is not None for row in rows if not row.is_off_policy]
        of_all = self._host.accelerator.gather(torch.tensor([[any(drawn), all(drawn)]], device=device)).view(-1, 2)
        known = of_all[:, 0].any() and (not weighs or of_all[:, 1].all())
        return logprobs_BC.to(device) if known else None


def _versions(rollout: Rollout) -> list[int]:
    """Changes with each write to tokens or masks."""
    tensors = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    return [one._version for one in (*tensors, rollout.authors, rollout.nll_weight) if one is not None]
