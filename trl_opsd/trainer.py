"""Joins a rollout, a teacher and a divergence into one trainer; each of the three is somebody else's room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.integrations import is_fsdp_enabled

from trl_opsd import fingerprint
from trl_opsd._compat.peft import describe_adapters, is_peft
from trl_opsd._compat.sharding import in_zero3_model
from trl_opsd.arguments import (
    AnyDataset,
    check_datasets,
    check_in_memory,
    check_models,
    check_processing_class,
    check_train_size,
    check_trainable,
    checked_args,
    columns_of,
    loaded_processing_class,
    named,
    text_tokenizer,
)
from trl_opsd.config import OPSDConfig, check_divergence
from trl_opsd.data.admission import Reader, admit, look_ahead
from trl_opsd.data.prompts import IMAGE_COLUMNS, PromptLimits
from trl_opsd.data.readers import Readers, student_prompt
from trl_opsd.data.shares import check_alike
from trl_opsd.data.teacher_prompts import COLUMNS, TeacherPrompts, teacher_of
from trl_opsd.data.vocabulary import shared_vocabulary
from trl_opsd.loop.footprint import footprint
from trl_opsd.loop.seams import SeamTrainer
from trl_opsd.losses import Divergence, reduce, streamed_divergence
from trl_opsd.losses.registry import named as named_divergence
from trl_opsd.models.backbone import completion_hidden, context_of
from trl_opsd.models.head import gathered_head, prove_head, shape_of, whole_head
from trl_opsd.models.padding import PADDED
from trl_opsd.models.reading_proof import prove_padding
from trl_opsd.models.special_tokens import placeholders, rows_said, settle_special_tokens
from trl_opsd.models.training_proof import heed_unreached, prove_training
from trl_opsd.rollout import HFRollout, RolloutBackend
from trl_opsd.rollout.base import cut_after_end, token_ids
from trl_opsd.run import versions
from trl_opsd.run.memory import explained
from trl_opsd.run.opinion import check_opinion
from trl_opsd.run.precision import autocast, check_trained_dtypes
from trl_opsd.run.rng import preserved_rng
from trl_opsd.teacher import Teacher
from trl_opsd.teacher.build import (
    TeacherLike,
    build_own_teacher,
    build_teacher,
    check_teachers,
    check_tokenizers,
)
from trl_opsd.teacher.origin import Origin
from trl_opsd.teacher.routed import shares, targets_of
from trl_opsd.types import LazyLogits, LossParts, OutputHead, Rollout, TeacherTargets

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
        limits ([`~prompts.PromptLimits`]): what the contexts of both models allow.
        placeholders (`list[int]`): tokens that stand for an image or the like, which the student never writes.
        reading ([`~padding.Reading`]): which rows the student reads and writes in one batch.
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
    eval_dataset: AnyDataset | dict[str, AnyDataset] | None

    def __init__(
        self,
        model: Any,
        teacher_model: TeacherLike | Mapping[str, TeacherLike] | None = None,
        args: OPSDConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
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
        args = checked_args(args, model)
        versions.warn_of_newer()
        check_divergence(divergence)
        teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
        check_teachers(teacher_model, model, args)
        models = dict(teacher_model) if isinstance(teacher_model, Mapping) else {"teacher": teacher_model}
        rollout = _picked_rollout(rollout, args)
        if processing_class is not None:
            check_processing_class(processing_class)
        teacher_template = args.teacher_template_kwargs
        if teacher_prompt_fn is not None and args.remove_unused_columns:
            raise ValueError(
                "`remove_unused_columns=True` would hide columns from `teacher_prompt_fn`: leave it at False."
            )
        check_datasets(
            train_dataset,
            eval_dataset,
            args,
            teachers=tuple(models) if len(models) > 1 else (),
            needs_privilege=_teaches_itself(model, args) and teacher_prompt_fn is None and not teacher_template,
        )
        check_models(model, models, args)
        teacher_prompts = TeacherPrompts(template=args.teacher_prompt_template, prompt_fn=teacher_prompt_fn)
        datasets = {"train_dataset": train_dataset, **named(eval_dataset)}
        for name, dataset in datasets.items():
            if dataset is not None:
                look_ahead(dataset, name, partial(student_prompt, teacher_prompts, tuple(models)))
        if args.world_size > 1:
            rows = {name: fingerprint.describe_rows(dataset, self.row_columns) for name, dataset in datasets.items()}
            check_alike(gather_object([rows]))
        if processing_class is None:
            processing_class = loaded_processing_class(model, args)
            check_processing_class(processing_class)
        settle_special_tokens(text_tokenizer(processing_class), rows_said(model, args.model_init_kwargs or {}))
        check_tokenizers(text_tokenizer(processing_class), models, teacher_processing_class, args)

        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=text_tokenizer(processing_class),
            processor=processing_class if isinstance(processing_class, ProcessorMixin) else None,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
        )
        check_in_memory(self.model)
        check_trainable(self.model)
        if not args.deepspeed_plugin:  # which keeps weights of its own to step with
            check_trained_dtypes(self.model)
        rows_of_head = shape_of(OutputHead.of(self.model))[0]
        settle_special_tokens(self.processing_class, rows_of_head)
        self.use_special_tokens(rows_of_head)
        self.placeholders = placeholders(self.model.config, rows_of_head)
        self._student = fingerprint.describe_student(self.model, self.handed_in)
        self._optimizer = fingerprint.describe_optimizer(self.optimizer, args)
        self.divergence = args.build_divergence() if divergence is None else named_divergence(divergence, args.beta)
        self.show_progress = self.accelerator.is_main_process and not args.disable_tqdm
        self._student_is_proved, self.reading = False, PADDED
        self.dropped_prompts: Counter[str] = Counter()
        # TRL has seeded generation by now; whatever is built here must not move it.
        with preserved_rng(self.accelerator.device):
            if not (in_zero3_model(self.model) or is_fsdp_enabled()):  # else not each process has its weights yet
                self._prove()
            self.readers = Readers(
                teachers=tuple(models),
                prompts=teacher_prompts,
                tokenize=self.tokenize,
                template=teacher_template,
                has_template=bool(self.processing_class.chat_template),
                student_limits=self._student_limits(),
            )
            self._admit_datasets(self.readers.student)
            with autocast(self.accelerator):
                self._build_teachers(models)
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
        prompts, completions = rollout.prompt_lists(), rollout.completion_lists()
        alike = all(map(self.readers.are_alike, rows))
        if not alike:
            texts = None
            if self.readers.prompts.prompt_fn is not None:
                texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
            prompts = self.readers.teacher_prompt_ids(rows, texts)
        self.readers.check_fits_teacher(rows, prompts, list(map(len, completions)))
        if alike:
            return rollout
        padded = self.pad_prompts(prompts)
        return replace(rollout, prompt_ids=padded["input_ids"], prompt_mask=padded["attention_mask"])

    def compare(
        self, student: Any, rollout: Rollout, targets: TeacherTargets, num_items: Tensor | float | None
    ) -> LossParts:
        hidden_BCH = completion_hidden(student, rollout, self.reading)
        if num_items is None:
            num_items = rollout.weights.sum() if rollout.counts.any() else 1.0
        parts: LossParts | None = None
        with whole_head(student) as head, self._whole_teacher_heads() as teacher_heads:
            for teacher_head, teacher_BCH, theirs_BC in shares(teacher_heads, targets, rollout.counts):
                weights_BC = rollout.weights * theirs_BC
                per_token = streamed_divergence(
                    LazyLogits(_select(hidden_BCH, theirs_BC, head), head, self.temperature),
                    LazyLogits(_select(teacher_BCH, theirs_BC, teacher_head), teacher_head, self.temperature),
                    self.divergence,
                    chunk_tokens=self.args.loss_chunk_tokens,
                    vocabulary=self._shared_vocabulary,
                    weights=_unless_ones(weights_BC[theirs_BC].to(head.weight.device)),
                )
                part = reduce(per_token, weights_BC, num_items)
                parts = part if parts is None else parts + part
        assert parts is not None, "there is a teacher"
        return parts

    @contextmanager
    def _whole_teacher_heads(self) -> Iterator[list[OutputHead]]:
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
        device, average = self.accelerator.device, None
        self.teachers: dict[str, Teacher] = {}
        self._origin = None
        if self.args.teacher_model_kind == "base" and self.handed_in is not None:
            self._origin = Origin(self.model, self.handed_in)
        for name, model in models.items():
            if model is None:
                self.teachers[name], average = build_own_teacher(
                    self.model, self.in_student, lambda: self.reading, self.args, device, self.show_progress
                )
            else:
                self.teachers[name] = build_teacher(model, self.args, device, self.show_progress)
        self.teacher = next(iter(self.teachers.values())) if len(self.teachers) == 1 else None
        self.teacher_model = getattr(self.teacher, "model", None)  # under TRL's name
        self._teacher_weights = fingerprint.digest_teachers(self.teachers, self.args.teacher_model_kind)
        self._average = average
        if average is not None:
            self.add_callback(average)

    # ---- Checkpoints --------------------------------------------------------------------------------------------

    def check_state(self, folder: str) -> None:
        fingerprint.check(folder, self._fingerprint(), self.args.resume_with_changes or ())

    def save_state(self, folder: str) -> None:
        if self._origin is not None:
            self._origin.check()
        if not self.args.should_save:
            return
        fingerprint.write(folder, self._fingerprint())
        if self._average is not None:
            self._average.save(folder)

    def load_state(self, folder: str) -> None:
        if self._average is not None:
            self._average.load(folder)

    def _fingerprint(self) -> fingerprint.Fingerprint:
        template = self.processing_class.chat_template
        return fingerprint.fingerprint(
            self.args,
            divergence=repr(self.divergence) if is_dataclass(self.divergence) else type(self.divergence).__qualname__,
            train_dataset=self._rows,
            teachers=fingerprint.describe_teachers(self.teachers, self.args.teacher_model_kind),
            teacher_weights=self._teacher_weights,
            student=self._student,
            adapter=describe_adapters(self.model),
            optimizer=self._optimizer,
            tools=[tool.__name__ for tool in self.tools or ()],
            chat_template=None if template is None else f"sha256 {sha256(str(template).encode()).hexdigest()[:16]}",
        )

    @cached_property
    def _rows(self) -> str:
        reads_any_column = self.readers.prompts.prompt_fn is not None
        return fingerprint.describe_rows(self.train_dataset, None if reads_any_column else self.row_columns)

    def _student_limits(self) -> PromptLimits:
        context = context_of(self.model)
        if self.args.use_vllm and self.args.vllm_max_model_length is not None:
            context = min(self.args.vllm_max_model_length, context or self.args.vllm_max_model_length)
        limits = PromptLimits(
            vocabulary=shape_of(OutputHead.of(self.model))[0],
            context=context,
            completion=self.args.max_completion_length,
        )
        limits.check_room("the student")
        return limits

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
        def admitted(dataset: AnyDataset, name: str) -> AnyDataset:
            return self._admit(dataset, name, reader) if if_needed(columns_of(dataset)) else dataset

        if self.train_dataset is not None:
            self.train_dataset = admitted(self.train_dataset, "train_dataset")
            check_train_size(self.train_dataset, self.args)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: admitted(dataset, f"eval_dataset[{name!r}]") for name, dataset in self.eval_dataset.items()
            }
        elif self.eval_dataset is not None:
            self.eval_dataset = admitted(self.eval_dataset, "eval_dataset")

    def _admit(self, dataset: AnyDataset, name: str, reader: Reader) -> AnyDataset:
        before = self.dropped_prompts[name]
        dropped = self.dropped_prompts if self.args.overlong_prompts == "drop" else None
        admitted = admit(dataset, name, reader, dropped)
        if count := self.dropped_prompts[name] - before:
            logger.warning(
                f"{count} prompts of {name} leave no room for max_completion_length={self.limits.completion} tokens "
                f"in the context and were dropped; {len(admitted)} are left."
            )
        return admitted


def _teaches_itself(student: Any, args: OPSDConfig) -> bool:
    """Whether teacher and student start as one; without the adapter it came with, a student is somebody else."""
    kind = args.teacher_model_kind
    return kind is not None and not (kind == "base" and not isinstance(student, str) and is_peft(student))


def _picked_rollout(rollout: RolloutBackend | None, args: OPSDConfig) -> RolloutBackend:
    if rollout is None:
        if args.use_vllm:  # both import vLLM, which takes seconds and may be absent
            if args.vllm_mode == "server":
                from trl_opsd.rollout.vllm_server import VLLMServerRollout

                return VLLMServerRollout(args)
            from trl_opsd.rollout.vllm import VLLMRollout

            return VLLMRollout(args)
        return HFRollout()
    if not isinstance(rollout, RolloutBackend):
        raise TypeError(f"`rollout` is a {type(rollout).__name__}: expected a `trl_opsd.RolloutBackend`.")
    return rollout


def _unless_ones(weights_N: Tensor) -> Tensor | None:
    """Weights, or `None` where all are 1: the loss is then spared a product with each logit's gradient."""
    return None if bool((weights_N == 1).all()) else weights_N


def _select(hidden_BCH: Tensor, counts_BC: Tensor, head: OutputHead) -> Tensor:
    """The hidden states of the tokens in the loss, [N, H], on the head's device."""
    device = head.weight.device
    return hidden_BCH.to(device)[counts_BC.to(device)]
