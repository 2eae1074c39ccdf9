"""Two real processes read each row of any kind of dataset once, and evaluate to the loss of one process."""

from __future__ import annotations

from typing import Any

import pytest
import row_counts
from row_counts import EPOCHS, KINDS, ROWS, SHARED, SHORT, STEPS, Variant
from support import forks, tiny

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]
each_variant = pytest.mark.parametrize(
    "variant",
    [variant if variant in SHORT else pytest.param(variant, marks=pytest.mark.long) for variant in SHARED],
    ids=lambda variant: variant.name,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    tiny.save_pair(folder)
    return folder


@pytest.fixture(scope="module")
def read(folder) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows that two processes read, and those that one reads."""
    found = forks.results("ddp", row_counts.in_time, row_counts.short_run, folder)[0]
    return found, {kind: row_counts.counted(folder, Variant(kind), 1) for kind in KINDS}


def counted(folder, strategy: str, variant: Variant) -> dict[str, Any]:
    """The rows that two processes of their own read of one variant."""
    return forks.results(strategy, row_counts.in_time, row_counts.counted, folder, variant, 2)[0]


@each_variant
def test_two_processes_read_each_row_of_one_process_once(read, folder, variant):
    found, alone = read[0]["shared"].get(variant.name) or counted(folder, "ddp", variant), read[1][variant.kind]
    assert "error" not in found, found
    assert found["train"] == alone["train"], "the rows of each step, in the same order as in one process"
    assert len(found["train"]) == STEPS * EPOCHS
    assert found["moved"] > 0, "a process with more tokens than the other has given it rows"
    first, second = row_counts.epochs(found)
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == ROWS - 3
    assert first != second

    assert set(found["eval"]) == {row_counts.row(number)["prompt"] for number in range(ROWS)}
    assert len(found["eval"]) == ROWS + 1, "one row fills the last batch"
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert alone["loss"] == pytest.approx(read[1]["map"]["loss"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["zero3_cpu", pytest.param("fsdp2_cpu", marks=pytest.mark.long)])
def test_sharded_student_counts_each_row_once(read, folder, strategy):
    found = counted(folder, strategy, Variant("uneven", 2))
    assert "error" not in found, found
    assert found["loss"] == pytest.approx(read[1]["uneven"]["loss"], rel=1e-6)
    assert len(found["eval"]) == ROWS + 1
    assert found["train"] == read[1]["uneven"]["train"]


@pytest.mark.parametrize("what", ["order", "split", "stream's order", "stream split"])
def test_processes_with_different_rows_are_refused(read, what):
    said = "got different rows from the stream" if "stream" in what else "differs between process 1"
    assert said in read[0]["refused"][what]
    assert "shuffle" in read[0]["refused"][what].lower()


@pytest.mark.parametrize(
    ("what", "said"), [("seed", "`seed` is 43 in process 1"), ("rate", "`learning_rate` is 0.0002")]
)
def test_processes_with_different_options_are_refused(read, what, said):
    assert said in read[0]["refused"][what]
    assert "all processes train one student" in read[0]["refused"][what]


@pytest.mark.parametrize("option", row_counts.OPTIONS, ids=str)
def test_options_that_distribute_rows_differently_are_refused(read, option):
    (name,) = option
    assert f"`{name}`" in read[0]["refused"][str(option)]


def test_two_processes_resume_sharded_stream_at_same_row(read):
    runs = read[0]["resumed"]
    assert runs["resumed"] == runs["whole"][3:]
    assert runs["again"] == runs["whole"], "a second `train()` begins anew"


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_evaluation_loss_of_few_rows_equals_that_of_stream(read, number):
    losses = read[0]["short"]
    assert losses[f"map {number}"] == pytest.approx(losses[f"even {number}"], rel=1e-6)
    assert len({losses[f"map {number}"] for number in (1, 2, 4, 5)}) == 4


def test_processes_draw_samples_of_their_own_in_evaluations(read):
    assert len(set(map(tuple, read[0]["short"]["drawn"]))) == 4, "of one prompt"


@pytest.mark.parametrize("kind", ["map", "even"])
def test_two_processes_predict_each_row_once_and_in_order(read, kind):
    prompts = tiny.tokenizer()([row_counts.row(number)["prompt"] for number in range(5)])["input_ids"]
    written = row_counts.Unequal().complete(prompts, 0)
    longest = max(map(len, written))
    assert read[0]["short"][f"{kind} predicted"] == [ids + [-100] * (longest - len(ids)) for ids in written]


def test_overlong_rows_of_a_stream_are_dropped_and_counted(read):
    short = read[0]["short"]
    assert short["dropped"] == [3 * EPOCHS] * 2, "each process reads the whole stream, in each epoch"
    assert {prompt for step in short["dropping"] for prompt in step} == {
        row_counts.row(number)["prompt"] for number in range(ROWS) if number % 4
    }
