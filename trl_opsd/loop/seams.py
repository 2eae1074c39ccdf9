"""Turns the private verbs of TRL's trainer into four public ones; no other file knows an underscore of that trainer.

B rows · P prompt tokens · C completion tokens
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import Sampler
from transformers import ProcessorMixin

from trl_opsd._compat.deepspeed import announce, carried, recompute_buffers
from trl_opsd._compat.peft import is_peft, without_peft
from trl_opsd._compat.sharding import is_split_model, leave_outputs
from trl_opsd._compat.trl import (
    DistillationConfig,
    DistillationTrainer,
    distillation_trainer,
    pad,
    unwrap_model_for_generation,
)
from trl_opsd.loop.loaders import EachRowOnce
from trl_opsd.loop.sampler import EpochCount, EpochSampler
from trl_opsd.loop.saving import SafeCheckpoints
from trl_opsd.loop.steps import GuardedSteps
from trl_opsd.loop.weights import checked_weights
from trl_opsd.loop.wrapping import WrappedToTrain
from trl_opsd.models.samples import Samples, sampled
from trl_opsd.models.special_tokens import writable
from trl_opsd.run.clock import PhaseClock
from trl_opsd.run.groups import wait_for
from trl_opsd.run.known import set_known
from trl_opsd.run.memory import explained
from trl_opsd.run.precision import autocast
from trl_opsd.run.rng import preserved_rng
from trl_opsd.run.watchdog import Watchdog
from trl_opsd.types import LossParts, Rollout, TeacherTargets

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "_tokenize_prompts": ("self", "prompts"),
    "_generate": ("self", "prompts"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "has_tool_images"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_set_signature_columns_if_needed": ("self",),
    "_get_train_sampler": ("self", "dataset"),
    "_compute_loss": ("self", "unwrapped_student", "inputs", "num_items_in_batch"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "prediction_step": ("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
    "_save_checkpoint": ("self", "model", "trial"),
    "log": ("self", "logs", "start_time"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}
"""TRL's methods that are overridden here, with their parameters; a test holds them against the installed TRL."""


