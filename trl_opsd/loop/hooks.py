"""Hooks into TRL's loop: where it calls one of its private methods, one of the four verbs is called with our types."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import ProcessorMixin

from trl_opsd._compat.deepspeed import recompute_buffers
from trl_opsd._compat.peft import called_before_peft, is_peft, without_peft
from trl_opsd._compat.sharding import is_split_model, keep_float32
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.versions import set_known
from trl_opsd.data.intake import Request
from trl_opsd.loop.ahead import Ahead
from trl_opsd.loop.attributes import Attributes
from trl_opsd.loop.by_teacher import ByTeacher
from trl_opsd.loop.collapse import Courses
from trl_opsd.loop.dealing import of_package
from trl_opsd.loop.evaluation import NO_TOKEN, Evaluations
from trl_opsd.loop.generations import Generations
from trl_opsd.loop.hosting import Hosting
from trl_opsd.loop.logged import Logged
from trl_opsd.loop.model_card import SELF_DISTILLATION, ModelCard
from trl_opsd.loop.off_policy import OffPolicy
from trl_opsd.loop.rewarded import Rewarded
from trl_opsd.loop.saving import SafeCheckpoints
from trl_opsd.loop.steps import GuardedSteps
from trl_opsd.loop.upstream_fixes import EarlierTraining, Launch, UpstreamFixes
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.model_checks import whole_checkpoint, whole_on
from trl_opsd.models.samples import Samples, sampled
from trl_opsd.models.trainable import check_can_learn
from trl_opsd.monitor.memory import explained
from trl_opsd.options.changes import ReadOnce
from trl_opsd.options.rules import TRAINING, refuse
from trl_opsd.parallel.groups import set_group_timeout
from trl_opsd.parallel.precision import autocast, dtype_of_frozen_base
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.checks import check_parts

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "_tokenize_prompts": ("self", "prompts"),
    "_generate": ("self", "prompts"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "has_tool_images"),
    "_tool_call_loop": (
        "self",
        "prompts",
        "prompt_ids",
        "completion_ids",
        "completions",
        "images",
        "multimodal_fields",
    ),
    "_generate_and_score_completions": ("self", "inputs"),
    "_set_signature_columns_if_needed": ("self",),
    "_compute_loss": ("self", "unwrapped_student", "inputs", "num_items_in_batch"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "create_model_card": ("self", "model_name", "dataset_name", "tags"),
}
"""TRL's methods that are overridden here, with their parameters; a test checks them against the installed TRL."""


