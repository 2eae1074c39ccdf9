"""Two real processes read each row of any kind of dataset once, and evaluate to the loss of one process."""

from __future__ import annotations

import faulthandler
import itertools
import os

import pytest
import test_several
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from support import forks, tiny
from test_several import LIMIT, answer, flat

from trl_opsd import HFRollout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]

ROWS = 11
BATCH = 4
"""Rows of an optimizer step, whatever the number of processes: an epoch has two, and leaves three rows out."""
STEPS = 2
"""Optimizer steps of an epoch."""
EPOCHS = 2
SHARDS = {"even": [2, 2, 2, 2, 3], "uneven": [7, 1, 0, 3]}


def row(number):
    return {"prompt": f"{'so ' * (number % 3)}{number}="}


def make_rows(kind):
    """Eleven rows with distinct prompts: "map", "stream", or "even" and "uneven" shards of a stream."""
    rows = [row(number) for number in range(ROWS)]
    if kind == "map":
        return Dataset.from_list(rows)
    if kind == "stream":
        return Dataset.from_list(rows).to_iterable_dataset()
    parts = iter(rows)
    shards = [list(itertools.islice(parts, length)) for length in SHARDS[kind]]
    return IterableDataset.from_generator(_read, gen_kwargs={"shards": shards})


def _read(shards):
    for shard in shards:
        yield from shard


