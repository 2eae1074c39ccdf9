"""The part of the trainer that knows teachers: what they read, their targets, and their state in checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trl_opsd import fingerprint
from trl_opsd.arguments.checks import check_other_teacher, check_rows_of_rewards, look_at, student_limits
from trl_opsd.arguments.dataset_checks import (
    check_completions,
    check_datasets,
    check_train_size,
    looked_through,
    surveyed,
)
from trl_opsd.arguments.prepared import Prepared
from trl_opsd.arguments.rules import EVALUATING, LEARNING
from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import Rows
from trl_opsd.data.datasets import AnyDataset, EvalDatasets, admit_all, by_name, columns_of, describe_rows
from trl_opsd.data.prompts import IMAGE_COLUMNS, PromptLimits
from trl_opsd.data.readers import Reader, Readers, Request
from trl_opsd.data.teacher_prompts import COLUMNS, PRIVILEGED, TEMPLATE, TEXT_TEMPLATE, Row
from trl_opsd.data.vocabulary import largest_id, shared_vocabulary
from trl_opsd.loop.footprint import footprint
from trl_opsd.loop.hooks import TrainerHooks
from trl_opsd.loop.overrides import overrides, own_verbs
from trl_opsd.models.padding import Reading
from trl_opsd.options.rules import refuse
from trl_opsd.options.table import Situation
from trl_opsd.parallel.precision import autocast
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.teacher.build import build_teachers
from trl_opsd.teacher.teachers import Teachers
from trl_opsd.types import Rollout, TeacherTargets


class Teaching(TrainerHooks):
    """A trainer with teachers; a subclass generates completions, and compares."""

    row_columns: tuple[str, ...] = COLUMNS
    hidden_columns = IMAGE_COLUMNS  # TRL would treat them as images even when they are empty
    args: OPSDConfig
    train_dataset: AnyDataset | None
    eval_dataset: EvalDatasets
    readers: Readers
    teachers: Teachers
    _described_rows: tuple[str, str] | None = None
    """The training dataset in the fingerprint, and the template of its contexts; computed when first needed."""
    first_made: list[int] | None = None
    """Token ids of the first prompt by `teacher_prompt_fn`."""

    @property
    def teacher_names(self) -> tuple[str, ...]:
        return tuple(self.teachers) if len(self.teachers) > 1 else ()

    @property
    def reading_to_learn(self) -> Reading:
        """The same outside of generation, where the padding options of the config apply."""
        return replace(self.reading, packed=self.args.padding_free, multiple_of=self.args.pad_to_multiple_of or 1)

    def set_up_teaching(self, given: Prepared) -> None:
        """Builds readers and teachers from the checked arguments, and checks every row with both."""
        self._identity = fingerprint.Identity(self.args, self.model, self.base_samples, self.optimizer)
        self._identity.set_functions(self._own_functions(given))
        self.dropped_prompts: Counter[str] = Counter()
        self.reads_solutions, self._given_rewards = given.reads_solutions, given.rewards
        self.readers = Readers(
            intake=given.intake,
            tokenize=self.tokenize,
            template=self.args.teacher_template_kwargs,
            tokenizer=self.processing_class,
            largest_id=largest_id(self.processing_class),
            settings=(self.chat_template_kwargs, [tool.__name__ for tool in self.tools or ()]),
            student_limits=student_limits(self.model, self.args),
        )
        self._prompts_are_seen = next(iter(given.rows.values())).can_be_read_ahead
        rows = self._admit_datasets(given.rows, self.readers.student)
        self._student_readers = self.readers  # without the limits of teachers, for when another is assigned
        self._set_up_teachers(given.models)
        self._admit_for_teachers(rows)

    def _set_up_teachers(self, models: Mapping[str, Any]) -> None:
        with autocast(self.accelerator):
            self.teachers = build_teachers(
                models,
                self.model,
                self.in_student,
                lambda: self.reading_to_learn,
                self.args,
                self.accelerator.device,
                handed_in=self.base_samples,
                progress=self.show_progress,
            )
        self.teacher = self.teachers.only
        self._identity.set_teachers(self.teachers)
        if self.teachers.average is not None:
            self.add_callback(self.teachers.average)
        # Known only once they are built: their vocabularies and contexts.
        self._vocabulary = shared_vocabulary(self.limits.vocabulary, self.teachers.vocabularies, self.processing_class)
        self.readers = self.readers.with_teachers(self._vocabulary, self.teachers.contexts)
        self._readers_of_any_rows = self.readers
        if self.args.seq_kd:
            self._generation.use_teachers(self.teachers)

    def replace_teacher(self, teacher_model: Any) -> None:
        self._launch.restore()
        check_other_teacher(teacher_model, self.model, self.args, self.processing_class, tuple(self.teachers))
        if self._dealer.is_dealt:
            raise ValueError(
                "`trainer.teacher_model` was assigned within an optimizer step: do it before or after one."
            )
        with self._rebuilding():
            self.readers = self._student_readers
            self._set_up_teachers({"teacher": teacher_model})
            datasets = {"train_dataset": self.train_dataset, **by_name(self.eval_dataset)}
            self._admit_for_teachers(surveyed(datasets, self.args))

    def replace_dataset(self, name: str, dataset: Any) -> None:
        self._launch.restore()
        if self.is_in_train and name == "train_dataset":
            raise ValueError("`trainer.train_dataset` was assigned within a training: assign it between two.")
        given = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        given[name] = self.as_read(dataset, name)
        refuse(EVALUATING, Situation(args=self.args, eval_dataset=given["eval_dataset"]))
        datasets = {"train_dataset": given["train_dataset"], **by_name(given["eval_dataset"])}
        intake = self.readers.intake
        several = intake.teachers if len(intake.teachers) > 1 else ()
        optional = PRIVILEGED if intake.prompts.prompt_fn is None else ()
        check_datasets(datasets, self.args, several, optional, self.reads_solutions)
        if self.args.lmbda < 1:
            check_completions(given["train_dataset"], self.tools, not self.args.seq_kd)
        check_rows_of_rewards(self._given_rewards, datasets, self.args, self.row_columns, self.reads_solutions)
        with self._rebuilding():
            self.readers, self._described_rows = self._readers_of_any_rows, None
            self.train_dataset, self.eval_dataset = given["train_dataset"], given["eval_dataset"]
            rows = looked_through(datasets, self.args, intake, self.row_columns)
            self._admit_for_teachers(self._admit_datasets(rows, self.readers.student))

    @contextmanager
    def _rebuilding(self) -> Iterator[None]:
        """Lets the body assign any attributes, and restores all of them if it raises."""
        before = dict(vars(self))
        self.is_built = False
        try:
            with preserved_rng(self.accelerator.device):
                yield
        except BaseException:
            self.__dict__.clear()  # all attributes: a half-built reader or teacher must not remain
            self.__dict__.update(before)
            raise
        self.is_built = True

    def _admit_for_teachers(self, rows: dict[str, Rows]) -> None:
        self._admit_datasets(rows, self.readers.teacher)
        self.readers = self.readers.bounded_by_teacher(columns_of(self.train_dataset) or ())

    def _admit_datasets(self, rows: dict[str, Rows], reader: Reader) -> dict[str, Rows]:
        dropped = self.dropped_prompts if self.args.overlong_prompts == "drop" else None
        rows = admit_all(rows, reader, dropped)
        datasets = {name: one.dataset for name, one in rows.items()}
        self.train_dataset = datasets.get("train_dataset")
        if isinstance(self.eval_dataset, dict):
            names = zip(self.eval_dataset, by_name(self.eval_dataset), strict=True)
            self.eval_dataset = {name: datasets.get(where) for name, where in names}
        else:
            self.eval_dataset = datasets.get("eval_dataset")
        if self.train_dataset is not None:
            check_train_size(self.train_dataset, self.args)
        return rows

    # ---- What the loop calls ---------------------------------------------------------------------------------------

    def check_effect(self) -> None:
        if self.train_dataset is not None:
            refuse(LEARNING, Situation(args=self.args, optimizers=(self.optimizer, self.lr_scheduler)))
            check_train_size(self.train_dataset, self.args)

    def read_rows(self, rows: Sequence[Row]) -> list[Request]:
        requests = self.readers.read_batch(rows, self._batch)
        if not self._prompts_are_seen:
            self.readers.student.token_ids([one.student for one in requests])  # names the row that a template refuses
            look_at(self.processing_class, self._batch, requests, self.args, self.tools)
            self._prompts_are_seen = True
        return requests

    @property
    def _batch(self) -> str:
        """The current generation batch, in messages about its rows."""
        step = self.state.global_step + 1 + self._ahead.steps_ahead
        name = f"the batch of step {step}" if self.model.training else "an evaluation batch"
        number = self.accelerator.num_processes
        return f"{name} in process {self.accelerator.process_index}" if number > 1 else name

    def rows_of(self, rollout: Rollout) -> list[Row]:
        if len(self.teachers) > 1 or not self.readers.are_alike(columns_of(self.train_dataset) or ()):
            raise ValueError(
                "`compute_loss` was given a batch that no teacher has read, without its dataset rows, but what the "
                "teacher reads depends on those: pass what `trainer._generate_and_score_completions(rows)` returns, or "
                "put them into the batch, aligned with it, as `batch['rows']`."
            )
        texts = self.processing_class.batch_decode(rollout.prompt_lists())
        return [{"prompt": text} for text in texts]

    def check_prompt_ids(self, prompt_ids: list[list[int]]) -> None:
        self.readers.check_batch(prompt_ids, self._batch)

    def teach(self, rollout: Rollout, rows: Sequence[Row]) -> TeacherTargets:
        """Has the teacher score a whole generation batch; `rows` are its dataset rows, aligned with it."""
        return self.teachers.targets(*self._as_taught(rollout, rows))

    def weigh(self, rollout: Rollout, rows: Sequence[Row], targets: TeacherTargets) -> Tensor:
        """The weight of each token of a generation batch in the loss; by default 1 or 0, with `position_discount`.

        Token selection and discounts belong here: the returned weights apply to the loss, its gradient, its denominator
        and the logs alike. Rewards are in `rollout.pull`.

        Args:
            rollout ([`~types.Rollout`]):
                The generation batch of this process; a token of weight 0 in it has to stay at 0.
            rows (`Sequence[Mapping[str, Any]]`):
                The dataset rows, aligned with it.
            targets ([`~types.TeacherTargets`]):
                The teacher's targets for it, row-aligned.

        Returns:
            `torch.Tensor`: [B, C], finite and at least 0.
        """
        discount = self.args.position_discount if self.model.training else 1.0
        places_C = torch.arange(rollout.weights.size(1), device=rollout.weights.device)
        return rollout.weights * discount**places_C

    @property
    def teaches_early(self) -> bool:
        return self.teachers.begin_early and not overrides(self, "teach")

    def expect(self, rollout: Rollout, rows: Sequence[Row]) -> None:
        self.teachers.expect(*self._as_taught(rollout, rows))

    def forget_expected(self) -> None:
        self.teachers.forget_expected()

    def _as_taught(self, rollout: Rollout, rows: Sequence[Row]) -> tuple[Rollout, list[str]]:
        """The rows as their teachers read them, and the name of the teacher of each."""
        requests = self.readers.read_batch(rows, self._batch)
        decode = self.processing_class.batch_decode
        prompts = self.readers.teacher_prompt_ids(requests, rollout.prompt_lists(), rollout.completion_lists(), decode)
        if self.first_made is None and prompts is not None and self.readers.intake.prompts.prompt_fn is not None:
            self.first_made = prompts[0]
        if prompts is not None:  # the same completions, token by token, after the teacher's prompts
            rollout = rollout.after(self.pad_prompts(prompts))
        return rollout, [request.teacher for request in requests]

    def footprint(self, phase: str) -> dict[str, int]:
        return footprint(self, phase, self.teachers.models, self.teachers.heads)

    @property
    def limits(self) -> PromptLimits:
        """Limits on the student's prompts and completions: vocabulary and context."""
        return self.readers.student_limits

    # ---- Checkpoints -----------------------------------------------------------------------------------------------

    def check_state(self, folder: str) -> None:
        fingerprint.check(folder, self._fingerprint(), self.args.resume_with_changes or ())

    def save_own_state(self, folder: str) -> None:
        self.teachers.check()
        if self.args.should_save:
            fingerprint.write(folder, self._fingerprint())
            self.teachers.save(folder)
            self.save_course(folder)

    def load_own_state(self, folder: str) -> None:
        self.teachers.load(folder)
        self.load_course(folder)

    def _fingerprint(self) -> fingerprint.Fingerprint:
        if self._described_rows is None:
            columns = None if self._calls_functions else self.row_columns  # a function may read any
            self._described_rows = describe_rows(self.train_dataset, columns), self._teacher_template()
        rows, teacher_template = self._described_rows
        template = self.processing_class.chat_template
        rewards = [one.name for one in self._given_rewards] if self.args.reward_weight else []
        tools, verbs = self.tools or (), own_verbs(type(self))
        return self._identity.now(self.divergence, rows, tools, template, rewards, teacher_template, verbs)

    def _teacher_template(self) -> str:
        """What joins prompts and privileged contexts: without the option it depends on their kind, by the first row."""
        prompts, columns = self.readers.intake.prompts, columns_of(self.train_dataset) or ["privileged_context"]
        row: Row = {}
        if prompts.template is None and prompts.prompt_fn is None and "privileged_context" in columns:
            row = next(iter(self.train_dataset or ()), row)
        is_text = "privileged_context" in row and isinstance(row["prompt"], str)
        return prompts.template or (TEXT_TEMPLATE if is_text else TEMPLATE)

    def _own_functions(self, given: Prepared) -> dict[str, Any]:
        """Functions of the user that are called, by name in messages."""
        prompt_fn, learned = given.intake.prompts.prompt_fn, given.rewards if self.args.reward_weight else ()
        return {
            **({} if prompt_fn is None else {"teacher_prompt_fn": prompt_fn}),
            **{f"reward_funcs: {one.name}": one.source for one in learned if not one.is_model},
            **{f"tools: {one.__name__}": one for one in self.tools or ()},
        }

    @property
    def _calls_functions(self) -> bool:
        """Whether the loss may depend on columns that only functions read."""
        learned = self._given_rewards if self.args.reward_weight else ()
        return self.readers.intake.prompts.prompt_fn is not None or bool(learned)