class TrainerHooks(
    Logged,
    Attributes,
    Ahead,
    Evaluations,
    ByTeacher,
    Generations,
    OffPolicy,
    Rewarded,
    GuardedSteps,
    Courses,
    SafeCheckpoints,
    UpstreamFixes,
    Hosting,
):
    """TRL's trainer with four hooks in its loop: `complete`, `teach`, `weigh` and `compare`.

    A subclass implements all of them but `weigh`, and four checks; it gets our own types only. TRL builds neither a
    teacher nor an engine: the subclass provides both.
    """

    row_columns: tuple[str, ...] = ("prompt",)
    """Columns of a dataset that `remove_unused_columns` keeps."""
    hidden_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that are hidden from TRL, which would use them."""
    model_card: ModelCard
    handed_in: Samples | None
    """Samples of the base weights, taken before PEFT adds an adapter; `None` without one."""
    _step: int
    _signature_columns: list[str] | None

    def __init__(self, *, args: DistillationConfig, processor: ProcessorMixin | None = None, **kwargs: Any) -> None:
        self.processor = processor
        if args.n_gpu > 1:
            logger.warning(
                f"{args.n_gpu} accelerators are visible, but this one process trains on {args.device} alone: start "
                "processes for all of them with `accelerate launch`, `torchrun` or `trl-opsd train`."
            )
            set_known(args, _n_gpu=1)  # transformers would copy the student to all, which TRL refuses
        # TRL would build an engine of its own, and its tool loop would use it.
        use_vllm, args.use_vllm = args.use_vllm, False
        loading = args.model_init_kwargs
        if isinstance(kwargs.get("model"), str):
            args.model_init_kwargs = {"use_safetensors": True, **whole_on(args.device), **(loading or {})}
            quantised = kwargs.get("quantization_config") or args.model_init_kwargs.get("quantization_config")
            if not quantised and (dtype := dtype_of_frozen_base(args, kwargs.get("peft_config"))):
                args.model_init_kwargs.setdefault("dtype", dtype)
        self.handed_in: Samples | None = None
        try:
            with called_before_peft(self._take_samples), whole_checkpoint("model"):
                super().__init__(teacher_model=None, args=args, **kwargs)
        finally:
            args.use_vllm, args.model_init_kwargs = use_vllm, loading
        if self.handed_in is None and is_peft(self.model):
            self._take_samples(self.model)
        self._check_fsdp()
        # By default FSDP2 with `bf16=True` rounds the loss, and sharded gradients are summed in bfloat16.
        keep_float32(self.accelerator, self.args.accelerator_config.gradient_accumulation_kwargs or {})
        if is_split_model(self.model):
            with preserved_rng(self.accelerator.device):
                # ZeRO-3 has rounded rotary frequencies to the dtype of the weights.
                recompute_buffers(without_peft(self.model))
        self._launch, self._earlier = Launch(), EarlierTraining(self)
        self._first_turn = False
        self._surplus: list[list[int]] = []
        self._unwritten_rows: list[int] = []
        self._loss_rows: Tensor | None = None
        self._unread: list[tuple[Mapping[str, Any], Tensor, Tensor | None]] = []
        self._read_once = ReadOnce.by_trainer(self.args)
        self._read_at_start = ReadOnce.by_training(self.args)

    def _take_samples(self, student: Any) -> None:
        self.handed_in = sampled(student)

    def _check_fsdp(self) -> None:
        if self._dist.fsdp_version == 1:
            raise ValueError(
                "The launch has `fsdp_version: 1`, which flattens the weights, so that the loss cannot read the output "
                "head: set `fsdp_version: 2` in the accelerate file."
            )
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not self._dist.is_fsdp:
            logger.warning(
                "The launch asks for FSDP, which accelerate supports on accelerators only: nothing is sharded, this is "
                "plain data parallelism."
            )

    # ---- Hooks in TRL's loop ------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self.row_columns)

    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        self.check_prompt_ids(prompt_ids)
        return prompt_ids, images, multimodal_fields

    def _generate(self, prompts: list) -> tuple:
        self._first_turn, self._unwritten_rows = True, []
        self._hides_engine = True
        try:
            with self.session():
                written = super()._generate(prompts)
        finally:
            self._hides_engine = False
        by_student = [not row.is_off_policy for row in self._requests]
        self.note_completions(list(compress(written[1], by_student)))
        return written

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict, has_tool_images: bool = False
    ) -> list[list[int]]:
        completions = self._turn(prompt_ids)
        assert completions is not None, "this process has prompts"
        if self._first_turn:
            # TRL reads the last token of each completion. An empty one travels as a pad token and is masked below.
            self._first_turn = False
            self._unwritten_rows = [row for row, ids in enumerate(completions) if not ids]
            completions = [ids or [self._tokenizer.pad_token_id] for ids in completions]
        return completions

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, images: Any, multimodal_fields: Any
    ) -> tuple:
        """As TRL's, and joins later turns of other processes after those of this one. Collective."""
        looped = super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, images, multimodal_fields)
        _, self._conversations, *_ = looped
        while self._turn([]) is not None:
            pass
        return looped

    def _turn(self, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """The completions of a turn; `None` if it is a later one in which no process has prompts. Collective."""
        hidden, self._hides_engine = self._hides_engine, False
        if self._first_turn:
            self._surplus = prompt_ids[:1]
        with self.phase("complete"), preserved_mode(self.model):
            completions = (self.mixed if self._first_turn else self.together)(prompt_ids, self._checked)
            for row, prompt, ids in zip(self._requests, prompt_ids, completions or (), strict=False):
                self.note_logprobs(row, prompt, ids)
        self._hides_engine = hidden
        return completions

    def _checked(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        if prompt_ids or (of_package(self.complete) and of_package(self.rollout.complete)):
            return self.checked_completions(prompt_ids, self._from_rollout(prompt_ids))
        # A user's rollout is called as often as in other processes, but never without a prompt: few would accept that.
        self.checked_completions(self._surplus, self._from_rollout(self._surplus))
        return []

    def begin_batch(self, inputs: list[dict[str, Any]]) -> list[Request]:
        """Reads and checks the rows of a generation batch, and counts it. Collective."""
        self._read_once.check(self.args)
        set_group_timeout(self.args.ddp_timeout_delta)  # in each batch: a library may have made a group since
        self.check_same_rows(self._mode)
        rows = self.read_rows(inputs)
        self.number_rows(rows)
        self.choose_sources(rows)
        self._accounts[self._mode].count_batch()
        return rows

    def trl_batch(self, rows: Sequence[Request]) -> dict[str, Any]:
        """TRL's batch for checked rows, generated and logged."""
        text = [{name: value for name, value in row.items() if name not in self.hidden_columns} for row in rows]
        self._requests = rows
        batch: dict[str, Any] = super()._generate_and_score_completions(text)
        batch["completion_mask"][self._unwritten_rows] = 0
        return batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        requests = self.begin_batch(inputs)
        written = self.trl_batch(requests)
        self.note_rewards(written, requests)  # before rows are exchanged, while those of a prompt are adjacent
        batch, rows = self.exchanged(written, requests)
        batch.update(self.pulls_of(rows))
        batch.update(self.score(batch, rows))
        batch["num_items_in_batch"] = self.accelerator.gather(batch["loss_weights"].sum()).sum()
        return batch

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple:
        # TRL calls this method in place of the `forward` that accelerate wrapped in autocast.
        rollout = Rollout.unpack(inputs).cut()
        targets = TeacherTargets.unpack(inputs).cut(rollout.completion_ids.size(1))
        with autocast(self.accelerator):
            parts = self.compare(unwrapped_student, rollout, targets, num_items_in_batch)
        check_parts(parts, rollout, f"{type(self).__name__}.compare", self.model.training)
        self._loss_rows, self._loss_scored = self.with_teachers(parts.rows, targets.teacher), parts.scored
        if self.model.training:
            self._probe.attach(unwrapped_student)
        weight, _, student_entropy, *_ = parts.rows.sum(0)
        return parts.loss, student_entropy, weight

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As TRL's, without two numbers of its log that would each wait for the device."""
        inputs = self.scored(inputs)
        if self.model.training and (total := inputs.get("num_items_in_batch")) is not None:
            # Weights may add up to less than 1, which is TRL's lower bound. Processes' gradients are averaged.
            num_items_in_batch = total.where(total > 0, 1.0) / self.accelerator.num_processes
        student = self.accelerator.unwrap_model(model)
        losses, rows_of = [], []
        for part, is_last in self.learned_apart(inputs):
            loss, *_ = self._forward_redirection(model, student, self._compute_loss, student, part, num_items_in_batch)
            losses.append(loss if is_last else self.backward_early(loss))
            assert self._loss_rows is not None, "_compute_loss has set them"
            rows_of.append(self._loss_rows)
            self._loss_rows = None
        loss, rows = torch.stack(losses).sum(), torch.cat(rows_of)
        # No collective may run inside the wrapper's forward, so the sums of this process are reduced here. The host
        # waits for them, and for other processes, once per step: before the backward pass that the step follows.
        if self.model.training:
            kept = {name: value for name, value in inputs.items() if name != "teacher_rows"}
            self._unread.append((kept, rows, self._loss_scored))
            if not self.accelerator.gradient_state.sync_gradients:
                return (loss, None) if return_outputs else loss
            learned, self._unread = self._unread, []
            sums = self.accelerator.reduce(torch.stack([one.sum(0) for _, one, _ in learned]), "sum")
        else:
            distinct = self.gather_distinct_rows(rows)
            self.note_evaluated(distinct)
            learned, sums = [(inputs, rows, None)], distinct.sum(0, keepdim=True)
            self._written = inputs["completion_ids"].masked_fill(inputs["completion_mask"] == 0, NO_TOKEN)
        finite = [self._noted(*each, numbers) for each, numbers in zip(learned, sums.tolist(), strict=True)]
        if not all(finite):
            loss = self.with_nan_gradient(loss)
        return (loss, None) if return_outputs else loss

    def _noted(self, inputs: Mapping[str, Any], rows: Tensor, scored: Tensor | None, sums: list[float]) -> bool:
        """Counts a micro-batch by its `sums` over all processes; returns whether its loss is finite in all."""
        named = self.named(sums)
        # The sums of an option that is off are 0, which would be logged as if measured.
        measured = {
            "clipped": self.args.clips_entries,
            "pulled": inputs.get("pull") is not None,
            "importance": inputs.get("logprobs") is not None,
        }
        named = {name: one for name, one in named.items() if measured.get(name, True)}
        if is_finite := self.is_finite_loss(named, rows):
            self.check_sums(named)
            self._accounts[self._mode].add(named)
            if self.model.training:
                self.note_loss(named)
                self.note_learned(inputs.get("rows"), rows)
                self.note_sources(inputs.get("rows"), rows)
                self._loss_scored = scored
                self.note_selection(inputs, rows)
        self.record("entropy", named["student_entropy"] / named["weight"] if named["weight"] else 0.0)
        return is_finite

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._read_at_start.check(self.args)
        with self._accounts["train"].clock("compare"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.args.gradient_accumulation_steps == 0:
            # Consumed: the targets in it must not stay in memory during the next rollout or an evaluation.
            set_known(self, _buffered_inputs=None)
            self.record_learned()
            self.record_sources()
            self.record_selection()
        return loss

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As TRL's, but discards leftovers of an interrupted run, and rejects options changed too late."""
        if self.train_dataset is None:
            raise ValueError(
                "`train` without a `train_dataset`: this trainer was built to evaluate; pass the rows to train on."
            )
        check_can_learn(self.model)
        if self.args.resume_from_checkpoint and resume_from_checkpoint is None:
            logger.warning(
                f"`args.resume_from_checkpoint={self.args.resume_from_checkpoint!r}` has no effect: pass it to `train`."
            )
        self._read_once.check(self.args)
        if self.args.deepspeed_plugin is None:  # its config is complete by now, and would be read anew
            self.args.check_again()
        self._launch.restore()
        self.args.check_as_given()
        refuse(TRAINING, self.args)
        self.check_effect()
        self._read_at_start = ReadOnce.by_training(self.args)
        set_known(self, _buffered_inputs=None, _step=0, _current_train_step_time=0.0)
        self._metrics["train"].clear()
        self._accounts["train"].clear()
        self._learned_rows = self._sources = self._kept_sums = None
        self._unread = []
        with (
            self.sharing_rows(),
            explained("step", partial(self.footprint, "step")),  # outside the phases, memory is the optimizer's
            self._earlier.followed_by(self),
        ):
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    # ---- The model card -----------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        kind = self.args.teacher_model_kind
        return "on-policy distillation" if kind is None else "on-policy self-distillation (OPSD)"

    @property
    def _paper(self) -> dict[str, str]:
        paper: dict[str, str] = super()._paper if self.args.teacher_model_kind is None else SELF_DISTILLATION
        return paper

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Writes `README.md` to `output_dir`: TRL's card, with base model, teachers, objective, settings and figures.

        Args:
            model_name (`str`, *optional*):
                Name of the model. When `None`, that of the repository on the Hub, or of `output_dir`.
            dataset_name (`str`, *optional*):
                Name of the dataset on the Hub.
            tags (`str` or `list[str]`, *optional*):
                More tags.
        """
        folder = os.path.basename(os.path.realpath(self.args.output_dir))
        super().create_model_card(model_name or (self.hub_model_id or folder).split("/")[-1], dataset_name, tags)
        if self.is_world_process_zero():
            self.model_card.complete(dataset_name)