class SeamTrainer(GuardedSteps, SafeCheckpoints, EachRowOnce, WrappedToTrain, DistillationTrainer):
    """TRL's trainer with its loop cut open at four places: `complete`, `teach`, `weigh` and `compare`.

    A subclass fills in all of them but `weigh`, and three checks; everything it needs to know of a step comes as our
    own types. TRL builds neither a teacher nor an engine: the subclass brings both.
    """

    row_columns: ClassVar[tuple[str, ...]] = ("prompt",)
    """Columns of a dataset that `remove_unused_columns` has to leave."""
    hidden_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that TRL would read, and must not."""
    handed_in: Samples | None
    """Of the weights under an adapter, before it was put on them if it is put on here; `None` without one."""
    _name = "OPSD"
    _step: int
    _signature_columns: list[str] | None
    chat_template_kwargs: dict[str, Any]
    eos_token_ids: list[int]
    _tag_names: ClassVar = [*DistillationTrainer._tag_names, "opsd"]

    def __init__(self, *, args: DistillationConfig, processor: ProcessorMixin | None = None, **kwargs: Any) -> None:
        self.processor = processor
        # TRL would build an engine of its own, and its tool loop would reach into it.
        use_vllm, args.use_vllm = args.use_vllm, False
        loading = args.model_init_kwargs
        if isinstance(kwargs.get("model"), str):
            args.model_init_kwargs = {"use_safetensors": True, **(loading or {})}
        self.handed_in: Samples | None = None
        try:
            with _seen_before_peft(self._take_samples):
                super().__init__(teacher_model=None, args=args, **kwargs)
        finally:
            args.use_vllm, args.model_init_kwargs = use_vllm, loading
        if self.handed_in is None and is_peft(self.model):
            self._take_samples(self.model)
        self._check_fsdp()
        if self._dist.is_fsdp:
            leave_outputs(self.accelerator.state.fsdp_plugin)
        if is_split_model(self.model):
            with preserved_rng(self.accelerator.device):
                recompute_buffers(without_peft(self.model))
        self._epochs = EpochCount()
        self.add_callback(self._epochs)
        self._first_turn = False
        self._unwritten_rows: list[int] = []
        self._loss_parts: LossParts | None = None
        self._watchdog = Watchdog(self.args.phase_timeout, self.accelerator.process_index)
        self._clocks = {mode: PhaseClock(self._watched) for mode in ("train", "eval")}
        self._totals: dict[str, dict[str, float]] = {"train": defaultdict(float), "eval": defaultdict(float)}

    # ---- What a subclass fills in -------------------------------------------------------------------------------
    # Trainer's metaclass ignores `abstractmethod`, so these raise.

    def check_rows(self, rows: list[dict[str, Any]]) -> None:
        """Refuses rows of a dataset that cannot be trained on, before anything is generated."""
        raise NotImplementedError

    def check_prompt_ids(self, prompt_ids: list[list[int]]) -> None:
        """Refuses prompts that the student cannot read, before anything is generated."""
        raise NotImplementedError

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Writes one completion for each prompt; token ids in, token ids out."""
        raise NotImplementedError

    def teach(self, rollout: Rollout, rows: list[dict[str, Any]]) -> TeacherTargets:
        """Lets the teacher read a whole generation batch; the dataset rows it came from are aligned with it."""
        raise NotImplementedError

    def weigh(self, rollout: Rollout, rows: list[dict[str, Any]], targets: TeacherTargets) -> Tensor:
        """What each token of a generation batch counts in the loss; by default what it counted, 1 or 0.

        Selection of tokens, discounts and rewards belong here: whatever it returns is honoured by the loss, its
        gradient, its denominator and the logs alike.

        Args:
            rollout ([`~types.Rollout`]):
                The generation batch of this process; a token of weight 0 in it has to stay at 0.
            rows (`list[dict]`):
                Of the dataset, aligned with it.
            targets ([`~types.TeacherTargets`]):
                What the teacher made of it, row-aligned.

        Returns:
            `torch.Tensor`: [B, C], finite and at least 0.
        """
        return rollout.weights

    def compare(
        self, student: Any, rollout: Rollout, targets: TeacherTargets, num_items: Tensor | float | None
    ) -> LossParts:
        """Holds the student against the targets. Runs inside the student wrapper's forward: no collectives in it.

        Args:
            student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
                The student without its distributed wrapper.
            rollout ([`~types.Rollout`]):
                One micro-batch.
            targets ([`~types.TeacherTargets`]):
                Row-aligned with it.
            num_items (`torch.Tensor` or `float`, *optional*):
                Denominator of the loss for the whole optimizer step; `None` means the tokens of this micro-batch.
        """
        raise NotImplementedError

    def check_sums(self, sums: dict[str, float]) -> None:
        """Refuses a loss, before its gradient exists, by its sums over all processes, which are finite."""
        raise NotImplementedError

    def footprint(self, phase: str) -> dict[str, int]:
        """What a phase holds, in bytes by name, for an error of lacking memory."""
        raise NotImplementedError

    # ---- What a subclass may use --------------------------------------------------------------------------------

    def tokenize(self, prompts: list[Any], **chat_template_kwargs: Any) -> list[list[int]]:
        """Token ids of prompts that may not have been checked yet, as the rollout will see them.

        Args:
            prompts (`list`):
                Texts, or lists of messages.
            **chat_template_kwargs (`Any`):
                Arguments of the chat template that differ from those of the config.
        """
        ours = self.chat_template_kwargs
        self.chat_template_kwargs = {**ours, **chat_template_kwargs}
        try:
            prompt_ids, _, _ = super()._tokenize_prompts(prompts)
        finally:
            self.chat_template_kwargs = ours
        return list(prompt_ids)

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        """Left-pads prompts by their length, never by the value of a token, on the accelerator's device."""
        rows = [torch.tensor(ids) for ids in prompt_ids]
        tensors = {
            "input_ids": pad(rows, self._tokenizer.pad_token_id, "left", self.pad_to_multiple_of),
            "attention_mask": pad([torch.ones_like(row) for row in rows], 0, "left", self.pad_to_multiple_of),
        }
        return {name: tensor.to(self.accelerator.device) for name, tensor in tensors.items()}

    def use_special_tokens(self, rows: int) -> None:
        """Takes over what has become of the tokenizer's padding, and only end tokens that the student has a row for."""
        self.eos_token_ids = writable(self.eos_token_ids, rows)
        of_both: dict[str, Any] = {"pad_token_id": self._tokenizer.pad_token_id, "eos_token_id": self.eos_token_ids}
        self.generation_kwargs.update(of_both)
        self.generation_config.update(**of_both)
        self.model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self.model.generation_config.pad_token_id = self._tokenizer.pad_token_id

    def record(self, name: str, value: float) -> None:
        """Adds a number of this process to the next log, which shows the mean; in an evaluation as `eval_<name>`."""
        self._metrics[self._mode][name].append(value)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Bills what runs inside to a phase of training, `time/<name>` in the log, and reports it if it hangs."""
        return self._clocks[self._mode](name)

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Makes parameters that ZeRO-3 has split whole, to be read, for as long as the context lasts. Collective."""
        context: AbstractContextManager[Any] = self._dist.gather_params(parameters)
        return context

    def in_student(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(student, *args)`: in the wrapper's own forward if that has split the student, and then collective.

        Only there do ZeRO-3 and FSDP2 bring the weights. The bare student does without a wrapper where it is whole.
        """
        student = self.accelerator.unwrap_model(self.model_wrapped)
        if not is_split_model(student):
            return function(student, *args)
        announce(student, student.get_output_embeddings().parameters())  # also those of an adapter that is off now
        function = carried(partial(function, student, *args), self.accelerator.device)
        with torch.autocast(self.accelerator.device.type, enabled=False):  # DeepSpeed would warn of it
            return self._forward_redirection(self.model_wrapped, student, function)

    @contextmanager
    def student_for_generation(self) -> Iterator[Any]:
        """The bare student in eval mode, gathered where it was sharded and the arguments allow it.

        Mode, gradient checkpointing and hooks are put back on the way out, also after an exception.
        """
        was_training = self.model.training
        self.model.eval()
        error = None
        try:
            with (
                unwrap_model_for_generation(
                    self.model_wrapped,
                    self.accelerator,
                    gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                    generation_kwargs=self.generation_kwargs,
                    gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
                ) as student,
                torch.no_grad(),
                # Once around all tokens: each weight is then rounded once, and not for each token.
                autocast(self.accelerator),
                self._dist.summon_full_params(self.model_wrapped, recurse=False),
            ):
                try:
                    yield student
                except BaseException as caught:
                    # Kept from TRL's context, which puts nothing back when an exception passes through it.
                    error = caught
            if error is not None:
                raise error
        finally:
            self.model.train(was_training)
            del error  # it leads back to this frame, and would keep tensors alive

    def _take_samples(self, student: Any) -> None:
        self.handed_in = sampled(student)

    def _check_fsdp(self) -> None:
        if self._dist.fsdp_version == 1:
            raise ValueError(
                "The launch has `fsdp_version: 1`, whose weights are in one flat piece that the loss cannot read its "
                "head from: set `fsdp_version: 2` in the accelerate file."
            )
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not self._dist.is_fsdp:
            logger.warning(
                "The launch asks for FSDP, which accelerate starts on accelerators only: nothing is split, this is "
                "plain data parallelism."
            )

    # ---- Where TRL's loop is cut open ---------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self.row_columns)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochSampler(super()._get_train_sampler(dataset), lambda: self._epochs.number)

    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        self.check_prompt_ids(prompt_ids)
        return prompt_ids, images, multimodal_fields

    def _generate(self, prompts: list) -> tuple:
        self._first_turn, self._unwritten_rows = True, []
        return super()._generate(prompts)

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict, has_tool_images: bool = False
    ) -> list[list[int]]:
        with self.phase("complete"):
            completions = self.complete(prompt_ids)
        if self._first_turn:
            # TRL reads the last token of each completion. An empty one travels as a pad token and is masked below.
            self._first_turn = False
            self._unwritten_rows = [row for row, ids in enumerate(completions) if not ids]
            completions = [ids or [self._tokenizer.pad_token_id] for ids in completions]
        return completions

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        wait_for(self.args.ddp_timeout_delta)
        self.check_same_rows(self._mode)
        self.check_rows(inputs)
        text = [{name: value for name, value in row.items() if name not in self.hidden_columns} for row in inputs]
        batch = super()._generate_and_score_completions(text)
        batch["completion_mask"][self._unwritten_rows] = 0
        rollout = Rollout.unpack(batch)
        with self.phase("teach"), autocast(self.accelerator):
            targets = self.teach(rollout, inputs)
        batch.update(targets.pack())
        batch["loss_weights"] = checked_weights(self.weigh(rollout, inputs, targets), rollout)
        batch["num_items_in_batch"] = self.accelerator.gather(batch["loss_weights"].sum()).sum()
        self._totals[self._mode]["generation_batches"] += 1
        return batch

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple:
        # TRL puts this method in the place of the `forward` that accelerate has given autocast.
        with autocast(self.accelerator):
            parts = self.compare(
                unwrapped_student, Rollout.unpack(inputs), TeacherTargets.unpack(inputs), num_items_in_batch
            )
        self._loss_parts = parts
        if self.model.training:
            self._probe.attach(unwrapped_student)
        weight, _, student_entropy, *_ = parts.rows.sum(0)
        return parts.loss, student_entropy, weight

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # No collective may run inside the wrapper's forward, so what this process summed up there is reduced here.
        parts, self._loss_parts = self._loss_parts, None
        assert parts is not None, "_compute_loss leaves its parts behind"
        if self.model.training:
            sums = self.accelerator.reduce(parts.rows.sum(0), "sum")
        else:
            sums = self.each_once(parts.rows).sum(0)
        named = dict(zip(LossParts.ROW_NAMES, sums.tolist(), strict=True))
        if not self.is_finite_loss(named, parts):
            return self.condemn(output)
        self.check_sums(named)
        for name, value in named.items():
            self._totals[self._mode][name] += value
        return output

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with self._clocks["train"]("compare"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.args.gradient_accumulation_steps == 0:
            # Used up: the targets in it must not stay in memory while the student writes again, or is evaluated.
            set_known(self, _buffered_inputs=None)
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._clocks["train"]("save"):
            super()._save_checkpoint(model, trial)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple:
        with self._clocks["eval"]("compare"):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As TRL's, but what an interrupted run left behind is not trained on by the next one."""
        set_known(self, _buffered_inputs=None, _step=0, _current_train_step_time=0.0)
        self._metrics["train"].clear()
        self._start_counting("train")
        with explained("step", partial(self.footprint, "step")):  # what is in no phase is the optimizer's
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As TRL's, but with one seed, nothing drawn from training's randomness, and a loss that weighs tokens."""
        self._metrics["eval"].clear()  # an evaluation that was interrupted has left its own
        self._start_counting("eval")
        with preserved_rng(self.accelerator.device):
            set_seed(self.args.seed, device_specific=True)
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        totals = self._totals["eval"]
        if totals["weight"]:
            output.metrics[f"{metric_key_prefix}_loss"] = totals["divergence"] / totals["weight"]
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        if self._totals[mode]["weight"]:
            prefix = "eval_" if mode == "eval" else ""
            logs.update({prefix + name: value for name, value in self._token_metrics(mode).items()})
            self._start_counting(mode)
        if mode == "train" and "loss" in logs and self._guard.counts:
            logs["nonfinite/skipped_steps"] = self._guard.skipped
        super().log(logs, start_time)

    @contextmanager
    def _watched(self, phase: str) -> Iterator[None]:
        with explained(phase, partial(self.footprint, phase)), self._watchdog(phase):
            yield

    # ---- Bookkeeping --------------------------------------------------------------------------------------------

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _start_counting(self, mode: str) -> None:
        self._totals[mode].clear()
        self._clocks[mode].seconds.clear()

    def _token_metrics(self, mode: str) -> dict[str, float]:
        """Means over tokens by their weight since the last log, in nats; seconds per step (of the whole evaluation)."""
        totals, seconds = self._totals[mode], self._clocks[mode].seconds
        weight = totals["weight"]
        steps = totals["generation_batches"] if mode == "train" else 1
        return {
            "divergence/mean": totals["divergence"] / weight,
            "entropy/student": totals["student_entropy"] / weight,
            "entropy/teacher": totals["teacher_entropy"] / weight,
            **{f"time/{phase}": spent / max(steps, 1) for phase, spent in seconds.items()},
            "tokens_per_second": totals["tokens"] / max(sum(seconds.values()) - seconds.get("save", 0.0), 1e-9),
        }


@contextmanager
def _seen_before_peft(look: Callable[[Any], None]) -> Iterator[None]:
    """Has `look` called with the student that TRL is about to wrap; TRL loads and wraps it in one go."""
    wrap = distillation_trainer.get_peft_model

    def seen(model: Any, *args: Any, **kwargs: Any) -> Any:
        look(model)
        return wrap(model, *args, **kwargs)

    distillation_trainer.get_peft_model = seen
    try:
        yield
    finally:
        distillation_trainer.get_peft_model = wrap
