"""Two processes that fail before training print one error, end soon, and print help once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from printed import DEADLINE
from processes import SECONDS, run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """What each pair printed, and how it ended."""
    folder = tmp_path_factory.mktemp("pairs")
    run(Path(__file__).parent / "pairs_that_fail.py", folder, seconds=SECONDS)
    ended = json.loads((folder / "results.json").read_text())
    for each in ended.values():
        each.update({stream: (folder / f"{each['number']}.{stream}").read_text() for stream in ("out", "err")})
    return ended


def lines(printed, start):
    """The lines of both processes that start so; those of the launcher have a time before them."""
    return [line for line in printed.splitlines() if re.match(rf"(\[rank\d\]: )?{start}", line)]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("option", "ValueError: `divergence='forward'`"),
        ("JSON", "ValueError: `model_init_kwargs='{bad'`"),
        ("teacher", "ValueError: `teacher_model='.*nowhere'` is neither a folder"),
        ("row", "ValueError: The prompt in row 1 of train_dataset is empty"),
        ("own script", "FileNotFoundError: .*nowhere.json"),
        ("one process", "RuntimeError: only here"),
        ("train.py, model", "ValueError: A student model is required"),
    ],
)
def test_an_error_before_training_is_printed_once(pairs, name, error):
    pair = pairs[name]
    assert len(lines(pair["err"], "Traceback")) == len(lines(pair["err"], error)) == 1
    assert set(pair["statuses"].values()) == {1}
    assert pair["seconds"] < DEADLINE


def test_the_process_that_failed_is_named_if_the_other_did_not(pairs):
    assert pairs["one process"]["statuses"] == {"1": 1}


def test_the_command_prints_one_sentence_once(pairs):
    pair = pairs["trl-opsd train"]
    assert len(lines(pair["err"], "trl-opsd train: error: A student model is required")) == 1
    assert lines(pair["err"], r"Traceback|Rank \d ends") == []
    assert set(pair["statuses"].values()) == {2}


def test_a_mistake_on_the_command_line_is_printed_once_and_without_a_traceback(pairs):
    pair = pairs["train.py, option"]
    assert lines(pair["err"], "Traceback") == []
    said = "pairs_that_fail.py: error: unknown option '--learning_rat', did you mean '--learning_rate'?"
    assert lines(pair["err"], "pairs_that_fail.py: ") == [said]
    assert set(pair["statuses"].values()) == {2}


def test_help_is_printed_once_and_is_no_failure(pairs):
    pair = pairs["train.py, help"]
    assert pair["out"].count("usage: ") == 1
    assert pair["out"].count("--teacher_dtype {auto,bfloat16,float16,float32}") == 1
    assert "[--config FILE]" in pair["out"]
    assert pair["statuses"] == {}
