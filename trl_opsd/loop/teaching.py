"""The teachers of a trainer: what they and the student read, their targets, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger

from trl_opsd._compat.peft import describe_adapters
from trl_opsd.data.datasets import Rows, admit, by_name, columns_of, describe_rows, longest, look_ahead, surveyed
from trl_opsd.data.images import begin_reading, places
from trl_opsd.data.prompts import Row
from trl_opsd.data.readers import PromptLimits, Reader, Readers, are_same
from trl_opsd.data.tokenization import largest_id, look_at, shared_vocabulary
from trl_opsd.loop import fingerprint
from trl_opsd.loop.overrides import own_verbs
from trl_opsd.loop.teacher_prompts import TeacherPrompts
from trl_opsd.methods.reward_functions import Given
from trl_opsd.methods.rewards import Rewards
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import shape_of
from trl_opsd.models.checks import student_limits
from trl_opsd.options.rules import check_train_size
from trl_opsd.parallel.precision import autocast
from trl_opsd.teacher.base import Teacher, innermost
from trl_opsd.teacher.build import build_teachers
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.teachers import Teachers
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.targets import kept_by_row

if TYPE_CHECKING:
    from trl_opsd.prepare import Prepared
    from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)

_ROOMY = 4096
"""Prompt tokens that every engine has room for: their cache is small, and fewer need not be counted."""


class Teaching:
    """Teachers, the readers of prompts for the student and for them, and the datasets that both can read."""

    teachers: Teachers
    readers: Readers
    vocabulary: int | None = None
    """Token ids that student and teachers share, where one of them has more."""

    def __init__(self, host: OPSDTrainer, given: Prepared, use_teachers: Callable[[Teachers], None]) -> None:
        self._host, self._given, self._use_teachers = host, given, use_teachers
        self.names: tuple[str, ...] = ()
        """Names of the teachers, in the order of their numbers; empty if there is one."""
        self.steps_ahead = 0
        """Offset from the step being trained to the step whose rows are read."""
        self.prompts = TeacherPrompts(host)
        self._of_engine: PromptLimits | None = None
        """Limits of an engine in this process, which is built once."""
        self._described_rows: str | None = None
        """The training dataset in the fingerprint; computed when first needed."""
        self._fixed: fingerprint.Fingerprint = {
            "student": fingerprint.describe_student(host.model, host.base_samples),
            "optimizer": fingerprint.describe_optimizer(host.optimizer, host.args),
            "methods": [one.described() for one in host.methods if one.resumed],
            "functions": {name: fingerprint.describe_function(one) for name, one in self._functions().items()},
        }
        """Entries of the fingerprint that describe what was passed."""
        self.readers = Readers(
            intake=given.intake,
            tokenizers=(theirs := {} if host.cross is None else host.cross.of_teachers),
            largest_ids={name: largest_id(one) for name, one in {"": host.processing_class, **theirs}.items()},
            tokenize=host.tokenize,
            tokenize_with_images=host.tokenize_with_images,
            processors=host.processors,
            template=host.args.teacher_template_kwargs,
            tokenizer=host.processing_class,
            placeholders=frozenset(host.placeholders),
            chat_template=host.chat_template_kwargs,
            student_limits=student_limits(host.model, host.args),
        )
        self._prompts_are_seen = next(iter(given.rows.values())).can_be_read_ahead

    def build(self) -> None:
        """Builds the teachers from the checked arguments, and checks every row with student and teachers."""
        rows = self._admit(self._given.rows, self.readers.student)
        self._student_readers = self.readers
        self.build_teachers(self._given.models)
        self._admit(rows, self.readers.teacher)
        if self.readers.contrast is not None:
            self._admit(rows, self.readers.contrast)
        self.readers = self.readers.bounded_by_teacher(columns_of(self._host.train_dataset) or ())
        self._of_engine = self._limits_of_engine(rows)
        self.readers = self.readers if self._of_engine is None else self.readers.within(self._of_engine)

    def build_teachers(self, models: Mapping[str, Any]) -> None:
        """Builds teachers from models or paths, in place of those that were there before."""
        host, wrap = self._host, None
        self.readers = self._student_readers
        if host.cross is not None:
            self.vocabulary = host.cross.within(self.readers.student_limits.vocabulary)
            wrap = partial(host.cross.teacher, host=host)
        with autocast(host.accelerator):
            self.teachers = build_teachers(models, host, wrap)
        self.names = tuple(self.teachers) if len(self.teachers) > 1 else ()
        fingerprint.check_made_for(host, self.teachers)
        self._fixed = {**self._fixed, **fingerprint.of_teachers(self.teachers, host.args, host.base_samples)}
        if self.teachers.average is not None:
            host.add_callback(self.teachers.average)
        # Known only once they are built: their vocabularies and contexts.
        ids = {name: shape_of(innermost(one).head)[0] for name, one in self.teachers.items()}
        contexts = {name: one.context for name, one in self.teachers.items()}
        if host.cross is None:
            self.vocabulary = shared_vocabulary(self.readers.student_limits.vocabulary, ids, host.processing_class)
        self.readers = self.readers.with_teachers(self.vocabulary, contexts, {} if host.cross is None else ids)
        if host.args.seq_kd:
            self._use_teachers(self.teachers)
        if host.reads_images:
            self.prove_images()

    def prove_images(self) -> None:
        """Verifies how the teachers read images. Collective."""
        for name, teacher in self.teachers.items():
            processor = name if name in self._host.processors else ""
            if isinstance(teacher, FrozenTeacher) and self._host.processors[processor] is not None:
                with autocast(self._host.accelerator):
                    teacher.prove_images(self._host.probe_prompts(processor))

    def _limits_of_engine(self, rows: Mapping[str, Rows]) -> PromptLimits | None:
        """Those of an engine in this process: room for the longest row, where it is known, as its cache holds one."""
        args, limits = self._host.args, self.readers.student_limits
        if not args.use_vllm or args.vllm_mode == "server":
            return None
        remedy = "set `vllm_max_model_length`, by default that of the first datasets"
        limits = replace(limits, reader="the engine", remedy=remedy)
        if args.vllm_max_model_length is not None or self._host.tools or self._given.environments is not None:
            return limits  # tools and environments add to prompts
        most = _ROOMY
        for one in rows.values():
            found = longest(one, self.readers.student, most)
            if found is None:
                return limits
            most = found
        context = most + limits.completion
        return replace(limits, context=context if limits.context is None else min(context, limits.context))

    def check_room(self, datasets: Mapping[str, Any]) -> None:
        """Refuses other datasets with prompts that the engine was not built for, before it generates."""
        if self._of_engine is None:
            return
        for rows in surveyed(datasets, self._host.args, self.readers.intake.names).values():
            if rows.survey is not None:
                admit(look_ahead(rows, self.readers.intake), self.readers.student, dropped=None)

    def _admit(self, rows: dict[str, Rows], reader: Reader) -> dict[str, Rows]:
        host = self._host
        dropped = host.dropped_prompts if host.args.overlong_prompts == "drop" else None
        rows = {name: admit(one, reader, dropped) for name, one in rows.items()}
        datasets = {name: one.dataset for name, one in rows.items()}
        eval_dataset = datasets.get("eval_dataset")
        if isinstance(host.eval_dataset, dict):
            names = zip(host.eval_dataset, by_name(host.eval_dataset), strict=True)
            eval_dataset = {name: datasets.get(where) for name, where in names}
        host.train_dataset, host.eval_dataset = datasets.get("train_dataset"), eval_dataset
        if host.train_dataset is not None:
            check_train_size(host.train_dataset, host.args)
        return rows

    # ---- A batch ----------------------------------------------------------------------------------------------------

    @property
    def batch_name(self) -> str:
        """The current generation batch, in messages about its rows."""
        host, accelerator = self._host, self._host.accelerator
        step = host.state.global_step + 1 + self.steps_ahead
        name = f"the batch of step {step}" if host.model.training else "an evaluation batch"
        return f"{name} in process {accelerator.process_index}" if accelerator.num_processes > 1 else name

    def read_rows(self, rows: Sequence[Row]) -> list[BatchRow]:
        """Parses and checks the rows of a generation batch."""
        host, batch = self._host, self.batch_name
        requests = self.readers.read_batch(rows, batch)
        if not self._prompts_are_seen:
            look_at(host.processing_class, batch, requests, host.args, host.tools, host.cross is None)
            self._prompts_are_seen = True
        return list(map(BatchRow, requests))

    def readings_of(self, rows: Sequence[Row], ahead: bool) -> list[Callable[[], None]]:
        """Tasks that read the images of rows, or those of the next step; errors are raised when rows are read."""
        host, found = self._host, list[Callable[[], None]]()
        with suppress(TypeError, ValueError):
            requests = self.readers.intake.read_batch(rows, self.batch_name)
            for name in ("student", "of_teacher", "contrast"):
                prompts = [one for one in (getattr(row, name) for row in requests) if one and one.has_images]
                for last, prompt in pairwise([None, *prompts]):
                    processor = host.processors.get(prompt.processor)
                    if processor is not None and not are_same(last, prompt):
                        images = [part["image"] for part in places(prompt.value)]
                        found.append(partial(begin_reading, processor, images, host.pictures, ahead))
        return found

    def targets(self, rollout: Rollout, rows: Sequence[BatchRow]) -> TeacherTargets:
        """The teachers' targets for a generation batch, by [`Teachers.targets`], which asks each teacher for its rows.

        They do not read skipped rows.
        """
        # All processes call their teachers, which may be collective.
        read = [number for number, row in enumerate(rows) if row.prompt_weight] or [0]
        if len(read) == len(rows):
            return self._targets(rollout, rows)
        rollout = rollout.select(read)
        targets = kept_by_row(self._targets(rollout, [rows[number] for number in read]), rollout.weights)
        return targets.among(read, len(rows))

    def _targets(self, rollout: Rollout, rows: Sequence[BatchRow]) -> TeacherTargets:
        rollout = self.teachers.proposed(rollout, self._host.args.loss_chunk_tokens, self.vocabulary)
        read = self._for_teachers(rollout, rows)
        before = self.teachers.tokens
        found = self.teachers.targets(*read, self._host.methods.references(rollout, rows))
        if before is not None and (after := self.teachers.tokens) is not None:
            self._host.record("teacher/tokens", after[0] - before[0], len(rows))
            self._host.record("teacher/prefix_saved", after[1] - before[1], len(rows))
        return found

    @property
    def begins_early(self) -> bool:
        """Whether a teacher benefits from `expect`."""
        uses_it = any(type(one).expect is not Teacher.expect for one in self.teachers.values())
        return uses_it and "teach" not in own_verbs(type(self._host))

    def expect(self, rollout: Rollout, rows: Sequence[BatchRow]) -> None:
        """Notifies the teachers of rows that `targets` will soon be called with."""
        self.teachers.expect(*self._for_teachers(rollout, rows))

    def _for_teachers(self, rollout: Rollout, rows: Sequence[BatchRow]) -> tuple[Rollout, list[str]]:
        """The rows as their teachers read them, and the name of the teacher of each."""
        return self.prompts.read(rollout, rows), [row.request.teacher for row in rows]

    # ---- The fingerprint in checkpoints -----------------------------------------------------------------------------

    def fingerprint(self) -> fingerprint.Fingerprint:
        """Of the run, with the teachers and options as they are now."""
        host, rewards = self._host, self.learned_rewards
        processors = {} if host.reads_images is False else host.processors  # there are no images
        if self._described_rows is None:
            calls_functions = self.readers.intake.prompt_fn is not None or bool(rewards)
            columns = None if calls_functions else self._given.row_columns  # a function may read any
            self._described_rows = describe_rows(host.train_dataset, columns)
        return fingerprint.fingerprint(
            host.args,
            host.divergence,
            host.processing_class.chat_template,
            own_verbs(type(host)),
            **self._fixed,
            train_dataset=self._described_rows,
            adapter=describe_adapters(host.model),
            tools=[tool.__name__ for tool in host.tools or ()],
            processors={name: fingerprint.describe_processor(one) for name, one in processors.items()},
        )

    def _functions(self) -> dict[str, Any]:
        """Functions of the user that are called, by name in messages."""
        prompt_fn = self._given.intake.prompt_fn
        return {
            **({} if prompt_fn is None else {"teacher_prompt_fn": prompt_fn}),
            **{f"rewards: {one.name}": one.source for one in self.learned_rewards if not one.is_model},
            **{f"tools: {one.__name__}": one for one in self._host.tools or ()},
            **({} if self._given.environments is None else self._given.environments.sources),
        }

    @property
    def learned_rewards(self) -> Sequence[Given]:
        """The rewards that training depends on."""
        rewards = self._host.methods.get(Rewards)
        return () if rewards is None or not self._host.methods.any("needs_rewards") else rewards.given
