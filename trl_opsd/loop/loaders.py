"""Makes transformers' trainer read each row of a dataset once, however many processes read it.

It knows when a dataloader is built, and when it is begun in the middle; what is shared out how, `shares.py` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd.data.shares import WholeStream

__all__ = ["SEAMS", "EachRowOnce"]

SEAMS: dict[str, tuple[str, ...]] = {
    "_get_dataloader": (
        "self",
        "dataset",
        "description",
        "batch_size",
        "sampler_fn",
        "is_training",
        "dataloader_key",
    ),
    "_init_training_state": (
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
}
"""Methods of transformers' trainer that are overridden here, with their parameters; a test holds them against it."""

_ONE_READER = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}


class EachRowOnce(Trainer):
    """A trainer whose processes share out the rows of streams as they share out those of other datasets."""

    row_columns: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._streams: dict[str, WholeStream | None] = {"train": None, "eval": None}
        super().__init__(*args, **kwargs)

    def check_same_rows(self, mode: str) -> None:
        """Refuses a stream that has given another process other rows, before anything is made of them. Collective.

        Raises:
            ValueError: It has.
        """
        stream = self._streams[mode]
        if stream is None or self.accelerator.num_processes == 1:
            return
        digest = torch.tensor([stream.digest], device=self.accelerator.device)
        if self.accelerator.gather(digest).unique().numel() > 1:
            raise ValueError(
                "The processes read different rows from the stream, and each would take its share of something else: "
                "give all processes the same stream. Shuffle it with a seed, and do not split it by process."
            )

    def each_once(self, rows: Tensor) -> Tensor:
        """The rows of an evaluation's batch in all processes, without those repeated to fill the last batch.

        Args:
            rows (`torch.Tensor`):
                One line for each row of this process.
        """
        stream = self._streams["eval"]
        if stream is None:
            gathered: Tensor = self.accelerator.gather_for_metrics(rows)
            return gathered
        # How long a stream is, accelerate is not told; by now it has ended.
        left = stream.rows % (self.args.eval_batch_size * self.accelerator.num_processes)
        is_last = self.accelerator.gradient_state.end_of_dataloader
        whole: Tensor = self.accelerator.gather(rows)
        return whole[:left] if is_last and left else whole

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', which takes a stream for one of no rows."""
        output = super().evaluation_loop(*args, **kwargs)
        stream = self._streams["eval"]
        return output if stream is None else output._replace(num_samples=stream.rows)

    # ---- Building -----------------------------------------------------------------------------------------------

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        stream, options = None, {}
        if isinstance(dataset, IterableDataset):
            stream = dataset = WholeStream(dataset, self.row_columns, self._if_empty(description, is_training))
            options = _ONE_READER  # several would each read the whole of it
            self.accelerator.dataloader_config.dispatch_batches = False
        elif not is_training:
            # A loader that is kept goes on to another order, and is kept for whatever dataset comes next.
            options = {"dataloader_persistent_workers": False}
        self._streams["train" if is_training else "eval"] = stream
        with self._with_options(options):
            loader = super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
            if self.args.dataloader_persistent_workers:
                # Workers are given a seed when they start. One drawn from training's randomness would be drawn once
                # in a whole run, and once more in a resumed one.
                loader.base_dataloader.generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    @contextmanager
    def _with_options(self, options: dict[str, Any]) -> Iterator[None]:
        before = {name: getattr(self.args, name) for name in options}
        for name, value in options.items():
            setattr(self.args, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.args, name, value)

    def _if_empty(self, description: str, is_training: bool) -> str:
        if not is_training:
            return f"{description}: the stream has no rows: give one that has."
        rows, steps = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        processes = self.accelerator.num_processes
        return (
            f"The stream `train_dataset` ended before it filled one generation batch of {rows * processes * steps} = "
            f"{rows} per device x {processes} processes x {steps} accumulation steps: give it more rows, or lower one "
            "of those numbers."
        )

    # ---- Resuming -----------------------------------------------------------------------------------------------

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """As transformers', which takes all steps of a stream for its first pass."""
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or self._streams["train"] is None or self.args.ignore_data_skip:
            return begin
        passes, steps = _position(TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME)))
        return passes, steps * self.args.gradient_accumulation_steps


def _position(state: TrainerState) -> tuple[int, int]:
    """How often a stream had ended, and the optimizer steps since; its epoch is passes + steps / max_steps."""
    total = round((state.epoch or 0.0) * state.max_steps)
    if total == state.global_step:
        return 0, total
    return divmod(total, state.max_steps)