VARIANTS = {"map": 1, "stream": 2, "even": 1, "uneven": 2}
"""Kinds of datasets, and how many micro-batches are a step."""
OPTIONS = ({"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False})


def build(folder, kind, accumulation=1, processes=2, rows=None, **options):
    given = {
        "per_device_train_batch_size": BATCH // processes // accumulation,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": 2,
        "max_steps": STEPS * EPOCHS,
        "num_generations": 1,
        **options,
    }
    rows = make_rows(kind) if rows is None else rows
    return test_several.build(folder, processes, rows=rows, evaluated=make_rows(kind), **given)


def shared(trainer):
    """Prompts read by all processes, a list for each generation batch."""
    taught = [[prompt for prompt, _ in batch] for batch in trainer.taught]
    read, taught = (
        [flat(parts) for parts in zip(*gather_object([one]), strict=True)] for one in (trainer.read, taught)
    )
    trainer.read, trainer.taught = [], []
    assert [sorted(batch) for batch in taught] == [sorted(batch) for batch in read], "processes may exchange them"
    return read


def trained(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    steps = zip(trainer.taught, trainer.read, strict=True)
    moved = sum(len({prompt for prompt, _ in taught} - set(read)) for taught, read in steps)
    return {"moved": sum(gather_object([moved])), "train": shared(trainer)}


def counted(folder, variants, processes):
    """The rows of an evaluation, its loss, and the rows of each step, of each kind."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    found = {}
    for kind, accumulation in variants.items():
        trainer = build(folder, kind, accumulation, processes)
        loss = trainer.evaluate()["eval_loss"]
        found[kind] = {"loss": loss, "eval": flat(shared(trainer)), **trained(trainer)}
    faulthandler.cancel_dump_traceback_later()
    return found


def refused(make):
    """The error raised before the first completion, as for rows that none or both of the processes would read."""
    trainer = None
    try:
        trainer = make()
        trainer.train()
    except ValueError as error:
        return str(error) if trainer is None or not trainer.taught else "too late"
    return "nothing"


def refusals(folder):
    """Errors of two processes that are given different rows, or options that distribute them differently."""
    rank = int(os.environ["RANK"])
    given = {
        "order": {"rows": make_rows("map").shuffle(seed=rank)},
        "split": {"rows": split_dataset_by_node(make_rows("map"), rank, 2)},
        "stream's order": {"rows": make_rows("stream").shuffle(seed=rank)},
        "stream split": {"rows": split_dataset_by_node(make_rows("even"), rank, 2)},
        "seed": {"seed": 42 + rank},
        "rate": {"learning_rate": 1e-4 * (1 + rank)},
    }
    found = {name: refused(lambda one=one: build(folder, "map", **one)) for name, one in given.items()}
    return found | {
        name: refused(lambda option=option: build(folder, "even", accelerator_config=option))
        for option in OPTIONS
        for name in option
    }


def resumed(folder):
    """Runs on a sharded stream: uninterrupted, the same trainer again, and resumed in the second pass."""
    trainer = build(folder, "uneven", 2, save_strategy="steps", save_steps=1)
    first, again = trained(trainer), trained(trainer)
    late = trained(build(folder, "uneven", 2), str(folder / "out" / "checkpoint-3"))
    return {"whole": first["train"], "again": again["train"], "resumed": late["train"]}


def short(folder):
    """Evaluations and predictions of fewer rows than two processes read at once; and overlong rows of a stream, dropped
    in workers.
    """
    trainer = build(folder, "map")
    found = {}
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
    dropping = build(folder, "even", 2, rows=stream, dataloader_num_workers=2, **workers)
    return found | {
        "dropping": trained(dropping)["train"],
        "dropped": gather_object([dropping.dropped_prompts["train_dataset"]]),
    }


def all_of(folder):
    shared = counted(folder, VARIANTS, 2)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    found = {"refused": refusals(folder), "resumed": resumed(folder), "short": short(folder)}
    faulthandler.cancel_dump_traceback_later()
    return found | {"shared": shared}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    tiny.save_pair(folder)
    return folder


@pytest.fixture(scope="module")
def read(folder):
    """What two processes find; and the rows that one reads."""
    found = forks.results("ddp", all_of, folder)[0]
    return {**found, "alone": counted(folder, dict.fromkeys(VARIANTS, 1), 1)}


@pytest.mark.parametrize("kind", VARIANTS)
def test_two_processes_read_each_row_of_one_process_once(read, kind):
    found, alone = read["shared"][kind], read["alone"][kind]
    assert found["train"] == alone["train"], "the rows of each step, in the same order as in one process"
    assert len(found["train"]) == STEPS * EPOCHS
    assert found["moved"] > 0, "a process with more tokens than the other has given it rows"
    first, second = (flat(found["train"][STEPS * epoch : STEPS * (epoch + 1)]) for epoch in range(EPOCHS))
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == ROWS - 3
    assert first != second

    assert set(found["eval"]) == {row(number)["prompt"] for number in range(ROWS)}
    assert len(found["eval"]) == ROWS + 1, "one row fills the last batch"
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert alone["loss"] == pytest.approx(read["alone"]["map"]["loss"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["zero3_cpu", pytest.param("fsdp2_cpu", marks=pytest.mark.long)])
def test_sharded_student_counts_each_row_once(read, folder, strategy):
    found = forks.results(strategy, counted, folder, {"uneven": 2}, 2)[0]["uneven"]
    assert found["loss"] == pytest.approx(read["alone"]["uneven"]["loss"], rel=1e-6)
    assert len(found["eval"]) == ROWS + 1
    assert found["train"] == read["alone"]["uneven"]["train"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("order", "`train_dataset` is '"),
        ("split", "`train_dataset` is '"),
        ("stream's order", "got different rows from the stream"),
        ("stream split", "got different rows from the stream"),
        ("seed", "`seed` is 43 in process 1"),
        ("rate", r"`learning_rate` is 0.0002"),
        *((name, f"`{name}`") for option in OPTIONS for name in option),
    ],
)
def test_processes_with_different_rows_or_options_are_refused(read, what, named):
    assert named in read["refused"][what]


def test_two_processes_resume_sharded_stream_at_same_row(read):
    runs = read["resumed"]
    assert runs["resumed"] == runs["whole"][3:]
    assert runs["again"] == runs["whole"], "a second `train()` begins anew"


def test_evaluation_loss_of_few_rows_equals_that_of_stream(read):
    losses = [[read["short"][f"{kind} {number}"] for number in (1, 2, 4, 5)] for kind in ("map", "even")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len({*losses[0]}) == 4


def test_processes_draw_samples_of_their_own_in_evaluations(read):
    assert len(set(map(tuple, read["short"]["drawn"]))) == 4, "of one prompt"


@pytest.mark.parametrize("kind", ["map", "even"])
def test_two_processes_predict_each_row_once_and_in_order(read, kind):
    written = [answer(number) for number in range(5)]
    longest = max(map(len, written))
    assert read["short"][f"{kind} predicted"] == [ids + [-100] * (longest - len(ids)) for ids in written]


def test_overlong_rows_of_a_stream_are_dropped_and_counted(read):
    short = read["short"]
    assert short["dropped"] == [3 * EPOCHS] * 2, "each process reads the whole stream, in each epoch"
    assert set(flat(short["dropping"])) == {row(number)["prompt"] for number in range(ROWS) if number % 4}
