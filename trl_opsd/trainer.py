"""Joins a rollout, a teacher and a divergence into one trainer; each of the three is somebody else's room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.integrations import is_fsdp_enabled

from trl_opsd import arguments, fingerprint
from trl_opsd._compat.sharding import in_zero3_model
from trl_opsd.config import OPSDConfig, check_divergence
from trl_opsd.data.admission import Reader
from trl_opsd.data.datasets import AnyDataset, EvalDatasets, admit_all, columns_of, describe_rows, named, with_eval
from trl_opsd.data.prompts import IMAGE_COLUMNS, PromptLimits
from trl_opsd.data.readers import Readers
from trl_opsd.data.teacher_prompts import COLUMNS, teacher_of
from trl_opsd.data.vocabulary import shared_vocabulary
from trl_opsd.loop.footprint import footprint
from trl_opsd.loop.seams import SeamTrainer
from trl_opsd.losses import Divergence
from trl_opsd.losses.registry import named as named_divergence
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.models.head import gathered_head, model_shape, prove_head, shape_of, whole_head
from trl_opsd.models.padding import PADDED
from trl_opsd.models.reading_proof import prove_padding
from trl_opsd.models.special_tokens import placeholders, settle_special_tokens
from trl_opsd.models.training_proof import heed_unreached, prove_training
from trl_opsd.rollout import RolloutBackend
from trl_opsd.rollout.base import cut_after_end, token_ids
from trl_opsd.rollout.pick import picked
from trl_opsd.run import versions
from trl_opsd.run.memory import explained
from trl_opsd.run.opinion import check_opinion
from trl_opsd.run.precision import autocast, check_trained_dtypes
from trl_opsd.run.rng import preserved_rng
from trl_opsd.teacher import Teacher
from trl_opsd.teacher.build import (
    TeacherLike,
    build_teachers,
)
from trl_opsd.teacher.comparison import compared
from trl_opsd.teacher.origin import Origin
from trl_opsd.teacher.routed import targets_of
from trl_opsd.types import LossParts, OutputHead, Rollout, TeacherTargets

logger = get_logger(__name__)


class OPSDTrainer(SeamTrainer):
    """Trainer for on-policy distillation: the student writes completions, a frozen teacher says what it would have
    expected at each token, and the student moves toward the teacher's next-token distribution.

    A [`~trl.DistillationTrainer`]: its arguments keep their names and meanings, and on the same completions in the same
    order it gives the same numbers. It differs in how it gets there: the teacher reads a generation batch once and
    keeps hidden states instead of logits, and the loss forms each model's logits once instead of twice or three times.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student: a path, a model id, or a causal language model.
        teacher_model (`str`, [`~transformers.PreTrainedModel`], [`PeftModel`], [`Teacher`] or `dict`, *optional*):
            The teacher, with the student's tokenizer. A path or model id is loaded with
            `args.teacher_model_init_kwargs`; an object is frozen as it is. A dict holds several by name, and the column
            `"teacher"` says whose a row is. When `None`, `args.teacher_model_name_or_path` says where to load it from,
            or `args.teacher_model_kind` makes the student its own teacher.
        args ([`OPSDConfig`], *optional*):
            The options. When `None`, the defaults, with an output folder named after the student.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with a `"prompt"`: text, or a list of messages; for the teacher's eyes only a `"teacher_prompt"` or a
            `"privileged_context"`. May be `None` for a trainer that only evaluates.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or a `dict` of them, *optional*):
            As `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            The tokenizer, or a processor whose tokenizer is used for prompts of text and which is saved beside the
            student. When `None`, it is loaded from where the student comes from.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Added to the default callbacks.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler; AdamW with a linear schedule when `None`.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            For loading the student from a path.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Wraps the student, for instance a `LoraConfig`.
        tools (list of `Callable`, *optional*):
            Functions the student may call; what they return stays out of the loss.
        divergence ([`~losses.Divergence`] or `str`, *optional*):
            The objective; goes before that of `args`.
        rollout ([`RolloutBackend`], *optional*):
            Who lets the student write. When `None`, vLLM does with `use_vllm=True`, and `transformers` without.
        teacher_processing_class ([`~transformers.PreTrainedTokenizerBase`] or a `dict` of them by name, *optional*):
            The tokenizer of a teacher that is given as an object, to be compared with the student's. When `None`, the
            one beside the teacher's path is compared, and that of an object is taken to be the student's.
        teacher_prompt_fn (`Callable`, *optional*):
            Takes a row and the text of the student's completion, and returns what the teacher reads before that
            completion: text or messages. Goes before the columns.

    Attributes:
        rollout ([`RolloutBackend`]): what `complete` asks.
        teachers (`dict[str, Teacher]`): whom `teach` asks, by name.
        teacher ([`Teacher`]): the only one; `None` where there are several.
        divergence ([`~losses.Divergence`]): what `compare` minimises. Assign another to change the objective; TRL's
            attribute `beta` is read once, at construction.
        limits ([`~data.prompts.PromptLimits`]): what the contexts of both models allow.
        placeholders (`list[int]`): tokens that stand for an image or the like, which the student never writes.
        reading ([`~models.padding.Reading`]): which rows the student reads and writes in one batch.
        dropped_prompts (`Counter`): rows left out of each dataset because they were too long.

    Raises:
        ValueError: The models, the data or the options do not go together; the message says what to change.
        TypeError: An argument is of a type that cannot be used here.

    Example:

    ```python
    >>> from trl_opsd import OPSDConfig, OPSDTrainer

    >>> trainer = OPSDTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     teacher_model="Qwen/Qwen2.5-1.5B-Instruct",
    ...     args=OPSDConfig(output_dir="out", divergence="reverse_kl"),
    ...     train_dataset=dataset,
    ... )
    >>> trainer.train()
    ```
    """

    row_columns = ("prompt", *COLUMNS)
    hidden_columns = IMAGE_COLUMNS  # empty, but TRL takes them for images all the same
    args: OPSDConfig
    train_dataset: AnyDataset | None
    eval_dataset: EvalDatasets

    def __init__(
        self,
        model: Any,
        teacher_model: TeacherLike | Mapping[str, TeacherLike] | None = None,
        args: OPSDConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: EvalDatasets = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        *,
        rollout: RolloutBackend | None = None,
        divergence: Divergence | str | None = None,
        teacher_processing_class: PreTrainedTokenizerBase | Mapping[str, PreTrainedTokenizerBase] | None = None,
        teacher_prompt_fn: Callable[[dict[str, Any], str], Any] | None = None,
    ) -> None:
        args = arguments.checked_args(args, model)
        versions.warn_of_newer()
        check_divergence(divergence)
        rollout = picked(rollout, args)
        given = arguments.prepared(
            model,
            teacher_model,
            args,
            {"train_dataset": train_dataset, **named(eval_dataset)},
            processing_class,
            teacher_processing_class,
            teacher_prompt_fn,
            self.row_columns,
        )

        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=given.tokenizer,
            processor=given.processor,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
        )
        arguments.check_in_memory(self.model)
        arguments.check_trainable(self.model)
        if not args.deepspeed_plugin:  # which keeps weights of its own to step with
            check_trained_dtypes(self.model)
        rows_of_head = model_shape(self.model)[0]
        settle_special_tokens(self.processing_class, rows_of_head)
        self.use_special_tokens(rows_of_head)
        self.placeholders = placeholders(self.model.config, rows_of_head)
        self._identity = fingerprint.Identity(args, self.model, self.handed_in, self.optimizer)
        self.divergence = args.build_divergence() if divergence is None else named_divergence(divergence, args.beta)
        self.show_progress = self.accelerator.is_main_process and not args.disable_tqdm
        self._student_is_proved, self.reading = False, PADDED
        self.dropped_prompts: Counter[str] = Counter()
        # TRL has seeded generation by now; whatever is built here must not move it.
        with preserved_rng(self.accelerator.device):
            if not (in_zero3_model(self.model) or is_fsdp_enabled()):  # else not each process has its weights yet
                self._prove()
            self.readers = Readers(
                teachers=tuple(given.models),
                prompts=given.prompts,
                tokenize=self.tokenize,
                template=args.teacher_template_kwargs,
                has_template=bool(self.processing_class.chat_template),
                student_limits=arguments.student_limits(self.model, args),
            )
            self._admit_datasets(self.readers.student)
            with autocast(self.accelerator):
                self._build_teachers(given.models)
            self._heed_teachers()
        self.rollout = rollout
        with explained("start", partial(self.footprint, "start")):
            rollout.bind(self)

    # ---- The three verbs ----------------------------------------------------------------------------------------

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        if not self._student_is_proved:
            self._prove()
        backend = type(self.rollout).__name__
        # Prompts of its own: what it does to them must not reach what is trained on.
        returned = self.rollout.complete([list(ids) for ids in prompt_ids], self.state.global_step)
        completions = token_ids(returned, len(prompt_ids), backend)
        completions = [cut_after_end(ids, self.eos_token_ids) for ids in completions]
        for prompt, completion in zip(prompt_ids, completions, strict=True):
            self.limits.check_completion(prompt, completion, backend)
        return completions

    def teach(self, rollout: Rollout, rows: list[dict[str, Any]]) -> TeacherTargets:
        names = [
            teacher_of(row, f"Row {number} of this batch", tuple(self.teachers)) for number, row in enumerate(rows)
        ]
        return targets_of(self.teachers, self._as_the_teacher_reads(rollout, rows), names)

    def _as_the_teacher_reads(self, rollout: Rollout, rows: list[dict[str, Any]]) -> Rollout:
        """The same completions, token by token, after the teacher's prompts."""
        prompts = self.readers.retold(
            rows, rollout.prompt_lists(), rollout.completion_lists(), self.processing_class.batch_decode
        )
        if prompts is None:
            return rollout
        padded = self.pad_prompts(prompts)
        return replace(rollout, prompt_ids=padded["input_ids"], prompt_mask=padded["attention_mask"])

    def compare(
        self, student: Any, rollout: Rollout, targets: TeacherTargets, num_items: Tensor | float | None
    ) -> LossParts:
        hidden_BCH = completion_hidden(student, rollout, self.reading)
        with whole_head(student) as head, self._whole_teacher_heads() as teacher_heads:
            return compared(
                hidden_BCH,
                head,
                targets,
                teacher_heads,
                rollout.weights,
                num_items,
                divergence=self.divergence,
                temperature=self.temperature,
                chunk_tokens=self.args.loss_chunk_tokens,
                vocabulary=self._shared_vocabulary,
            )

    @contextmanager
    def _whole_teacher_heads(self) -> Iterator[list[OutputHead]]:
        """Entered once the student's head is whole, as it may be a teacher's too."""
        heads = [teacher.head for teacher in self.teachers.values()]
        with gathered_head(*heads):
            yield heads

    # ---- What is refused before it costs anything ------------------------------------------------------------------

    def check_rows(self, rows: list[dict[str, Any]]) -> None:
        self.readers.student.prompts(rows, [f"row {number} of this batch" for number in range(len(rows))])

    def check_prompt_ids(self, prompt_ids: list[list[int]]) -> None:
        for number, ids in enumerate(prompt_ids):
            self.limits.check(ids, f"The prompt in row {number} of this batch")

    def check_sums(self, sums: dict[str, float]) -> None:
        check_opinion(sums, self.limits.vocabulary, self.temperature)

    def footprint(self, phase: str) -> dict[str, int]:
        teachers: dict[str, Teacher] = getattr(self, "teachers", {})
        models = {name: getattr(teacher, "model", None) for name, teacher in teachers.items()}
        return footprint(self, phase, models, [teacher.head for teacher in teachers.values()])

    @property
    def limits(self) -> PromptLimits:
        """What prompts and completions of the student keep to."""
        return self.readers.student_limits

    # ---- Construction -------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        with autocast(self.accelerator):
            prove_head(self.model, "student", self.in_student)
            with preserved_rng(self.accelerator.device):
                unreached = prove_training(self.model, self.in_student)
            heed_unreached(unreached, self.args, self.accelerator)
            # After it: a layer that keeps states must not keep those that hold a graph.
            self.reading = prove_padding(self.model, "student", self.in_student)
        self._student_is_proved = True

    def _build_teachers(self, models: dict[str, Any]) -> None:
        self._origin = None
        if self.args.teacher_model_kind == "base" and self.handed_in is not None:
            self._origin = Origin(self.model, self.handed_in)
        self.teachers, self._average = build_teachers(
            models,
            self.model,
            self.in_student,
            lambda: self.reading,
            self.args,
            self.accelerator.device,
            self.show_progress,
        )
        self.teacher = next(iter(self.teachers.values())) if len(self.teachers) == 1 else None
        self.teacher_model = getattr(self.teacher, "model", None)  # under TRL's name
        self._identity.taught_by(self.teachers)
        if self._average is not None:
            self.add_callback(self._average)

    # ---- Checkpoints --------------------------------------------------------------------------------------------

    def check_state(self, folder: str) -> None:
        fingerprint.check(folder, self._fingerprint(), self.args.resume_with_changes or ())

    def save_own_state(self, folder: str) -> None:
        if self._origin is not None:
            self._origin.check()
        if not self.args.should_save:
            return
        fingerprint.write(folder, self._fingerprint())
        if self._average is not None:
            self._average.save(folder)

    def load_own_state(self, folder: str) -> None:
        if self._average is not None:
            self._average.load(folder)

    def _fingerprint(self) -> fingerprint.Fingerprint:
        return self._identity.now(self.divergence, self._rows, self.tools or (), self.processing_class.chat_template)

    @cached_property
    def _rows(self) -> str:
        reads_any_column = self.readers.prompts.prompt_fn is not None
        return describe_rows(self.train_dataset, None if reads_any_column else self.row_columns)

    def _heed_teachers(self) -> None:
        """What only the teachers, loaded by now, can tell: which tokens they know, and how much they can read."""
        rows = {name: shape_of(teacher.head)[0] for name, teacher in self.teachers.items()}
        self._shared_vocabulary = shared_vocabulary(self.limits.vocabulary, rows, self.processing_class)
        limits = replace(self.limits, vocabulary=self._shared_vocabulary or self.limits.vocabulary)
        theirs = {name: replace(limits, context=teacher.context) for name, teacher in self.teachers.items()}
        for name, one in theirs.items():
            one.check_room(name)
        self.readers = replace(self.readers, student_limits=limits, teacher_limits=theirs)
        self._admit_datasets(self.readers.teacher, self.readers.may_differ)
        columns = None if self.train_dataset is None else columns_of(self.train_dataset)
        if len(theirs) == 1 and self.readers.are_alike(columns or ()):
            # With tools a conversation grows until the context is full, and the teacher has to read all of it.
            contexts = [one.context for one in (limits, *theirs.values()) if one.context is not None]
            self.readers = replace(self.readers, student_limits=replace(limits, context=min(contexts, default=None)))

    def _admit_datasets(
        self, reader: Reader, if_needed: Callable[[list[str] | None], bool] = lambda columns: True
    ) -> None:
        datasets = {"train_dataset": self.train_dataset, **named(self.eval_dataset)}
        policy, completion = self.args.overlong_prompts, self.limits.completion
        admitted = admit_all(datasets, reader, self.dropped_prompts, policy, completion, if_needed)
        self.train_dataset, self.eval_dataset = admitted["train_dataset"], with_eval(self.eval_dataset, admitted)
        if self.train_dataset is not None:
            arguments.check_train_size(self.train_dataset, self.args)
