"""Joins a rollout, a teacher and a divergence into one trainer; each of the three is somebody else's room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl_opsd._compat.trl import SeamTrainer, gathered_head
from trl_opsd.arguments import AnyDataset, check_datasets, check_processing_class, check_train_size, checked_args
from trl_opsd.backbone import completion_hidden, context_of, is_sharded, prove_head
from trl_opsd.config import OPSDConfig
from trl_opsd.losses import reduce, streamed_divergence
from trl_opsd.prompts import PromptLimits, admit, check_rows
from trl_opsd.rng import preserved_rng
from trl_opsd.rollout import HFRollout, RolloutBackend
from trl_opsd.rollout.base import cut_after_end
from trl_opsd.teacher import Teacher
from trl_opsd.teacher.build import build_teacher, check_teacher
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
        teacher_model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`] or [`Teacher`], *optional*):
            The teacher, of the student's vocabulary. A path or model id is loaded with
            `args.teacher_model_init_kwargs`; an object is frozen as it is. When `None`,
            `args.teacher_model_name_or_path` says where to load it from.
        args ([`OPSDConfig`], *optional*):
            The options. When `None`, the defaults, with an output folder named after the student.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with a `"prompt"`: text, or a list of messages. May be `None` for a trainer that only evaluates.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or a `dict` of them, *optional*):
            As `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The tokenizer. When `None`, it is loaded from where the student comes from.
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
        rollout ([`RolloutBackend`], *optional*):
            Who lets the student write. When `None`, vLLM does with `use_vllm=True`, and `transformers` without.

    Attributes:
        rollout ([`RolloutBackend`]): what `complete` asks.
        teacher ([`Teacher`]): what `teach` asks.
        divergence ([`~losses.Divergence`]): what `compare` minimises. Assign another to change the objective; TRL's
            attribute `beta` is read once, at construction.
        limits ([`~prompts.PromptLimits`]): what the contexts of both models allow.
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

    args: OPSDConfig
    train_dataset: AnyDataset | None
    eval_dataset: AnyDataset | dict[str, AnyDataset] | None

    def __init__(
        self,
        model: Any,
        teacher_model: str | PreTrainedModel | Teacher | None = None,
        args: OPSDConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        *,
        rollout: RolloutBackend | None = None,
    ) -> None:
        args = checked_args(args, model)
        teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
        check_teacher(teacher_model, model)
        rollout = _picked_rollout(rollout, args)
        check_processing_class(processing_class)
        check_datasets(train_dataset, eval_dataset, args)

        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
        )
        check_processing_class(self.processing_class)
        self.divergence = args.build_divergence()
        self.show_progress = self.accelerator.is_main_process and not args.disable_tqdm
        self._student_is_proved = False
        # TRL has seeded generation by now; whatever is built here must not move it.
        with preserved_rng(self.accelerator.device):
            if not is_sharded(self.model):  # else it is whole for the first time when it first writes
                self._prove(self.model)
            self._admit_datasets(context_of(self.model))
            self.teacher = build_teacher(
                teacher_model, self.model, args, self.accelerator.device, progress=self.show_progress
            )
            self.teacher_model = getattr(self.teacher, "model", None)  # under TRL's name
            self._heed_teachers_context()
        self.rollout = rollout
        rollout.bind(self)

    # ---- The three verbs ----------------------------------------------------------------------------------------

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        if not self._student_is_proved:
            with self.student_for_generation() as student:
                self._prove(student)
        completions = self.rollout.complete(prompt_ids, self.state.global_step)
        if len(completions) != len(prompt_ids):
            raise ValueError(
                f"{type(self.rollout).__name__} returned {len(completions)} completions for {len(prompt_ids)} prompts: "
                "`complete` must return one for each, in order."
            )
        completions = [cut_after_end(ids, self.eos_token_ids) for ids in completions]
        for prompt, completion in zip(prompt_ids, completions, strict=True):
            self.limits.check_completion(prompt, completion, type(self.rollout).__name__)
        return completions

    def teach(self, rollout: Rollout) -> TeacherTargets:
        return self.teacher.targets(rollout)

    def compare(
        self, student: Any, rollout: Rollout, targets: TeacherTargets, num_items: Tensor | float | None
    ) -> LossParts:
        head, teacher_head = OutputHead.of(student), self.teacher.head
        hidden_BCH = completion_hidden(student, rollout)
        counts_BC = rollout.loss_mask != 0
        with gathered_head(head), gathered_head(teacher_head):
            per_token = streamed_divergence(
                LazyLogits(_select(hidden_BCH, counts_BC, head), head, self.temperature),
                LazyLogits(_select(targets.hidden, counts_BC, teacher_head), teacher_head, self.temperature),
                self.divergence,
                chunk_tokens=self.args.loss_chunk_tokens,
            )
        return reduce(per_token, rollout.loss_mask, num_items)

    # ---- What is refused before it costs anything ------------------------------------------------------------------

    def check_rows(self, rows: list[dict[str, Any]]) -> None:
        check_rows(rows, "this batch")

    def check_prompt_ids(self, prompt_ids: list[list[int]]) -> None:
        for number, ids in enumerate(prompt_ids):
            self.limits.check(ids, f"row {number} of this batch")

    # ---- Construction -------------------------------------------------------------------------------------------

    def _prove(self, student: Any) -> None:
        prove_head(student, "student", gathered_head)
        self._student_is_proved = True

    def _heed_teachers_context(self) -> None:
        mine = self.limits.context
        theirs = None if self.teacher_model is None else context_of(self.teacher_model)
        if theirs is not None and (mine is None or theirs < mine):
            self._admit_datasets(theirs)

    def _admit_datasets(self, context: int | None) -> None:
        if self.args.use_vllm and self.args.vllm_max_model_length is not None:
            context = min(self.args.vllm_max_model_length, context or self.args.vllm_max_model_length)
        self.limits = PromptLimits(
            vocabulary=self.model.config.get_text_config().vocab_size,
            context=context,
            completion=self.args.max_completion_length,
        )
        if self.limits.context is not None and self.limits.completion >= self.limits.context:
            raise ValueError(
                f"`max_completion_length={self.limits.completion}` leaves no room for a prompt in a "
                f"context of {self.limits.context} tokens: lower it."
            )
        self.dropped_prompts: Counter[str] = Counter()
        if self.train_dataset is not None:
            self.train_dataset = self._admit(self.train_dataset, "train_dataset")
            check_train_size(self.train_dataset, self.args)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: self._admit(dataset, f"eval_dataset[{name!r}]") for name, dataset in self.eval_dataset.items()
            }
        elif self.eval_dataset is not None:
            self.eval_dataset = self._admit(self.eval_dataset, "eval_dataset")

    def _admit(self, dataset: AnyDataset, name: str) -> AnyDataset:
        admitted = admit(
            dataset,
            name,
            tokenize=self.tokenize,
            limits=self.limits,
            has_template=bool(self.processing_class.chat_template),
            dropped=self.dropped_prompts if self.args.overlong_prompts == "drop" else None,
        )
        if dropped := self.dropped_prompts[name]:
            logger.warning(
                f"{dropped} prompts of {name} are longer than the context of {self.limits.context} tokens "
                f"less max_completion_length={self.limits.completion} and were dropped; {len(admitted)} are left."
            )
        return admitted


def _picked_rollout(rollout: RolloutBackend | None, args: OPSDConfig) -> RolloutBackend:
    if rollout is None:
        if args.use_vllm:
            from trl_opsd.rollout.vllm import VLLMRollout  # imports vLLM, which takes seconds and may be absent

            return VLLMRollout(args)
        return HFRollout()
    if not isinstance(rollout, RolloutBackend):
        raise TypeError(f"`rollout` is a {type(rollout).__name__}: expected a `trl_opsd.RolloutBackend`.")
    return rollout


def _select(hidden_BCH: Tensor, counts_BC: Tensor, head: OutputHead) -> Tensor:
    """The hidden states of the tokens in the loss, [N, H], on the head's device."""
    device = head.weight.device
    return hidden_BCH.to(device)[counts_BC.to(device)]
