"""Hooks into TRL's loop: where it calls one of its private methods, one of the four verbs is called with our types."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import ProcessorMixin, Trainer

from trl_opsd._compat.deepspeed import recompute_buffers
from trl_opsd._compat.peft import called_before_peft, is_peft, without_peft
from trl_opsd._compat.sharding import is_split_model, keep_float32, launched, sharing_rows_ourselves
from trl_opsd._compat.trl import DistillationConfig, DistillationTrainer, repeat_iterable_dataset
from trl_opsd._compat.versions import set_known
from trl_opsd.checkpoints.atomic_save import UNFINISHED
from trl_opsd.checkpoints.sigterm import StopOnSigterm
from trl_opsd.config import OPSDConfig
from trl_opsd.data.completions import solutions_as_context, with_prompts
from trl_opsd.data.prompts import COLUMNS, IMAGE_COLUMNS
from trl_opsd.data.readers import Request
from trl_opsd.loop.ahead import Ahead
from trl_opsd.loop.attributes import DATASETS, FIXED, shown, why_no_effect
from trl_opsd.loop.batch_rewards import BatchRewards
from trl_opsd.loop.checkpoints import Checkpoints
from trl_opsd.loop.collapse import CollapseGuard
from trl_opsd.loop.dealing import Dealer
from trl_opsd.loop.evaluation import Evaluation, Predictions
from trl_opsd.loop.generation import Generation
from trl_opsd.loop.model_card import SELF_DISTILLATION, ModelCard
from trl_opsd.loop.nonfinite import NonfiniteGuard
from trl_opsd.loop.overlap import Overlap
from trl_opsd.loop.overrides import prepares_batches
from trl_opsd.loop.scoring import Scorer
from trl_opsd.loop.shared_rows import parts_to_learn
from trl_opsd.loop.step_stats import MicroBatch, StepStats
from trl_opsd.loop.student import call_in_student, generating_student, padded_prompts, padded_rows, parallelism_in_words
from trl_opsd.loop.upstream_fixes import EarlierTraining, Launch, UpstreamFixes
from trl_opsd.losses import Divergence, ForwardKL, GeneralizedJSD, ReverseKL
from trl_opsd.losses.registry import Settings, divergence_of
from trl_opsd.models.checks import check_can_learn, whole_checkpoint, whole_on
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.models.shared_rows import RowGroup, check_shareable
from trl_opsd.models.weights import Samples, sampled
from trl_opsd.monitor.memory import explained
from trl_opsd.monitor.metrics import recorded
from trl_opsd.monitor.progress import replace_default
from trl_opsd.options.rules import TRAINING, refuse
from trl_opsd.options.table import BUILD, START, ReadOnce, above, from_to
from trl_opsd.parallel.precision import autocast, dtype_of_frozen_base
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.parallel.timeouts import Watchdog, set_group_timeout
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.loss import check_parts, columns

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
    "get_train_dataloader": ("self",),
    "_get_train_sampler": ("self", "dataset"),
    "_get_dataloader": ("self", "dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"),
    "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
    "_prepare_inputs": ("self", "generation_batch"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "create_model_card": ("self", "model_name", "dataset_name", "tags"),
    "evaluate": ("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
    "predict": ("self", "test_dataset", "ignore_keys", "metric_key_prefix"),
    "get_eval_dataloader": ("self", "eval_dataset"),
    "get_test_dataloader": ("self", "test_dataset"),
    "evaluation_loop": (
        "self",
        "dataloader",
        "description",
        "prediction_loss_only",
        "ignore_keys",
        "metric_key_prefix",
    ),
    "prediction_step": ("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
    "create_accelerator_and_postprocess": ("self",),
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "create_scheduler": ("self", "num_training_steps", "optimizer"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_get_output_dir": ("self", "trial"),
    "_save": ("self", "output_dir", "state_dict"),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_load_best_model": ("self",),
    "log": ("self", "logs", "start_time"),
}
"""TRL's methods that are overridden here, with their parameters; a test checks them against the installed TRL."""


