"""Counts which process reads which row of a dataset, in training and in evaluation.

    PYTHONPATH=tests python tests/distributed/row_counts.py FOLDER --all

Counts in pairs of processes and prints a table: each kind of dataset, or with `--all` every combination.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from support import fsdp_on_cpu, tiny
from transformers import PrinterCallback

from trl_opsd import HFRollout, OPSDTrainer, RolloutBackend

ROWS = 11
BATCH = 4
"""Rows of an optimizer step, whatever the number of processes: an epoch has two, and leaves three rows out."""
STEPS = 2
"""Optimizer steps of an epoch."""
EPOCHS = 2
SECONDS = 300
"""Time limit after which processes that wait for each other are ended."""
SHARDS = {"even": [2, 2, 2, 2, 3], "uneven": [7, 1, 0, 3]}


def row(number: int) -> dict[str, str]:
    return {"prompt": f"{'so ' * (number % 3)}{number}="}


def make_rows(kind: str) -> Dataset | IterableDataset:
    """Eleven rows with distinct prompts: "map", "stream", or "even" and "uneven" shards of a stream."""
    rows = [row(number) for number in range(ROWS)]
    if kind == "map":
        return Dataset.from_list(rows)
    if kind == "stream":
        return Dataset.from_list(rows).to_iterable_dataset()
    parts = iter(rows)
    shards = [list(itertools.islice(parts, length)) for length in SHARDS[kind]]
    return IterableDataset.from_generator(_read, gen_kwargs={"shards": shards})


def _read(shards: list[list[dict[str, str]]]) -> Iterator[dict[str, str]]:
    for shard in shards:
        yield from shard


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to distribute rows."""

    kind: str
    accumulation: int = 1
    workers: int = 0
    accelerator: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.accelerator.items())
        return f"{self.kind}, accumulation {self.accumulation}, workers {self.workers}{options}"


class Unequal(RolloutBackend):
    """Completions whose length depends on the prompt, so that a mean over tokens shows which rows were counted."""

    def bind(self, trainer: OPSDTrainer) -> None:
        pass

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        return [[5 + sum(ids) % 200] * (1 + sum(ids) % 5) for ids in prompt_ids]


