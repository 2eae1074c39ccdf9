"""Loads the rows of a training, each once: those of this process, divided among the calls of `training_step`.

A loader of torch's, which accelerate does not know: it would divide a stream by files, and TRL's reads the rows of a
step again for each of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, final

import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchRows
from transformers.trainer_utils import seed_worker

from trl_opsd.data.datasets import Decoded, WholeStream, has_encoded_images
from trl_opsd.options.rules import batch_in_words

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of this process in an optimizer step, which are a part of those of all processes, in their order."""

    rows: int
    """Of a call of `training_step`."""
    calls: int
    """Of a step."""
    completions: int
    """Rows of a prompt; they are adjacent."""
    processes: int
    process: int

    @property
    def prompts(self) -> int:
        """Of all processes."""
        return self.rows * self.calls * self.processes // self.completions

    def of(self, prompts: Sequence[Any]) -> list[list[Any]]:
        """What each call gets of the prompts of a step."""
        rows = [one for one in prompts for _ in range(self.completions)]
        starts = (self.rows * (self.process * self.calls + call) for call in range(self.calls))
        return [rows[start : start + self.rows] for start in starts]


@final
class Calls:
    """The numbers of the rows of each call, in TRL's order: a permutation of each epoch is drawn from one generator.

    Prompts that do not fill a step are left out.
    """

    def __init__(self, prompts: int, share: Share, seed: int | None) -> None:
        self._prompts, self._share, self._seed, self._epoch = prompts, share, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from which the order follows, also where a run resumes in the middle of it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._prompts // self._share.prompts * self._share.calls

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self._prompts))
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed)
            for _ in range(self._epoch + 1):
                order = torch.randperm(self._prompts, generator=generator).tolist()
        each = self._share.prompts
        for start in range(0, len(order) - each + 1, each):
            yield from self._share.of(order[start : start + each])


@final
class CallsOfStream:
    """The epoch and the number of each call, without end: the stream knows when there are no more rows."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(self._epoch, call)] for call in count())


@final
class StreamRows(TorchRows):
    """The rows of a stream by epoch and call; what a resumed run has behind it is read and dropped."""

    def __init__(self, stream: WholeStream, share: Share, if_short: str) -> None:
        self.stream, self._share, self._if_short = stream, share, if_short
        self._rows: Iterator[Any] = iter(())
        self._epoch, self._read = -1, 0
        self._calls: list[list[Any]] = []

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """The rows of a call; `StopIteration`, which ends the epoch, where the stream does not fill another step."""
        [(epoch, call)] = keys
        step, number = divmod(call, self._share.calls)
        if epoch != self._epoch or step < self._read - 1:
            self.stream.set_epoch(epoch)
            self._rows, self._epoch, self._read = iter(self.stream), epoch, 0
        while self._read <= step:
            prompts = list(islice(self._rows, self._share.prompts))
            if len(prompts) < self._share.prompts:
                if not self._read:
                    raise ValueError(self._if_short)
                raise StopIteration
            self._calls, self._read = self._share.of(prompts), self._read + 1
        return [dict(row) for row in self._calls[number]]


@final
class Loader(DataLoader):
    """torch's, which passes the epoch on."""

    @property
    def stream(self) -> WholeStream | None:
        """The stream that it reads; `None` for a dataset of known length."""
        return getattr(self.dataset, "stream", None)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        calls: Any = self.batch_sampler
        calls.set_epoch(epoch)


def train_loader(host: Any) -> Loader:
    """The loader of a training, of the rows of `train_dataset`."""
    args, dataset = host.args, host.train_dataset
    share = Share(
        rows=args.per_device_train_batch_size,
        calls=args.gradient_accumulation_steps,
        completions=args.num_generations,
        processes=host.accelerator.num_processes,
        process=host.accelerator.process_index,
    )
    if isinstance(dataset, IterableDataset):  # several workers would each read all of it
        dataset = dataset.shuffle(seed=args.seed) if host.shuffle_dataset else dataset
        if_short = (
            f"The stream `train_dataset` ended before filling one generation batch of {batch_in_words(args)}: add "
            "rows, or lower one of those numbers."
        )
        rows = StreamRows(WholeStream(dataset, host.row_columns), share, if_short)
        collate = host._get_collator_with_removed_columns(host.data_collator, description="Training")
        return Loader(rows, batch_sampler=CallsOfStream(), collate_fn=collate)
    dataset = host._remove_unused_columns(dataset, description="Training")
    workers, persist = args.dataloader_num_workers, args.dataloader_persistent_workers
    return Loader(
        Decoded(dataset) if has_encoded_images(dataset) else dataset,
        batch_sampler=Calls(len(dataset), share, args.seed if host.shuffle_dataset else None),
        collate_fn=host.data_collator,
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=persist,
        multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),  # not in transformers 5.10
        prefetch_factor=args.dataloader_prefetch_factor,
        in_order=getattr(args, "dataloader_in_order", True),
        worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
        # Workers are seeded when they start. A seed drawn from training's random state would be drawn once in a whole
        # run, and once more in a resumed one.
        generator=torch.Generator().manual_seed(args.seed) if persist else None,
    )


class NextRows:
    """The rows of the next step. `lost` is called where rows that were read never come: an epoch ended early."""

    def __init__(self, host: OPSDTrainer, lost: Callable[[], None]) -> None:
        self._host, self._lost = host, lost
        self._next_batch: tuple[Iterator[Any], Any] | None = None
        """The epoch iterator, and the calls of the next step that it returned."""

    def batch(self, fetch: Callable[..., Any], epoch_iterator: Iterator[Any], number: int, device: torch.device) -> Any:
        """The `number` calls of a step that `fetch` takes from an iterator; also takes those of the next step."""
        known, self._next_batch = self._next_batch, None
        if known is not None and known[0] is epoch_iterator:
            found = known[1]
            if isinstance(found, Exception):
                raise found
        else:
            self._lost()
            found = fetch(epoch_iterator, number, device)
        if self._host.state.global_step + 1 < self._host.state.max_steps:  # the last step has no next one
            calls = self._host.args.gradient_accumulation_steps
            try:
                following = fetch(epoch_iterator, calls, device)
            except Exception as error:  # of its own step, after this one is saved
                following = error
            self._next_batch = epoch_iterator, following
        return found

    @property
    def rows(self) -> list[Any]:
        """The rows of this process; none after the last step of an epoch."""
        known = None if self._next_batch is None else self._next_batch[1]
        return [] if known is None or isinstance(known, Exception) else list(chain.from_iterable(known[0]))

    def forget(self) -> None:
        """Drops them at the end of a training."""
        self._next_batch = None
