"""Mends what TRL, transformers and accelerate get wrong for this trainer, each with the line or issue that it mends.

Lines are those of trl 1.16, transformers 5.17 and accelerate 1.15. `tests/contract/test_upstream_faults.py` shows each
fault without its fix, and fails once upstream is mended: then the fix goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd._compat.sharding import reshard
from trl_opsd._compat.trl import DistillationTrainer, repeat_iterable_dataset
from trl_opsd._compat.versions import replaced, set_known
from trl_opsd.checkpoints import check_rates
from trl_opsd.config import OPSDConfig
from trl_opsd.data.datasets import WholeStream
from trl_opsd.loop.loader import train_loader
from trl_opsd.loop.overrides import of_package
from trl_opsd.models.checks import check_optimizer

__all__ = ["UpstreamFixes"]

logger = get_logger(__name__)


class UpstreamFixes(DistillationTrainer):
    """TRL's trainer with those faults mended; its overrides stand in the order in which a training calls them.

    A stream of several files is read by rows, each once, however many processes read it: accelerate divides it by files
    (accelerate/data_loader.py:1232), which have unequal lengths, and does not know that TRL repeats its rows.
    """

    args: OPSDConfig
    model: Any
    model_wrapped: Any
    optimizer: Any
    is_deepspeed_enabled: bool
    row_columns: tuple[str, ...]
    _streams: Mapping[str, WholeStream | None] = MappingProxyType({})
    """The streams that are read now to `"train"` and to `"eval"`; `None` for another dataset."""
    _deepspeed_config: dict[str, Any] | None = None
    """DeepSpeed's config before an engine was built; an engine fills in values for its own number of steps."""
    _launch: dict[str, Any] | None = None
    """The launch's state when the trainer was complete."""

    # By the user; the last of our `train`s before transformers'.
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. Under DeepSpeed each training builds an engine, and so an optimizer, of its own."""
        if self.is_deepspeed_enabled:
            self._restore_deepspeed_config()
            # transformers would train on in the engine of an earlier training or evaluation (trainer.py:1679).
            set_known(self, model_wrapped=self.model, deepspeed=None)  # accelerate destroys the engine
        reshard(self.model)  # else accelerate cannot tell which parameters the optimizer has
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            # transformers does so after a training that ended well only (trainer.py:1968).
            set_known(self, is_in_train=False)
            if (handle := getattr(self, "neftune_hook_handle", None)) is not None:
                handle.remove()  # the next training adds its own, and would add the noise twice
            raise

    # Once a training.
    def get_train_dataloader(self) -> DataLoader:
        """Reads the rows of a step once; TRL's reads them again for each call of `training_step`."""
        loader = train_loader(self)
        self._streams = {**self._streams, "train": loader.stream}
        return loader

    # Once for each dataset of an evaluation or a prediction.
    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        args, stream = self.args, None
        # transformers keeps a loader with workers for the next dataset too (trainer.py:925), and its order goes on.
        options: dict[str, Any] = {"dataloader_persistent_workers": False}
        number = args.num_generations_eval or args.num_generations
        if isinstance(dataset, IterableDataset):
            if number > 1:
                dataset = repeat_iterable_dataset(dataset, number)
            stream = dataset = WholeStream(dataset, self.row_columns)
            # Several workers would each read all of it.
            options.update(dataloader_num_workers=0, dataloader_prefetch_factor=None)
            # Else the main process would read for all; `WholeStream` splits the rows itself.
            self.accelerator.dataloader_config.dispatch_batches = False
        elif not len(dataset):
            raise ValueError(f"{description}: the dataset is empty: pass one with rows.")
        elif number > 1:  # the rows themselves: accelerate has to know how many there are, not a sampler alone
            order = range(len(dataset)) if sampler_fn is None else list(sampler_fn(dataset))
            dataset, sampler_fn = dataset.select(np.repeat(order, number)), SequentialSampler
        self._streams = {**self._streams, "eval": stream}
        with replaced(args, **options):  # what transformers builds the loader with
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    # Once a training, when its number of steps is known, and before anything of a checkpoint but weights is loaded.
    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """As transformers': epochs behind the run, and micro-steps of the next; right for streams and finished runs."""
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None:
            return begin
        if self._streams.get("train") is not None and not self.args.ignore_data_skip:
            # transformers counts all steps of a stream as its first pass (huggingface/transformers#33544).
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
            total = round((state.epoch or 0.0) * state.max_steps)  # `epoch` is passes + steps / max_steps
            passes, steps = (0, total) if total == state.global_step else divmod(total, state.max_steps)
            begin = passes, steps * self.args.gradient_accumulation_steps
        # It compares the steps with `max_steps` after a step only (trainer.py:1600), and would train one more.
        if self.state.global_step < max_steps:
            return begin
        logger.warning(f"No steps left: {resume_from_checkpoint} is at step {self.state.global_step} of {max_steps}.")
        return num_train_epochs, 0  # no epoch is left for transformers' loop

    # Once a training, after the optimizer was made and before a checkpoint is loaded into it.
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers', which trains without a word where the rate is 0 or the optimizer has no weight to step."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        check_rates(scheduler, num_training_steps)
        # One that was passed has been checked. Some launchers replace the parameters.
        if not of_package(self.create_optimizer) and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            check_optimizer(self.model, self.optimizer)
        return scheduler

    # For each dataset of an evaluation or a prediction, within a training and apart from one.
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but a later training still wraps the model, and a stream has as many rows as it had."""
        with self._prepared_for_evaluation():
            output = super().evaluation_loop(*args, **kwargs)
        stream = self._streams.get("eval")
        if stream is None:
            return output
        # transformers counts the rows of a process, and keeps those that pad the last batch (trainer.py:2958).
        found = output.predictions
        return output._replace(num_samples=stream.rows, predictions=None if found is None else found[: stream.rows])

    # ---- A trainer that is used again ---------------------------------------------------------------------------

    def remember_launch(self) -> None:
        """Records the launch's state when the trainer is complete: all trainers of a process share it, and every
        `TrainingArguments` resets it (transformers/training_args.py:1840, huggingface/transformers#35702).
        """
        self._launch = dict(AcceleratorState._shared_state)

    def restore_launch(self) -> None:
        """Restores the recorded state, which another config or trainer may have replaced."""
        if self._launch is not None:
            # Cleared, not replaced: every instance has this dict as its `__dict__`.
            AcceleratorState._shared_state.clear()
            AcceleratorState._shared_state.update(self._launch)

    # ---- Streams ------------------------------------------------------------------------------------------------

    def check_same_rows(self, mode: str) -> None:
        """Rejects a stream that gave the processes different rows, before the rows are used. Collective."""
        stream = self._streams.get(mode)
        if stream is None or self.accelerator.num_processes == 1:
            return
        digest = torch.tensor([stream.digest], device=self.accelerator.device)
        if self.accelerator.gather(digest).unique().numel() > 1:
            raise ValueError(
                "The processes got different rows from the stream: pass the same one in all, shuffled with a seed."
            )

    @property
    def distinct_rows(self) -> int | None:
        """How many rows of an evaluation's last batch, over all processes, do not only fill it; `None` for all."""
        state, stream = self.accelerator.gradient_state, self._streams.get("eval")
        if self.model.training or not state.end_of_dataloader:
            return None
        # accelerate does not know the length of a stream; by the last batch, it has ended and its rows are counted.
        number = self.args.eval_batch_size * self.accelerator.num_processes
        left = int(state.remainder if stream is None else stream.rows % number)
        return left if left > 0 else None

    def gather_distinct_rows(self, rows: Tensor) -> Tensor:
        """Gathers one entry per row of a batch, without those that only fill the last of an evaluation. Collective."""
        whole: Tensor = self.accelerator.gather(rows)
        return whole[: self.distinct_rows]

    # ---- An evaluation before a training ------------------------------------------------------------------------

    def _prepared_for_evaluation(self) -> Any:
        """transformers and accelerate wrap a model once (accelerate/accelerator.py:1806), and keep what an evaluation
        has prepared: processes would then train without averaging gradients, DeepSpeed without an optimizer, and
        FSDP2 cannot be prepared for an evaluation at all.
        """
        if self.accelerator._models or self.model_wrapped is not self.model:
            return nullcontext()
        if self.accelerator.distributed_type == DistributedType.NO:
            return nullcontext()  # one process wraps nothing
        if self.is_fsdp_enabled:
            self.create_optimizer()  # holds no states before its first step
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
            return nullcontext()
        if self.is_deepspeed_enabled:
            self._restore_deepspeed_config()
            if self.accelerator.state.deepspeed_plugin.zero_stage == 3:
                return nullcontext()  # an inference engine, until training builds its own
        return self._unwrapped()

    @contextmanager
    def _unwrapped(self) -> Iterator[None]:
        """Prepares nothing: every process has the whole model."""
        self._move_model_to_device(self.model, self.args.device)
        is_deepspeed_enabled, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
        # transformers takes a model that accelerate knows as it is, and prepares nothing.
        self.accelerator._models.append(self.model)
        try:
            yield
        finally:
            self.accelerator._models.remove(self.model)
            self.is_deepspeed_enabled = is_deepspeed_enabled

    def _restore_deepspeed_config(self) -> None:
        # transformers leaves it at 1; accelerate would set it to this, and warn of a mismatch.
        self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        if self._deepspeed_config is None:
            self._deepspeed_config = deepcopy(config)
        config.clear()
        config.update(deepcopy(self._deepspeed_config))