class Counting(OPSDTrainer):
    """Records the prompts that this process reads in each generation batch, and those that it trains on."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if inputs:  # those of a step come in its last call
            self.read.append([row["prompt"] for row in inputs])
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.read.append([row["prompt"] for row in inputs])
        return super().prediction_step(model, inputs, *more, **options)

    def teach(self, rollout: Any, rows: list[dict[str, Any]]) -> Any:
        self.taught.append([row["prompt"] for row in rows])
        return super().teach(rollout, rows)


def build(
    folder: Path, variant: Variant, processes: int, rows: Any = None, of: type[Counting] = Counting, **options: Any
) -> Counting:
    given = {
        "per_device_train_batch_size": BATCH // processes // variant.accumulation,
        "gradient_accumulation_steps": variant.accumulation,
        "per_device_eval_batch_size": 2,
        "max_steps": STEPS * EPOCHS,
        "dataloader_num_workers": variant.workers,
        "accelerator_config": dict(variant.accelerator),
        **options,
    }
    args = tiny.config(folder / "out", **given)
    fsdp_on_cpu.allow()
    trainer = of(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=args,
        train_dataset=make_rows(variant.kind) if rows is None else rows,
        eval_dataset=make_rows(variant.kind),
        processing_class=tiny.tokenizer(),
        rollout=Unequal(),
    )
    trainer.read, trainer.taught = [], []
    return trainer


def flat(lists: Iterable[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(lists))


def epochs(found: dict[str, Any]) -> list[list[str]]:
    """The rows of each epoch of a training."""
    return [flat(found["train"][STEPS * epoch : STEPS * (epoch + 1)]) for epoch in range(EPOCHS)]


def shared(trainer: Counting) -> list[list[str]]:
    """Prompts read by all processes, a list for each generation batch."""
    read, taught = (
        [flat(parts) for parts in zip(*gather_object([one]), strict=True)] for one in (trainer.read, trainer.taught)
    )
    trainer.read, trainer.taught = [], []
    assert [sorted(batch) for batch in taught] == [sorted(batch) for batch in read], "processes may exchange them"
    return read


def evaluated(trainer: Counting) -> dict[str, Any]:
    return {"loss": trainer.evaluate()["eval_loss"], "eval": flat(shared(trainer))}


def trained(trainer: Counting) -> dict[str, Any]:
    trainer.train()
    moved = sum(len(set(taught) - set(read)) for taught, read in zip(trainer.taught, trainer.read, strict=True))
    return {"moved": sum(gather_object([moved])), "train": shared(trainer)}


def counted(folder: Path, variant: Variant, processes: int, what: Sequence[str] = ("eval", "train")) -> dict[str, Any]:
    """The rows of each step and of an evaluation, and its loss; or the error."""
    try:
        trainer = build(folder, variant, processes)
        trainer.remove_callback(PrinterCallback)
        found: dict[str, Any] = {}
        for part in what:
            found |= {"eval": evaluated, "train": trained}[part](trainer)
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def count_all(folder: Path, variants: list[Variant], processes: int, *what: Any) -> dict[str, Any]:
    return {variant.name: counted(folder, variant, processes, *what) for variant in variants}


def in_time(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function under a time limit, after which the process prints its stack and ends."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    found = function(*args)
    faulthandler.cancel_dump_traceback_later()
    return found


def refused(make: Callable[[], Counting]) -> str:
    """The error raised before the first completion, as for rows that none or both of the processes would read."""
    trainer = None
    try:
        trainer = make()
        trainer.train()
    except ValueError as error:
        return str(error) if trainer is None or not trainer.taught else "too late"
    return "nothing"


def refusals(folder: Path) -> dict[str, str]:
    """Errors of two processes that are given different rows, or options that distribute them differently."""
    rank = int(os.environ["RANK"])
    given = {
        "order": make_rows("map").shuffle(seed=rank),
        "split": split_dataset_by_node(make_rows("map"), rank, 2),
        "stream's order": make_rows("stream").shuffle(seed=rank),
        "stream split": split_dataset_by_node(make_rows("even"), rank, 2),
    }
    variants = {str(option): Variant("even", accelerator=option) for option in OPTIONS}
    return {
        **{
            name: refused(lambda rows=rows: build(folder, Variant("map"), 2, rows=rows)) for name, rows in given.items()
        },
        **{name: refused(lambda variant=variant: build(folder, variant, 2)) for name, variant in variants.items()},
        "seed": refused(lambda: build(folder, Variant("map"), 2, seed=42 + rank)),
        "rate": refused(lambda: build(folder, Variant("map"), 2, learning_rate=1e-4 * (1 + rank))),
    }


def resumed(folder: Path) -> dict[str, Any]:
    """Runs on a sharded stream: uninterrupted, the same trainer again, and resumed in the second pass."""
    variant, saves = Variant("uneven", 2), {"save_strategy": "steps", "save_steps": 1}
    trainer = build(folder, variant, 2, **saves)
    first, again = trained(trainer), trained(trainer)
    trainer = build(folder, variant, 2)
    trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3"))
    return {"whole": first["train"], "again": again["train"], "resumed": shared(trainer)}


def short(folder: Path) -> dict[str, Any]:
    """Evaluations and predictions of fewer rows than two processes read at once; and overlong rows of a stream, dropped
    in workers.
    """
    trainer = build(folder, Variant("map"), 2)
    found: dict[str, Any] = {}
    for kind, number in itertools.product(("map", "even"), (1, 2, 4, 5)):
        rows = make_rows("map").select(range(number))
        rows = rows if kind == "map" else rows.to_iterable_dataset(num_shards=min(3, number))
        found[f"{kind} {number}"] = trainer.evaluate(rows)["eval_loss"]
        if number == 5:
            found[f"{kind} predicted"] = trainer.predict(rows).predictions.tolist()
    trainer.rollout = HFRollout()
    found["drawn"] = trainer.predict(Dataset.from_list([row(1)] * 4)).predictions.tolist()
    long = [row(number) if number % 4 else {"prompt": "x" * 300} for number in range(ROWS)]
    workers = {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2, "overlong_prompts": "drop"}
    stream = Dataset.from_list(long).to_iterable_dataset(num_shards=4)
    dropping = build(folder, Variant("even", 2, workers=2), 2, rows=stream, **workers)
    return found | {
        "dropping": trained(dropping)["train"],
        "dropped": gather_object([dropping.dropped_prompts["train_dataset"]]),
    }


def short_run(folder: Path) -> dict[str, Any]:
    return {
        "shared": count_all(folder, SHORT, 2),
        "refused": refusals(folder),
        "resumed": resumed(folder),
        "short": short(folder),
    }


KINDS = ("map", "stream", "even", "uneven")
SHARED = [Variant(kind, accumulation) for kind in KINDS for accumulation in (1, 2)]
SHORT = [Variant(kind, accumulation) for kind, accumulation in zip(KINDS, (1, 2, 1, 2), strict=True)]
OPTIONS = ({"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False})