class TrainerHooks(UpstreamFixes):
    """TRL's trainer with every method overridden that calls one of the verbs: `complete`, `teach`, `weigh`, `compare`.

    A subclass implements them and the checks around them; it gets our own types only. TRL builds neither a teacher nor
    an engine: the subclass provides both.
    """

    row_columns: tuple[str, ...] = COLUMNS
    """Columns of a dataset that `remove_unused_columns` keeps."""
    hidden_columns: ClassVar[tuple[str, ...]] = IMAGE_COLUMNS
    """Columns that are hidden from TRL, which would treat them as images even when they are empty."""
    args: OPSDConfig
    divergence: Divergence
    teacher: Any
    reads_solutions: bool = False
    """Whether a column `solution` of a dataset is privileged context."""
    is_built: bool = False
    """Whether construction has ended; until then TRL assigns attributes, and afterwards a user."""
    _hides_engine: bool = False
    """Whether TRL's tool loop is running, which would ask an engine of TRL's for its context."""
    _model_card: ModelCard
    _rewards: BatchRewards
    base_samples: Samples | None
    """Samples of the base weights, taken before PEFT adds an adapter; `None` without one."""
    row_group: RowGroup | None = None
    """The processes that share rows with this one; `None` without sequence parallelism."""
    reading: Reading = PADDED
    """Which rows the student can read in one batch."""
    _tag_names: ClassVar = [*DistillationTrainer._tag_names, "opsd"]
    chat_template_kwargs: dict[str, Any]
    processor: ProcessorMixin | None
    """A multimodal processor, saved with the weights, so that the folder loads as the original model does."""
    loads: int = 0
    """How often the weights of a checkpoint were loaded."""
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
        # transformers would install a SIGTERM handler, and remove it only when training ends without an error.
        stops_on_sigterm, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
        loading = args.model_init_kwargs
        if isinstance(kwargs.get("model"), str):
            args.model_init_kwargs = {"use_safetensors": True, **whole_on(args.device), **(loading or {})}
            quantised = kwargs.get("quantization_config") or args.model_init_kwargs.get("quantization_config")
            if not quantised and (dtype := dtype_of_frozen_base(args, kwargs.get("peft_config"))):
                args.model_init_kwargs.setdefault("dtype", dtype)
        self.base_samples: Samples | None = None
        sizes = launched(args)
        try:
            # accelerate and transformers would divide batches of the dataset: prompts, here.
            with sharing_rows_ourselves(sizes), called_before_peft(self._take_samples), whole_checkpoint("model"):
                super().__init__(teacher_model=None, args=args, **kwargs)
        finally:
            args.use_vllm, args.model_init_kwargs = use_vllm, loading
            args.enable_jit_checkpoint = stops_on_sigterm
        if not args.use_cache:  # which transformers has set in the config, and would save with the student
            vars(self.model.config).pop("use_cache", None)
            vars(self.model.config).update(self._use_cache)
        sigterm = StopOnSigterm(self.accelerator) if stops_on_sigterm else None
        self._checkpoints, self._collapse = Checkpoints(self, sigterm), CollapseGuard(self)
        for callback in (sigterm, self._collapse):
            if callback is not None:
                self.add_callback(callback)
        self._guard = NonfiniteGuard(self)
        if self.base_samples is None and is_peft(self.model):
            self._take_samples(self.model)
        self._check_fsdp()
        # By default FSDP2 with `bf16=True` rounds the loss, and sharded gradients are summed in bfloat16.
        keep_float32(self.accelerator, self.args.accelerator_config.gradient_accumulation_kwargs or {})
        if is_split_model(self.model):
            with preserved_rng(self.accelerator.device):
                # ZeRO-3 has rounded rotary frequencies to the dtype of the weights.
                recompute_buffers(without_peft(self.model))
        if sizes.sp_enabled:
            check_shareable(self.model, sizes.sp_size, sizes.sp_handler.sp_attn_implementation)
            self.row_group = RowGroup(sizes.sp_size)
        self._launch, self._earlier = Launch(), EarlierTraining(self)
        self._show_phase = replace_default(self.callback_handler)
        self._watchdog = Watchdog(self.args.phase_timeout, self.accelerator.process_index)
        self._stats = StepStats(self, self._watched)
        self._evaluation = Evaluation(self, self._stats)
        self._generation = Generation(self, lambda prompt_ids: self._ahead.complete(prompt_ids))
        self._dealer = Dealer(self, lambda rows: self._generate_and_score_completions(rows))
        self._scorer = Scorer(self)
        self._overlap = Overlap(self, self._generation, self._dealer, self._scorer, self.begin_batch, self.trl_batch)
        self._ahead = Ahead(self, self._generation, self._overlap.complete)
        self._loss_rows: Tensor | None = None
        self._loss_scored: Tensor | None = None
        self._read_once = ReadOnce(self.args, BUILD)
        self._read_at_start = ReadOnce(self.args, START)

    # By transformers' constructor, before it sets `use_cache` in the student's config.
    def create_accelerator_and_postprocess(self) -> None:
        self._use_cache = {name: value for name, value in vars(self.model.config).items() if name == "use_cache"}
        super().create_accelerator_and_postprocess()

    def _take_samples(self, student: Any) -> None:
        self.base_samples = sampled(student)

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

    # ---- A training, and its data -----------------------------------------------------------------------------------

    # By the user.
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
        self._read_at_start = ReadOnce(self.args, START)
        self._dealer.forget()
        set_known(self, _step=0, _current_train_step_time=0.0)
        self._metrics["train"].clear()
        self._stats.clear()
        self._collapse.begin()
        with (
            nullcontext() if self.row_group is None else self.row_group.shares(self.model),
            explained("step", partial(self.footprint, "step")),  # outside the phases, memory is the optimizer's
            self._earlier.followed_by(self),
            self._guard.training(),
        ):
            try:
                if resume_from_checkpoint:
                    resume_from_checkpoint = self._checkpoints.whole(resume_from_checkpoint)
                    self.check_state(resume_from_checkpoint)
                with self._checkpoints.training():
                    return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            finally:
                self._ahead.cancel()

    # Once a training.
    def get_train_dataloader(self) -> DataLoader:
        """As TRL's, which repeats the rows of a stream for accumulation only."""
        stream, number = self.train_dataset, self.args.num_generations
        if number == 1 or not isinstance(stream, IterableDataset):
            return super().get_train_dataloader()
        if self.shuffle_dataset:
            stream = stream.shuffle(seed=self.args.seed)
        calls = self.args.gradient_accumulation_steps
        rows = self.args.per_device_train_batch_size * self.accelerator.num_processes * calls
        return self._get_dataloader(
            dataset=repeat_iterable_dataset(stream, number, rows // number, calls),
            description="Training",
            batch_size=self._train_batch_size * calls,
            is_training=True,
        )

    # At construction of a data loader.
    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self.row_columns)

    # By `get_train_dataloader`, where the dataset is no stream.
    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        sampler: Any = super()._get_train_sampler(dataset)
        number = self.args.num_generations
        # TRL's sampler repeats each of `batch_size` prompts, so that a step has as many rows as before.
        set_known(sampler, mini_repeat_count=number, batch_size=sampler.batch_size // number)
        return sampler

    # Once a training, and once for each dataset of an evaluation or a prediction.
    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        number = self.args.num_generations_eval or self.args.num_generations
        if not is_training and number > 1:
            if isinstance(dataset, IterableDataset):
                dataset = repeat_iterable_dataset(dataset, number)
            else:  # the rows themselves: accelerate has to know how many there are, not a sampler alone
                order = range(len(dataset)) if sampler_fn is None else list(sampler_fn(dataset))
                dataset, sampler_fn = dataset.select(np.repeat(order, number)), SequentialSampler
        return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    # Once a training, before a checkpoint is loaded into the optimizer.
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._checkpoints.note_settings()
        return scheduler

    # When a training resumes; not under DeepSpeed.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.loads += 1

    # Once a training, after the model was wrapped; with `None` where it does not resume.
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._checkpoints.after_optimizer_load(checkpoint)
            self.loads += self.is_deepspeed_enabled  # whose engine loads the weights, not `_load_from_checkpoint`
            self.load_own_state(checkpoint)

    # ---- An optimizer step: its micro-steps -------------------------------------------------------------------------

    # By transformers before each optimizer step: the rows of its micro-steps.
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """As transformers'; with `overlap='ahead'` it also reads the rows of the next step."""
        return self._ahead.batch(super().get_batch_samples, epoch_iterator, num_batches, device)

    # By transformers, for each micro-step; the optimizer step follows the last of `gradient_accumulation_steps`.
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._read_at_start.check(self.args)
        with self._stats.phase("compare", "train"):
            loss = self._learn(model, inputs, num_items_in_batch)
        if self._call == 0:
            self._dealer.forget()  # its targets must not stay in memory during the next rollout or an evaluation
        return loss

    def _learn(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """The loss of a call, after a forward and backward pass for each of its micro-batches."""
        start, trl_step = perf_counter(), super().training_step

        def learn(is_last: bool) -> Tensor:
            if not is_last:  # past TRL's, which would count it as a call
                return Trainer.training_step(self, model, inputs, num_items_in_batch)
            # TRL times only its own call, which trains on the last micro-batch.
            set_known(self, _current_train_step_time=self._current_train_step_time + perf_counter() - start)
            return self._guard.note_loss(trl_step(model, inputs, num_items_in_batch))

        if self._overlap.is_on:
            if self.accelerator.gradient_state.sync_gradients:
                return self._overlap.step(model, inputs, learn)
            set_known(self, _step=self._step + 1)  # the step is taken after a later call
            return torch.zeros((), device=self.args.device)
        if prepares_batches(self):
            return self._guard.note_loss(trl_step(model, inputs, num_items_in_batch))
        parts = self._dealer.parts(inputs, self._call)
        return torch.stack(self._dealer.losses(parts, model, learn)).sum()

    @property
    def _call(self) -> int:
        """Index of the next call of `training_step` within an optimizer step."""
        return int(self._step % self.args.gradient_accumulation_steps)

    # By `training_step` of TRL, once a micro-batch; by TRL's `prediction_step` in an evaluation.
    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        return self._dealer.only_part(generation_batch, self._call)

    # ---- A generation batch -----------------------------------------------------------------------------------------

    # By the dealer in the first micro-step of an optimizer step; by `_prepare_inputs` for a batch of an evaluation.
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        requests = self.begin_batch(inputs)
        written = self.trl_batch(requests)
        self._rewards.note(written, requests)  # before rows are exchanged, while those of a prompt are adjacent
        # A teacher that was notified of a row reads it in the process that generated it.
        batch, rows = self._dealer.exchanged(written, requests, stay=self._overlap.notifies_teacher)
        batch.update(self._rewards.pulls_of(rows))
        batch.update(self._scorer.score(batch, rows))
        batch["num_items_in_batch"] = self.accelerator.gather(batch["loss_weights"].sum()).sum()
        return batch

    def begin_batch(self, inputs: list[dict[str, Any]]) -> list[Request]:
        """Reads and checks the rows of a generation batch, and counts it. Collective."""
        self._read_once.check(self.args)
        set_group_timeout(self.args.ddp_timeout_delta)  # in each batch: a library may have made a group since
        self.check_same_rows("train" if self.model.training else "eval")
        rows: list[Request] = self.read_rows(inputs)
        self._generation.mark(rows)
        self._stats.now.count_batch()
        return rows

    def trl_batch(self, rows: Sequence[Request]) -> dict[str, Any]:
        """TRL's batch for checked rows, generated and logged."""
        text = [{name: value for name, value in row.items() if name not in self.hidden_columns} for row in rows]
        self._generation.requests = rows
        batch: dict[str, Any] = super()._generate_and_score_completions(text)
        batch["completion_mask"][self._generation.empty_rows] = 0
        return batch

    # By TRL's `_generate_and_score_completions`: the prompts of a batch.
    def _generate(self, prompts: list) -> tuple:
        self._generation.begin()
        with self._engine_hidden(True), self._generation.session():
            written = super()._generate(prompts)
        self._collapse.note_completions(self._generation.on_policy(written[1]))
        return written

    # By TRL's `_generate`, before the first turn.
    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        self.check_prompt_ids(prompt_ids)
        return prompt_ids, images, multimodal_fields

    # By TRL's `_generate` for the first turn, by its tool loop for each later one.
    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict, has_tool_images: bool = False
    ) -> list[list[int]]:
        with self._engine_hidden(False):
            return self._generation.turn(prompt_ids)

    # By TRL's `_generate`, after the first turn.
    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, images: Any, multimodal_fields: Any
    ) -> tuple:
        """As TRL's, and joins later turns of other processes after those of this one. Collective."""
        looped = super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, images, multimodal_fields)
        _, self._rewards.conversations, *_ = looped
        with self._engine_hidden(False):
            self._generation.join_later_turns()
        return looped

    @contextmanager
    def _engine_hidden(self, hides: bool) -> Iterator[None]:
        """Hides `use_vllm` from TRL's tool loop, which would ask an engine of TRL's for its context."""
        before, self._hides_engine = self._hides_engine, hides
        try:
            yield
        finally:
            self._hides_engine = before

    # ---- The loss of a micro-batch ----------------------------------------------------------------------------------

    # By transformers' `training_step`, for each micro-batch; by TRL's `prediction_step` in an evaluation.
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As TRL's, without two numbers of its log that would each wait for the device."""
        inputs = self._scorer.scored(inputs)
        if self.model.training and (total := inputs.get("num_items_in_batch")) is not None:
            # Weights may add up to less than 1, which is TRL's lower bound. Processes' gradients are averaged.
            num_items_in_batch = total.where(total > 0, 1.0) / self.accelerator.num_processes
        student = self.accelerator.unwrap_model(model)
        losses, rows_of = [], []
        parts = parts_to_learn(self.row_group, inputs, self.model, self.reading, self.accelerator.device)
        for part, is_last in parts:
            loss, *_ = self._forward_redirection(model, student, self._compute_loss, student, part, num_items_in_batch)
            if not is_last:  # DeepSpeed accepts several backward passes before a step
                engine = self.accelerator.deepspeed_engine_wrapped
                engine.backward(loss, sync_gradients=False, scale_wrt_gas=False)
            losses.append(loss if is_last else loss.detach())
            assert self._loss_rows is not None, "_compute_loss has set them"
            rows_of.append(self._loss_rows)
            self._loss_rows = None
        loss, rows = torch.stack(losses).sum(), torch.cat(rows_of)
        # No collective may run inside the wrapper's forward, so the sums of this process are reduced here. The host
        # waits for them, and for other processes, once per step: before the backward pass that the step follows.
        if self.model.training:
            self._scorer.warn_if_unscored(self._loss_scored)
            self._stats.add(
                {name: one for name, one in inputs.items() if name != "teacher_rows"}, rows, self._loss_scored
            )
            if not self.accelerator.gradient_state.sync_gradients:
                return (loss, None) if return_outputs else loss
            counted = self._stats.reduced()
        else:
            counted = self._stats.evaluated(inputs, rows, self.gather_distinct_rows(rows))
            self._evaluation.keep(inputs)
        finite = [self._is_finite(one) for one in counted]  # each is counted, also after one that is not
        if not all(finite):
            loss = loss * math.nan  # and so the gradient in each process: every optimizer's own check skips the step
        elif self.model.training:
            self._stats.record_step()
        return (loss, None) if return_outputs else loss

    # By `compute_loss`, inside the forward of the student's distributed wrapper: no collectives in it.
    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple:
        # TRL calls this method in place of the `forward` that accelerate wrapped in autocast.
        rollout = Rollout.unpack(inputs).cut()
        targets = TeacherTargets.unpack(inputs).cut(rollout.completion_ids.size(1))
        with autocast(self.accelerator):
            parts = self.compare(unwrapped_student, rollout, targets, num_items_in_batch)
        check_parts(parts, rollout, f"{type(self).__name__}.compare", self.model.training)
        self._loss_rows, self._loss_scored = self._stats.by_teacher(parts.rows, targets.teacher), parts.scored
        if self.model.training:
            self._guard.watch(unwrapped_student)
        weight, student_entropy = columns(parts.rows, "weight", "student_entropy").sum(0)
        return parts.loss, student_entropy, weight

    def _is_finite(self, one: MicroBatch) -> bool:
        """Counts a micro-batch; returns whether its loss is finite in all processes."""
        if is_finite := self._guard.is_finite(one.named, one.rows):
            self.check_sums(one.named)
            self._stats.now.add(one.named)
            if self.model.training:
                self._collapse.note_loss(one.named)
        self.record("entropy", one.named["student_entropy"] / one.named["weight"] if one.named["weight"] else 0.0)
        return is_finite

    # ---- The gradient -----------------------------------------------------------------------------------------------

    # After the backward passes of an optimizer step, and before the step; under DeepSpeed after it.
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self._guard.before_step(model, norm)
        return norm

    # ---- The log ----------------------------------------------------------------------------------------------------

    # After `logging_steps`, after an evaluation, and at the end of a training.
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # TRL takes the numbers of training or evaluation by the mode of the model, and an evaluation may have left it.
        is_training, self.model.training = self.model.training, self.model.training or "train_runtime" in logs
        try:
            if self.model.training:
                logs.update(self._stats.means())
                if "loss" in logs and (skipped := self._guard.skipped) is not None:
                    logs["nonfinite/skipped_steps"] = skipped
            if self.log_completions and self.is_world_process_zero():  # TRL makes the folder at construction
                os.makedirs(os.path.join(self.args.output_dir, "completions"), exist_ok=True)
            numbers = self._metrics["train" if self.model.training else "eval"]
            for name in [name for name, each in numbers.items() if all(map(math.isnan, each))]:
                del numbers[name]  # TRL would log `None`, which nothing that shows or stores a log expects
            super().log(logs, start_time)
        finally:
            self.model.training = is_training

    def record(self, name: str, value: float) -> None:
        """Adds a number of this process to the next log, which shows the mean; in an evaluation, to its metrics.

        Args:
            name (`str`):
                Any that is not logged already.
            value (`float` or `torch.Tensor`):
                One number.

        Raises:
            ValueError: It is not one number, or the name is taken.
        """
        self._metrics["train" if self.model.training else "eval"][name].append(recorded(name, value))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times the body as a phase of training, `time/<name>` in the log, and reports it if it hangs."""
        return self._stats.phase(name)

    @contextmanager
    def _watched(self, phase: str) -> Iterator[None]:
        with explained(phase, partial(self.footprint, phase)), self._watchdog(phase), self._show_phase(phase):
            yield

    # ---- Evaluations ------------------------------------------------------------------------------------------------

    # By the user, and within a training each `eval_steps`.
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As TRL's; all batches of all datasets are generated in one session of the rollout.

        A `metric_for_best_model` without a value in this evaluation is returned as NaN, which is never the best, and is
        not logged.
        """
        self._launch.restore()
        with self.session():
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return self._evaluation.with_best(found, self._rewards.names) if metric_key_prefix == "eval" else found

    # By the user.
    def predict(
        self,
        test_dataset: Dataset | IterableDataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> Predictions:
        """Completes the prompts of a dataset, and evaluates the student on them.

        Args:
            test_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
                As `train_dataset`.
            ignore_keys (`list[str]`, *optional*):
                Has no effect; transformers' trainer takes it.
            metric_key_prefix (`str`, *optional*, defaults to `"test"`):
                Prefix of the metrics.

        Returns:
            [`Predictions`]: transformers' `PredictionOutput`. `predictions` are the token ids of the completions,
            [N, C], in the order of the rows, padded with -100; `texts` are the same as text. With
            `prediction_loss_only=True` in the config there are neither. `metrics` are those of `evaluate`; there are no
            `label_ids`.
        """
        if not isinstance(test_dataset, Dataset | IterableDataset):
            raise TypeError(
                f"`test_dataset` is a {type(test_dataset).__name__}: expected a `datasets.Dataset` or "
                "`IterableDataset`; call `predict` once for each of several."
            )
        self._launch.restore()
        with self.session():
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        return Predictions.of(output, self.processing_class.batch_decode)

    def as_read(self, datasets: Any, where: str) -> Any:
        """Datasets with their columns renamed to ours."""
        datasets = with_prompts(datasets, where)
        return solutions_as_context(datasets) if self.reads_solutions else datasets

    # By `evaluate`, for each dataset, which may not have been there at construction.
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return super().get_eval_dataloader(self.as_read(eval_dataset, "eval_dataset"))

    # By `predict`. In the order of the rows; TRL shuffles what it evaluates.
    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self._get_dataloader(
            dataset=self.as_read(test_dataset, "test_dataset"),
            description="test",
            batch_size=self.args.eval_batch_size,
            sampler_fn=SequentialSampler,
        )

    # For each dataset of an evaluation, and by `predict`.
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        with (
            self._evaluation.of_dataset(metric_key_prefix, self._metrics["eval"]) as metrics,
            self._rewards.evaluation(metric_key_prefix),
        ):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        output.metrics.update(metrics)
        return output

    # For each batch of an evaluation.
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple:
        with self._stats.phase("compare", "eval"):
            loss, _, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        completions = self._evaluation.take()
        return loss, None if prediction_loss_only else completions, labels

    # ---- Checkpoints ------------------------------------------------------------------------------------------------

    # For each checkpoint, also after an evaluation.
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._stats.phase("save", "train"):
            run_dir, write = Path(self._get_output_dir(trial)), partial(super()._save_checkpoint, model, trial)
            saved = self._checkpoints.save(run_dir, write, self._collapse.kept)
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(saved))

    # By `_save_checkpoint` of transformers.
    def _get_output_dir(self, trial: Any) -> str:
        run_dir: str = super()._get_output_dir(trial)
        return os.path.join(run_dir, UNFINISHED) if self._checkpoints.is_staging else run_dir

    # By `_save_checkpoint` of transformers, and by `save_model`.
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.processor is not None:
            self.processor.save_pretrained(output_dir or self.args.output_dir)

    # By `_save_checkpoint` of transformers, after the weights.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self._checkpoints.complete_for_deepspeed(output_dir)
        self.save_own_state(output_dir)

    # By `_save_checkpoint` of transformers. An upload runs in the background, so it starts when the files are in place.
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._checkpoints.is_staging:
            super()._push_from_checkpoint(checkpoint_folder)

    # At the end of a training, with `load_best_model_at_end`.
    def _load_best_model(self) -> None:
        self._checkpoints.whole(str(self.state.best_model_checkpoint))  # after this, others may be deleted
        super()._load_best_model()
        self.loads += 1

    # ---- The model card ---------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        kind = self.args.teacher_model_kind
        return "on-policy distillation" if kind is None else "on-policy self-distillation (OPSD)"

    @property
    def _paper(self) -> dict[str, str]:
        paper: dict[str, str] = super()._paper if self.args.teacher_model_kind is None else SELF_DISTILLATION
        return paper

    # By the user, and by transformers when it pushes to the Hub; TRL's does so with each checkpoint.
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
            self._model_card.complete(dataset_name)

    # ---- Attributes -------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.is_built:
            super().__setattr__(name, value)
        elif name in DATASETS:
            if value is not getattr(self, name):
                self.replace_dataset(name, value)
        elif why := why_no_effect(self, name, value, self._read_once.values):
            raise AttributeError(f"`trainer.{name} = {shown(value)}` would have no effect: {why}", name=name, obj=self)
        elif name not in FIXED:  # else it is the value that it has
            super().__setattr__(name, value)

    @property
    def beta(self) -> float | None:
        """TRL's number for the divergence, `None` where it has none; assigning to it sets the divergence."""
        match self.divergence:
            case ForwardKL():
                return 0.0
            case ReverseKL():
                return 1.0
            case GeneralizedJSD(beta=beta):
                return beta
        return None

    @beta.setter
    def beta(self, beta: float) -> None:
        from_to(0, 1).check("beta", beta)
        self.divergence = divergence_of(None, Settings(beta=beta))

    @property
    def temperature(self) -> float:
        """Softmax temperature of the loss, for models without an option of their own; rollouts have that of
        `generation_config`, as in TRL.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        above(0).check("temperature", temperature)
        self._temperature = temperature

    @property
    def temperatures(self) -> tuple[float, float]:
        """Softmax temperatures of the student and of the teacher in the loss."""
        student, teacher = self.args.student_temperature, self.args.teacher_temperature
        return student or self.temperature, teacher or self.temperature

    @property
    def use_vllm(self) -> bool:
        """Whether vLLM generates."""
        return self.args.use_vllm and not self._hides_engine

    @use_vllm.setter
    def use_vllm(self, use_vllm: bool) -> None:
        """Ignores what TRL assigns, whose value is hidden from it."""

    @property
    def vllm_generation(self) -> Any:
        raise AttributeError(
            "`trainer.vllm_generation` is TRL's engine, which is not built here: with `use_vllm=True` the engine is "
            "behind `trainer.rollout`, whose `sync_weights` and `close` are public.",
            name="vllm_generation",
            obj=self,
        )

    @property
    def teacher_model(self) -> Any:
        """The model of the only teacher. Another model or path can be assigned, between two optimizer steps."""
        return getattr(self.teacher, "model", None)

    @teacher_model.setter
    def teacher_model(self, teacher_model: Any) -> None:
        # While it builds the student, TRL assigns None.
        if self.is_built and teacher_model is not self.teacher_model:
            self.replace_teacher(teacher_model)

    # ---- Host: what rollouts, teachers and the objects of the loop call ---------------------------------------------

    @property
    def strategy(self) -> str:
        """Number of processes, parallelism of the launch, and device, in words."""
        sharing = None if self.row_group is None else self.row_group.size
        return parallelism_in_words(self.accelerator, self._dist, sharing)

    def tokenize(self, prompts: list[Any], **chat_template_kwargs: Any) -> list[list[int]]:
        """Token ids of unchecked prompts, as the rollout reads them; keyword arguments go to the chat template."""
        ours = self.chat_template_kwargs
        # TRL's method reads the attribute and has no argument for it.
        self.chat_template_kwargs = {**ours, **chat_template_kwargs}
        try:
            prompt_ids, _, _ = super()._tokenize_prompts(prompts)
        finally:
            self.chat_template_kwargs = ours
        return list(prompt_ids)

    def prompt_ids_of(self, rows: Sequence[Request]) -> list[list[int]]:
        """The student's prompts for checked rows."""
        prompt_ids: list[list[int]] = self._tokenize_prompts(deepcopy([row["prompt"] for row in rows]))[0]
        return prompt_ids

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        """Left-padded `input_ids` and `attention_mask`, [B, P], on the device."""
        return padded_prompts(self, prompt_ids)

    def padded(self, prompt_ids: Sequence[list[int]], completions: Sequence[list[int]]) -> dict[str, Tensor]:
        """TRL's keys for rows; an empty completion is one masked token of padding."""
        return padded_rows(self, prompt_ids, completions)

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Gathers parameters that ZeRO-3 has sharded, for reading only, within the context. Collective."""
        context: AbstractContextManager[Any] = self._dist.gather_params(parameters)
        return context

    def in_student(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(student, *args)` where the student's weights are gathered; collective if it is sharded."""
        return call_in_student(self, self._forward_redirection, function, *args)

    def student_for_generation(self) -> AbstractContextManager[Any]:
        """The bare student in eval mode, gathered where it is sharded and the options allow it. Collective."""
        return generating_student(self, self._dist)
