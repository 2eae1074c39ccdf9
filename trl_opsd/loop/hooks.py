"""Hooks into TRL's loop: where it calls one of its private methods, one of the four verbs is called with our types."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler
from tqdm.auto import tqdm
from transformers import ProcessorMixin

from trl_opsd._compat.deepspeed import recompute_buffers
from trl_opsd._compat.peft import called_before_peft, is_peft, without_peft
from trl_opsd._compat.sharding import is_split_model, keep_float32, launched, sharing_rows_ourselves
from trl_opsd._compat.trl import DistillationConfig, DistillationTrainer
from trl_opsd._compat.versions import replaced, set_known
from trl_opsd.checkpoints import UNFINISHED, on_disk
from trl_opsd.data.completions import renamed, with_prompts
from trl_opsd.data.images import Pictures
from trl_opsd.data.prompts import COLUMNS
from trl_opsd.environments.environments import EMPTY_PROMPT
from trl_opsd.loop import fingerprint
from trl_opsd.loop.batch import Batch, Batches
from trl_opsd.loop.checkpoints import Checkpoints
from trl_opsd.loop.generation import Generation
from trl_opsd.loop.loader import NextRows
from trl_opsd.loop.members import TrainerMembers
from trl_opsd.loop.nonfinite import NonfiniteGuard
from trl_opsd.loop.step import Step
from trl_opsd.loop.step_stats import PhaseClock, Predictions, StepStats, of_all_processes
from trl_opsd.loop.teaching import Teaching
from trl_opsd.methods.base import Part
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import compiled
from trl_opsd.models.checks import check_can_learn, whole_checkpoint, whole_on
from trl_opsd.models.padding import PADDED, BatchPolicy
from trl_opsd.models.weights import Samples, load_renamed, sampled
from trl_opsd.parallel.failure import Watchdog
from trl_opsd.parallel.precision import autocast, dtype_of_frozen_base
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.progress import Progress, replace_default, saved
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.loss import check_parts
from trl_opsd.types.targets import has_streams

if TYPE_CHECKING:
    from trl_opsd.loop.ahead import Ahead
    from trl_opsd.loop.overlap import Overlap
    from trl_opsd.methods.order import Methods

logger = get_logger(__name__)


class TrainerHooks(TrainerMembers):
    """TRL's trainer with every method overridden that calls one of the verbs: `complete`, `teach`, `weigh`, `compare`.

    A subclass implements them and the checks around them; it gets our own types only. TRL builds neither a teacher nor
    an engine: the subclass provides both.
    """

    row_columns: tuple[str, ...] = COLUMNS
    """Columns of a dataset that `remove_unused_columns` keeps."""
    reads_solutions: bool = False
    """Whether a column `solution` of a dataset is privileged context."""
    _overlap: Overlap | None = None
    """Only with `overlap='step'`."""
    _ahead: Ahead | None = None
    """Only with `overlap='ahead'`."""
    _reward_names: Sequence[str] = ()
    methods: Methods
    """What is done to rows, tokens and the objective beside the four verbs."""
    teaching: Teaching
    tokenizing: RLock
    """Held while a prompt or an answer is tokenized: threads of rows do so too, and options differ for teachers."""
    base_samples: Samples | None
    """Samples of the base weights, taken before PEFT adds an adapter; `None` without one."""
    batching: BatchPolicy = PADDED
    """Which rows the student can read in one batch."""
    _tag_names: ClassVar = [*DistillationTrainer._tag_names, "opsd"]
    processor: ProcessorMixin | None
    """A multimodal processor, saved with the weights, so that the folder loads as the original model does."""
    loads: int = 0
    """How often the weights of a checkpoint were loaded."""
    _signature_columns: list[str] | None

    def __init__(
        self, *, args: DistillationConfig, processors: Mapping[str, ProcessorMixin | None], **kwargs: Any
    ) -> None:
        self.processors, self.processor = processors, processors[""]
        if args.n_gpu > 1:
            logger.warning(
                f"{args.n_gpu} accelerators are visible, but this single process trains only on {args.device}."
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
        self._checkpoints = Checkpoints(self, stops_on_sigterm)
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
            from trl_opsd.models.shared_rows import RowGroup, check_shareable

            check_shareable(self.model, sizes.sp_handler.sp_attn_implementation)
            self.row_group = RowGroup(sizes.sp_size)
        limit, show = self.args.phase_timeout, replace_default(self.callback_handler)
        watchdog = None if limit is None else Watchdog(limit, self.accelerator.process_index)
        watches = [one for one in (watchdog, show) if one is not None]
        self._stats = StepStats(self, lambda: PhaseClock(*watches, explain=self.explain_memory))
        self.compiled: Callable[..., AbstractContextManager[Any]] = nullcontext
        if args.torch_compile:
            self.compiled = partial(compiled, args.torch_compile_backend, args.torch_compile_mode)
        self._generation = Generation(self)
        self._next = NextRows(self, self._drop_ahead)
        pins = self.args.dataloader_pin_memory and has_streams(self.accelerator.device)
        self.pictures, self.tokenizing = Pictures(pins), RLock()
        self._batches = Batches(self, self._generation, self._stats, self._next, self._metrics, self._logs)
        if self.args.overlap == "step":
            from trl_opsd.loop.overlap import Overlap

            self._overlap = Overlap(self, self._generation, self._batches)
        elif self.args.overlap == "ahead":
            from trl_opsd.loop.ahead import Ahead

            self._ahead = Ahead(self, self._generation, self._next)
        if (overlapping := self._overlap or self._ahead) is not None:
            self._generation.overlapping = overlapping.complete
        self._one_step = Step(self, self._overlap)

    def _check_fsdp(self) -> None:
        if self._dist.fsdp_version == 1:
            raise ValueError(
                "`fsdp_version: 1`, which flattens the weights: set `fsdp_version: 2` in the accelerate file."
            )

    # By transformers' constructor, before it sets `use_cache` in the student's config.
    def create_accelerator_and_postprocess(self) -> None:
        self._use_cache = {name: value for name, value in vars(self.model.config).items() if name == "use_cache"}
        backend, self.args.torch_compile_backend = self.args.torch_compile_backend, None  # of layers, not of the model
        super().create_accelerator_and_postprocess()
        self.args.torch_compile_backend = backend

    def _take_samples(self, student: Any) -> None:
        self.base_samples = sampled(student)

    # ---- A training, and its data -----------------------------------------------------------------------------------

    # By the user.
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As TRL's, but discards leftovers of an interrupted run.

        `resume_from_checkpoint="auto"` resumes from the newest checkpoint if there is one.
        """
        self._checkpoints.interrupted = False
        if self.train_dataset is None:
            raise ValueError("`train` without a `train_dataset`: this trainer was built only to evaluate.")
        self._generation.check_is_own("train")
        check_can_learn(self.model)
        if self.args.resume_from_checkpoint and resume_from_checkpoint is None:
            logger.warning("`args.resume_from_checkpoint` has no effect: pass it to `train`.")
        self.restore_launch()
        self._metrics["train"].clear()
        self._stats.clear()
        self.methods.begin()
        # Where such a loss is an error there is none to leave out of the log, for which the host would wait.
        filters = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = filters and self.args.nonfinite == "skip"
        with nullcontext() if self.row_group is None else self.row_group.shares(self.model), self._guard.training():
            try:
                if str(resume_from_checkpoint).lower() == "auto":
                    resume_from_checkpoint = self._checkpoints.are_there()
                if resume_from_checkpoint:
                    resume_from_checkpoint = self._checkpoints.whole(resume_from_checkpoint)
                    now, accepted = self.teaching.fingerprint(), self.args.resume_with_changes or ()
                    fingerprint.check(resume_from_checkpoint, now, accepted)
                with self._checkpoints.training():
                    return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            except Exception as error:
                self.explain_memory(error, "step")  # outside the phases, memory is the optimizer's
                raise
            finally:
                self.args.logging_nan_inf_filter = filters
                self._drop_ahead()
                self._next.forget()

    def _drop_ahead(self) -> None:
        """Drops what was made for a step that never comes."""
        self._batches.stop_reading()
        self.pictures.clear()
        self._generation.rows = ()
        if self._ahead is not None:
            self._ahead.cancel()

    # At construction of a data loader.
    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self.row_columns)

    # Once a training, before a checkpoint is loaded into the optimizer.
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._checkpoints.note_settings()
        return scheduler

    # When a training resumes; not under DeepSpeed.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self.is_fsdp_enabled:
            load_renamed(self.model if model is None else model, resume_from_checkpoint)
        self.loads += 1

    # Once a training, after the model was wrapped; with `None` where it does not resume.
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._checkpoints.after_optimizer_load(checkpoint)
            self.loads += self.is_deepspeed_enabled  # whose engine loads the weights, not `_load_from_checkpoint`
            self.teachers.load(checkpoint)
            self.methods.load(checkpoint)

    # ---- An optimizer step: its micro-steps -------------------------------------------------------------------------

    # By transformers before each optimizer step: the rows of its calls.
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """As transformers', but the last call gets all rows; with `overlap='ahead'` or images reads a step ahead."""
        fetch = super().get_batch_samples
        if self._ahead is not None or self.reads_images is not False:  # processes of one stream read alike
            fetch = partial(self._next.batch, fetch)
        calls, number = fetch(epoch_iterator, num_batches, device)
        rows = [row for call in calls for row in call]
        return [*([] for _ in calls[1:]), *([rows] if calls else [])], number

    # By transformers, `gradient_accumulation_steps` times a step; all of it happens in the last call.
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        start = perf_counter()
        with self._stats.phase("compare", "train"):
            loss = self._one_step.learn(model, inputs)
        self._metrics["train"]["step_time"].append(perf_counter() - start)
        return loss

    # By transformers' `training_step`, for each micro-batch.
    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch

    @property
    def interrupted(self) -> bool:
        """Whether a SIGTERM ended the last training early, after a checkpoint (`enable_jit_checkpoint`)."""
        return self._checkpoints.interrupted

    # ---- A generation batch -----------------------------------------------------------------------------------------

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Completes rows of a dataset and has teachers score them, as in a training or an evaluation. Collective."""
        return self._batches.make(rows)

    def completed(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Rollout, Sequence[BatchRow]]:
        """Completes rows of a dataset, which move to the processes that would have them scored. Collective."""
        return self._batches.completed(rows)

    def generated(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Token ids that are generated for rows of a dataset, in this process; no method sees them. Collective."""
        read = self._batches.begin(rows)
        return self._generation.write(read, self.prompt_ids_of(read)).completions

    # ---- The loss of a micro-batch ----------------------------------------------------------------------------------

    # By transformers' `training_step`, for each micro-batch, and by `prediction_step`.
    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a micro-batch, with statistics of its rows.

        Args:
            model (`torch.nn.Module`):
                The student, as launchers have wrapped it.
            inputs (`Batch`):
                Its rollout, targets and rows.
            return_outputs (`bool`, *optional*, defaults to `False`):
                Whether to return a pair, whose second entry is `None`.
            num_items_in_batch (`torch.Tensor`, *optional*):
                What the loss is divided by; in an evaluation `None`, for the weight of the tokens of the batch.
        """
        student = self.model  # unwrapped; `accelerator.unwrap_model` reads packages' metadata in each call
        parts: Iterable[tuple[Rollout, TeacherTargets, bool]] = [(inputs.rollout, inputs.targets, True)]
        if self.row_group is not None and self.model.training:
            from trl_opsd.models.shared_rows import parts_to_learn

            device = self.accelerator.device
            parts = parts_to_learn(self.row_group, inputs.rollout, inputs.targets, self.model, self.batching, device)
        losses, sums_of = [], []
        for rollout, targets, is_last in parts:
            # Not as arguments: FSDP2 reads each field of dataclasses among these, and so would make `hidden`.
            compared = partial(self._compared, student, rollout, targets, num_items_in_batch)
            # TRL's: calls it inside the wrapper's forward, where ZeRO-3 and FSDP2 gather weights.
            loss, sums = self._forward_redirection(model, student, compared)
            if not is_last:  # DeepSpeed accepts several backward passes before a step
                engine = self.accelerator.deepspeed_engine_wrapped
                engine.backward(loss, sync_gradients=False, scale_wrt_gas=False)
            losses.append(loss if is_last else loss.detach())
            sums_of.append(sums)
        loss, sums = torch.stack(losses).sum(), torch.cat(sums_of)
        # No collective may run inside the wrapper's forward, so the sums of this process are reduced here. The host
        # waits for them, and for other processes, once per step: before the backward pass that the step follows.
        if self.model.training:
            self._stats.add(Part(inputs.rows, inputs.rollout, sums))
            if not self.accelerator.gradient_state.sync_gradients:
                return (loss, None) if return_outputs else loss
            counted = self._stats.reduced()
        else:
            counted = [self._stats.evaluated(inputs.rollout, self.gather_distinct_rows(sums))]
        finite = [self._is_finite(one) for one in counted]  # each is counted, also after one that is not
        if not all(finite):
            loss = loss * math.nan  # and so the gradient in each process: every optimizer's own check skips the step
        elif self.model.training:
            self._stats.end_step()
        return (loss, None) if return_outputs else loss

    # Inside the forward of the student's distributed wrapper: no collectives in it.
    def _compared(
        self, student: Any, rollout: Rollout, targets: TeacherTargets, num_items: Any
    ) -> tuple[Tensor, Tensor]:
        """The loss, and its statistics of each row."""
        rollout = rollout.cut()
        targets = targets.cut(rollout.completion_ids.size(1))
        with autocast(self.accelerator):  # of the wrapper's own `forward`, which is not called
            parts = self.compare(student, rollout, targets, num_items)
        check_parts(parts, rollout, f"{type(self).__name__}.compare", self.model.training)
        if self.model.training:
            self._guard.watch(student)
        return parts.loss, self._stats.by_teacher(parts.rows, targets.teacher)

    def _is_finite(self, named: dict[str, float]) -> bool:
        """Counts a micro-batch; returns whether its loss is finite in all processes."""
        if is_finite := self._guard.is_finite(named):
            # That of a completed teacher is for guards alone: its own is not known.
            unknown = () if self.teaching.teachers.are_whole else ("teacher_entropy",)
            self._stats.now.totals.update({name: one for name, one in named.items() if not name.startswith(unknown)})
        weight = named["weight"]
        self.record("entropy", named["student_entropy"] / weight if weight else 0.0, weight)
        return is_finite

    # ---- The gradient -----------------------------------------------------------------------------------------------

    # After the backward passes of an optimizer step, and before the step; under DeepSpeed after it.
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self._guard.before_step(model, norm)
        return norm

    # ---- The log ----------------------------------------------------------------------------------------------------

    # After each optimizer step, in all processes; `log` may be called in one alone.
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log:
            numbers = self._metrics["train"]
            known = of_all_processes(numbers, weighted=False)
            numbers.clear()
            numbers.update({name: [value] for name, value in known.items()})
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # After `logging_steps`, after an evaluation, and at the end of a training.
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # TRL takes the numbers of training or evaluation by the mode of the model, and an evaluation may have left it.
        is_training, self.model.training = self.model.training, self.model.training or "train_runtime" in logs
        try:
            if self.model.training:
                logs.update(means := self._stats.means())
                if "loss" in logs and (skipped := self._guard.skipped) is not None:
                    logs["nonfinite/skipped_steps"] = skipped
                if not means and self._guard.was_empty:  # no token has counted since the last log
                    logs.pop("loss", None)
                    logs.pop("grad_norm", None)
            numbers = self._metrics["train" if self.model.training else "eval"]
            for name in [name for name, each in numbers.items() if all(map(math.isnan, each))]:
                del numbers[name]  # TRL would log `None`, which nothing that shows or stores a log expects
            with replaced(self, log_completions=self.log_completions and "train_runtime" not in logs):
                super().log(logs, start_time)
        finally:
            self.model.training = is_training

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times the body as a phase of training, `time/<name>` in the log, and reports it if it hangs."""
        return self._stats.phase(name)

    def explain_memory(self, error: Exception, phase: str) -> None:
        """Adds its phase to an out-of-memory error; of nested phases the innermost."""
        ran_out = isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
        if ran_out and not any("Out of memory" in one for one in getattr(error, "__notes__", ())):
            error.add_note(f"Out of memory in phase {phase!r}: docs/troubleshooting.md lists what reduces it.")

    # ---- Evaluations ------------------------------------------------------------------------------------------------

    # By the user, and within a training each `eval_steps`.
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As TRL's; all batches of all datasets are generated in one session of the rollout.

        A `metric_for_best_model` that has no value in this evaluation, but had in an earlier one, is returned as NaN,
        which is never the best, and is not logged.
        """
        self._generation.check_is_own("evaluate")
        self.restore_launch()
        with self._generation.rollout.session():
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return self._stats.with_best(found) if metric_key_prefix == "eval" else found

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
        self.restore_launch()
        with self._generation.rollout.session():
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        return Predictions.of(output, self.processing_class.batch_decode)

    def _checked(self, dataset: Any, where: str) -> Any:
        """A dataset with its columns renamed to ours."""
        acting = self.turns is not None and self.turns.environments is not None
        dataset = with_prompts(dataset, where, EMPTY_PROMPT if acting else None)
        dataset = renamed(dataset, "privileged_context") if self.reads_solutions else dataset
        dataset = renamed(dataset, "teacher") if self.teaching.names else dataset
        if isinstance(dataset, Dataset):  # not the trainer's own, nor the name of one of these
            self.teaching.check_room({where: dataset})
        return dataset

    # By `evaluate`, for each dataset, which may not have been there at construction.
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return super().get_eval_dataloader(self._checked(eval_dataset, "eval_dataset"))

    @contextmanager
    def evaluating(self, prefix: str) -> Iterator[dict[str, float]]:
        """Within it, batches are those of one evaluation, with its seeds and rewards; fills the metrics at its end."""
        with self._stats.evaluation(prefix, self._metrics["eval"]) as metrics, self.methods.evaluation(prefix):
            yield metrics

    # By `predict`. In the order of the rows; TRL shuffles what it evaluates.
    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self._get_dataloader(
            dataset=self._checked(test_dataset, "test_dataset"),
            description="test",
            batch_size=self.args.eval_batch_size,
            sampler_fn=SequentialSampler,
        )

    # For each dataset of an evaluation, and by `predict`.
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.evaluating(kwargs.get("metric_key_prefix", "eval")) as metrics:
            output = super().evaluation_loop(*args, **kwargs)
        if self.is_in_train:
            self.pictures.begin(is_training=False)  # drops those of the last batch
        else:
            self._drop_ahead()
        output.metrics.update(metrics)
        return output

    # For each batch of an evaluation.
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple:
        with self._stats.phase("compare", "eval"), torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self.score(inputs)).detach()
        completions, self._stats.completions = self._stats.completions, None
        return loss, None if prediction_loss_only else completions, None

    # ---- Checkpoints ------------------------------------------------------------------------------------------------

    # For each checkpoint, also after an evaluation.
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._stats.phase("save", "train"):
            run_dir, write = Path(self._get_output_dir(trial)), partial(super()._save_checkpoint, model, trial)
            saved = self._checkpoints.save(run_dir, write)
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
        self.teachers.check()
        if self.args.should_save:
            fingerprint.write(output_dir, self.teaching.fingerprint())
            self.teachers.save(output_dir)
            self.methods.save(output_dir)

    # By `_save_checkpoint` of transformers. An upload runs in the background, so it starts when the files are in place.
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._checkpoints.is_staging:
            super()._push_from_checkpoint(checkpoint_folder)

    # At the end of a training, with `load_best_model_at_end`.
    def _load_best_model(self) -> None:
        self._checkpoints.whole(str(self.state.best_model_checkpoint))  # after this, others may be deleted
        super()._load_best_model()
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            load_renamed(self.model, str(self.state.best_model_checkpoint))
        self.loads += 1

    # ---- The model card ---------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        kind = self.args.teacher_model_kind
        return "on-policy distillation" if kind is None else "on-policy self-distillation (OPSD)"

    @property
    def _paper(self) -> dict[str, str]:
        title = "Self-Distilled Reasoner: On-Policy Self-Distillation for Large Language Models"
        of_others: dict[str, str] = super()._paper
        return of_others if self.args.teacher_model_kind is None else {"title": title, "id": "2601.18734"}

    # By the user, and by transformers for each checkpoint.
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers', with a model card beside the weights."""
        folder = Path(output_dir or self.args.output_dir)
        with nullcontext() if _internal_call else on_disk(folder):
            super().save_model(output_dir, _internal_call)
            # Not in `_save`, whose ValueErrors transformers takes for ZeRO-3's, and not where weights stay in shards.
            if self.args.should_save and [*folder.glob("*.safetensors")]:
                self.methods.saved(folder, self._checkpoints.is_staging)
        if not _internal_call:
            own = self.args.output_dir
            try:  # TRL's writes to the folder of the run
                self.args.output_dir = str(output_dir or own)
                self.create_model_card()
            finally:
                self.args.output_dir = own
            shows = any(isinstance(one, Progress) for one in self.callback_handler.callbacks)
            if shows and self.is_world_process_zero():
                tqdm.write(saved(folder, self.model))

    # By the user, and by transformers when it pushes to the Hub; TRL's does so with each checkpoint.
    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """As TRL's, with models, objective and settings in the `README.md` that it writes."""
        folder = os.path.basename(os.path.realpath(self.args.output_dir))
        super().create_model_card(model_name or (self.hub_model_id or folder).split("/")[-1], dataset_name, tags)
        if self.is_world_process_zero():
            from trl_opsd.report.describe import complete_card

            complete_card(self)
