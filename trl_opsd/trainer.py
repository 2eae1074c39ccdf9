"""Joins a rollout, a teacher and a divergence into one trainer; each of the three has a package of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.integrations import is_fsdp_enabled

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import gathered_head, in_zero3_model, whole_head
from trl_opsd.bytes import ByteTokenizers
from trl_opsd.config import OPSDConfig
from trl_opsd.data.datasets import AnyDataset, EvalDatasets
from trl_opsd.data.readers import PromptLimits, Readers
from trl_opsd.loop.hooks import TrainerHooks
from trl_opsd.loop.overrides import check_methods
from trl_opsd.loop.teaching import Teaching
from trl_opsd.loop.turns import Turns
from trl_opsd.losses import Divergence, SampledReverseKL, divergence_of
from trl_opsd.losses.objective import Objective
from trl_opsd.losses.validation import prove_divergence
from trl_opsd.methods import METRICS
from trl_opsd.methods.base import Method
from trl_opsd.methods.order import Methods
from trl_opsd.methods.rewards import Rewards
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import context_of
from trl_opsd.models.checks import check_can_learn, check_optimizer, check_student
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.options.names import StrictNames
from trl_opsd.options.normalize import drawn_otherwise
from trl_opsd.parallel.failure import first_failure_first
from trl_opsd.parallel.precision import warn_of_lost_updates
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.prepare import prepare
from trl_opsd.report.describe import Banner, published, text
from trl_opsd.rollout import RolloutBackend, chosen_rollout
from trl_opsd.teacher import FrozenTeacher, Resident, Teacher
from trl_opsd.teacher.checks import TeacherLike
from trl_opsd.teacher.comparison import compared
from trl_opsd.teacher.teachers import Teachers
from trl_opsd.types import LossParts, Rollout, TeacherTargets

if TYPE_CHECKING:
    from trl_opsd.report.recording import Recording
    from trl_opsd.rollout.teacher_rollout import TeacherRollout

logger = get_logger(__name__)


class OPSDTrainer(StrictNames, TrainerHooks):
    """Trainer for on-policy distillation: the student generates completions, a frozen teacher scores each token, and
    the student moves toward the teacher's next-token distribution.

    A [`~trl.DistillationTrainer`]: its arguments keep their names and meanings, and on the same completions in the same
    order it gives the same numbers. It differs in how it gets there: the teacher reads a generation batch once and
    keeps hidden states instead of logits, and the loss forms each model's logits once instead of twice or three times.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student: a path, a model id, or a causal language model.
        teacher_model (`str`, [`~transformers.PreTrainedModel`], [`PeftModel`], [`Teacher`] or `dict`, *optional*):
            The teacher, with the student's tokenizer. A path or model id, perhaps of an adapter, is loaded with
            `args.teacher_model_init_kwargs`; an object is frozen in place. A dict holds several by name, and the column
            `"teacher"` names the teacher of each row. When `None`, it is loaded from
            `args.teacher_model_name_or_path`, or `args.teacher_model_kind` makes the student its own teacher.
        args ([`OPSDConfig`], *optional*):
            The options. When `None`, the defaults, with an output folder named after the student.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with a `"prompt"`: text, or a list of messages; and, for the teacher only, a `"teacher_prompt"` or a
            `"privileged_context"`. May be `None` for a trainer that only evaluates.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or a `dict` of them, *optional*):
            As `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            The tokenizer; or a processor, whose tokenizer is used for text prompts and which is saved with the
            student. When `None`, it is loaded from the student's path.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Added to the default callbacks.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler; AdamW with a linear schedule when `None`.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            For loading the student from a path.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Wraps the student, for instance a `LoraConfig`.
        teacher_models (`dict`, *optional*):
            In place of `teacher_model`, as in TRL: teachers by id. The column `"teacher_id"` has that of each row.
        tools (list of `Callable`, *optional*):
            Functions the student may call; their output is excluded from the loss.
        divergence ([`~losses.Divergence`] or `str`, *optional*):
            The objective; overrides that of `args`.
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            Makes the environments that the student acts in, as in TRL's GRPO; see `docs/agents.md`. With a dict each
            row names its own in a column `environment`.
        rollout ([`RolloutBackend`], *optional*):
            The rollout backend. When `None`, vLLM with `use_vllm=True`, otherwise `transformers`.
        teacher_processing_class ([`~transformers.PreTrainedTokenizerBase`] or a `dict` of them by name, *optional*):
            The teacher's tokenizer, which the trainer compares with the student's. When `None`, it is loaded from the
            teacher's path; for a teacher passed as an object, from the path in its config.
        teacher_prompt_fn (`Callable`, *optional*):
            Takes a row and the text of the student's completion, and returns what the teacher reads before that
            completion: text or messages. Overrides the columns.
        methods (list of [`Method`], *optional*):
            Extensions of the training, with their settings: `Rewards([function])`, others of the package
            (`docs/reference.md`) or of your own (`docs/extending.md`).

    Attributes:
        rollout ([`RolloutBackend`]): the backend that `complete` calls.
        teachers (`dict[str, Teacher]`): the teachers that `teach` calls, by name.
        teacher ([`Teacher`]): the only teacher; `None` if there are several.
        teacher_model ([`~transformers.PreTrainedModel`]): its model.
        divergence ([`~losses.Divergence`]): what `compare` minimises. Assign another, or its name, to change the
            objective, or a number to TRL's attribute `beta`. `temperature` is that of the loss.
        limits ([`~data.readers.PromptLimits`]): limits on prompts and completions, from the contexts of both models.
        placeholders (`list[int]`): token ids that stand for an image or the like, which the student never generates.
        reading ([`~models.padding.BatchPolicy`]): which rows the student can read and generate in one batch.
        dropped_prompts (`Counter`): number of rows dropped from each dataset because they were too long.

    Raises:
        ValueError: The models, the data or the options are incompatible; the message says what to change.
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

    _config_class = OPSDConfig
    known_metrics = MappingProxyType({**METRICS, **ByteTokenizers.metrics})

    @first_failure_first()  # as in training: a process that loses another one does not end first
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
        environment_factory: Any = None,
        *,
        teacher_models: Mapping[Any, TeacherLike] | None = None,
        rollout: RolloutBackend | None = None,
        divergence: Divergence | str | None = None,
        teacher_processing_class: PreTrainedTokenizerBase | Mapping[str, PreTrainedTokenizerBase] | None = None,
        teacher_prompt_fn: Callable[[dict[str, Any], str], Any] | None = None,
        methods: Sequence[Method] = (),
    ) -> None:
        given = prepare(
            model=model,
            teacher_model=teacher_model,
            teacher_models=teacher_models,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            quantization_config=quantization_config,
            tools=tools,
            environment_factory=environment_factory,
            rollout=rollout,
            divergence=divergence,
            teacher_processing_class=teacher_processing_class,
            teacher_prompt_fn=teacher_prompt_fn,
            methods=methods,
            row_columns=self.row_columns,
            choose_rollout=chosen_rollout,
            choose_cross=lambda args: None if args.cross_tokenizer is None else ByteTokenizers,
        )
        check_methods(type(self))
        self.row_columns = given.row_columns
        super().__init__(
            model=model,
            args=given.args,
            train_dataset=given.train_dataset,
            eval_dataset=given.eval_dataset,
            processing_class=given.tokenizer,
            processors=given.processors,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=given.tools,
        )
        self.cross = given.cross
        self.methods = Methods(self, given.methods)
        for one in self.methods:
            if isinstance(one, TrainerCallback):
                self.add_callback(one)
        self.turns = None
        if given.tools or given.environments is not None:
            self.turns = Turns(self, self._generation, self._get_tool_suffix_ids, tools or (), given.environments)
        check_student(self.model, self.args)
        if train_dataset is not None:
            check_can_learn(self.model)
            check_optimizer(self.model, *optimizers)
            warn_of_lost_updates(self.model, self.accelerator, self.args.learning_rate, self.optimizer)
        self._use_special_tokens()
        self.divergence = self.args.build_divergence() if divergence is None else divergence
        self.show_progress = self.accelerator.is_main_process and not self.args.disable_tqdm
        self.dropped_prompts: Counter[str] = Counter()
        self.reads_solutions, self.reads_images = given.reads_solutions, given.reads_images
        is_split = in_zero3_model(self.model) or is_fsdp_enabled()  # then some processes have no weights yet
        # One process may see an image before the others, which DeepSpeed's buckets of gradients do not allow either.
        if self.reads_images is None and (is_split or self.is_deepspeed_enabled):
            self.reads_images = True
        self._reward_names = [] if (rewards := self.methods.get(Rewards)) is None else rewards.names
        # TRL has seeded generation by now; building the rest must not advance the random state.
        with preserved_rng(self.accelerator.device):
            if not is_split:
                self._generation.prove_student()
            self.methods.build()
            self.teaching = Teaching(self, given, self._generation.use_teachers)
            self.teaching.build()
        self._prove_divergence(self.divergence)
        self._generation.bind(given.rollout)
        self.is_built = True
        self.remember_launch()
        self._recording: Recording | None = None
        if self.args.report:
            from trl_opsd.report.recording import Recording

            self._recording = Recording(self.args.output_dir, partial(published, self))
            self.add_callback(self._recording)
        self.add_callback(Banner(self))

    def _prove_divergence(self, divergence: Divergence) -> None:
        with preserved_rng(self.accelerator.device):
            doubts = prove_divergence(
                divergence, self.teaching.vocabulary or self.limits.vocabulary, self.accelerator.device
            )
        for doubt in doubts:
            logger.warning(doubt)

    # ---- The verbs ----------------------------------------------------------------------------------------------

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Generates one completion for each prompt; token ids in, token ids out."""
        if self._ahead is not None:
            self._ahead.wait()  # rows generated ahead occupy the rollout
        return self._generation.complete(prompt_ids)

    def teach(self, rollout: Rollout, rows: Sequence[BatchRow]) -> TeacherTargets:
        """Has the teacher score a whole generation batch; `rows` are its dataset rows, aligned with it."""
        return self.teaching.targets(rollout, rows)

    def weigh(self, rollout: Rollout, rows: Sequence[BatchRow], targets: TeacherTargets) -> Tensor:
        """The weight of each token of a generation batch in the loss: 1 or 0, and what methods make of it.

        Token selection and discounts belong here: the returned weights apply to the loss, its gradient, its denominator
        and the logs alike. Rewards are in `rollout.nll_weight`.

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
        return self.methods.token_weights(rollout, rows, targets)

    def compare(
        self, student: CausalLM, rollout: Rollout, targets: TeacherTargets, num_items: Tensor | float | None
    ) -> LossParts:
        """Compares the student with the targets. Runs inside the student wrapper's forward: no collectives in it.

        Args:
            student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
                The student without its distributed wrapper.
            rollout ([`~types.Rollout`]):
                One micro-batch.
            targets ([`~types.TeacherTargets`]):
                Row-aligned with it.
            num_items (`torch.Tensor` or `float`, *optional*):
                Denominator of the loss: the weights of the whole optimizer step, divided by the number of processes;
                `None` means the tokens of this micro-batch.
        """
        teachers, policy, objective = self.teaching.teachers, self.batching_to_learn, self.current_objective
        first, heads = next(iter(teachers.values())), (teachers.heads, teachers.origin_head)
        comparison = first.compare(student, rollout, targets, objective, policy, *heads)
        # The teachers' heads are read once the student's is gathered, as both may share one.
        with (
            whole_head(student) as head,
            gathered_head(*(teacher_heads := teachers.heads), (origin := teachers.origin_head)),
        ):
            parts = compared(comparison, head, teacher_heads, num_items, objective, origin)
            if self._recording is not None and comparison.rollout.begins_at is None:
                from trl_opsd.report.samples import samples_of

                sampled = partial(samples_of, self, comparison, head, teacher_heads, objective, origin)
                self._recording.note(self.state, self.model.training, comparison.rollout, sampled)
        return parts

    @property
    def current_objective(self) -> Objective:
        """How student and teachers are compared now."""
        objective = Objective(
            divergence=self.divergence,
            temperatures=self.temperatures,
            chunk_tokens=self.args.loss_chunk_tokens,
            vocabulary=self.teaching.vocabulary,
            kl_clip=self.args.kl_clip,
        )
        return self.methods.objective(objective)

    # ---- The rollout --------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> RolloutBackend:
        """The rollout that generates. Another can be assigned; the former is not closed."""
        return self._generation.rollout

    @rollout.setter
    def rollout(self, rollout: RolloutBackend | None) -> None:
        self.restore_launch()
        with preserved_rng(self.accelerator.device):
            self._generation.bind(chosen_rollout(None, self.args) if rollout is None else rollout)

    @property
    def reads_logprobs(self) -> bool:
        """Whether the rollout returns those of the current generation, to weigh tokens or to measure the sampler.

        Engines report them at temperature 1 and before anything else changes the distribution, so only where tokens are
        drawn from that of the student in the loss. An evaluation weighs none.
        """
        args, training = self.args, self.model.training
        drawn_at = args.temperature if training or args.eval_temperature is None else args.eval_temperature
        return (
            (self.rollout.returns_logprobs or (training and self.methods.any("writes")))
            and (training or not self.learns_from_draws)
            and drawn_at == self.temperatures[0] == 1
            and not self.tools
            and not drawn_otherwise(args)
        )

    @contextmanager
    def generating_with(self, teacher: Any) -> Iterator[None]:
        """Within it, a teacher by its name, another model, or what has a method `complete` of prompts as token ids,
        generates in place of the student: to measure it.

        ```python
        with trainer.generating_with("math"):
            accuracy = trainer.predict(rows).metrics["test_rewards/right/mean"]
        ```

        Raises:
            ValueError: There is no such teacher, it is behind a server or sharded, or has a tokenizer of its own.
        """
        if self.cross is not None and not hasattr(teacher, "complete"):
            raise ValueError(
                "`generating_with` with `cross_tokenizer`: prompts are ids of the student's tokenizer: to measure the "
                "teacher, build a trainer with it as the student."
            )
        if isinstance(teacher, str) and teacher not in self.teachers:
            raise ValueError(f"`generating_with({teacher!r})`: expected a model, or one of {sorted(self.teachers)}.")
        with ExitStack() as stack:
            if isinstance(teacher, str):
                teacher = self.teacher_rollout(teacher)
            elif not hasattr(teacher, "complete"):
                limits = next(iter(self.readers.teacher_limits.values()))
                context = min((one for one in (context_of(teacher), limits.context) if one is not None), default=None)
                for one in teacher.parameters():
                    stack.callback(one.requires_grad_, one.requires_grad)
                frozen = FrozenTeacher(Resident(teacher, self.accelerator.device))
                teacher = self._generation.teacher_rollout(frozen, replace(limits, context=context))
            stack.enter_context(self._generation.substituted(teacher))
            yield

    def teacher_rollout(self, name: str) -> TeacherRollout:
        """A teacher, whose `complete` continues prompts of token ids; a `ValueError` if it cannot generate."""
        return self._generation.teacher_rollout(self.teachers[name], self.readers.teacher_limits[name])

    # ---- Teachers and datasets --------------------------------------------------------------------------------------

    @property
    def teachers(self) -> Teachers:
        """The teachers, by name."""
        return self.teaching.teachers

    @property
    def teacher(self) -> Teacher | None:
        """The only teacher; `None` if there are several."""
        return self.teaching.teachers.only

    @property
    def readers(self) -> Readers:
        """How prompts become token ids, for the student and for the teachers."""
        return self.teaching.readers

    @property
    def limits(self) -> PromptLimits:
        """Limits on the student's prompts and completions: vocabulary and context."""
        limits = self.teaching.readers.student_limits
        return replace(limits, completion=self.methods.limit(limits.completion)) if self.is_built else limits

    @property
    def batching_to_learn(self) -> BatchPolicy:
        """Which rows share a pass outside of generation, where the padding options of the config apply."""
        return replace(self.batching, packed=self.args.padding_free, multiple_of=self.args.pad_to_multiple_of or 1)

    # ---- What is said of it -------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if not self.is_built:
            return super().__repr__()
        self.restore_launch()
        return text(self)

    @property
    def divergence(self) -> Divergence:
        """What `compare` minimises. May be set, also by name; `None` is the one that TRL's `beta` selects."""
        return self._divergence

    @divergence.setter
    def divergence(self, divergence: Divergence | str | None) -> None:
        resolved = divergence_of(divergence, self.args.beta, self.args.top_k_teacher)
        self.args.check_divergence(resolved)
        if self.is_built:
            self._prove_divergence(resolved)
        self._divergence, self.learns_from_draws = resolved, isinstance(resolved, SampledReverseKL)
