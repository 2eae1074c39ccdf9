"""Two processes that fail before training print one error and end soon; under ZeRO-3 they train."""

from __future__ import annotations

import re

import launched_pairs
import pytest
import score
from peft import AutoPeftModelForCausalLM
from support import forks
from support.one_traceback import DEADLINE

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(forks.SECONDS + 60)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """What each pair printed, and how it ended."""
    folder = tmp_path_factory.mktemp("pairs")
    ended = forks.results("alone", launched_pairs.main, folder)[0]
    for each in ended.values():
        each.update({stream: (folder / f"{each['number']}.{stream}").read_text() for stream in ("out", "err")})
    return {"folder": folder, **ended}


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
        ("train.py, model", "ValueError: No student: pass"),
    ],
)
def test_an_error_before_training_is_printed_once(pairs, name, error):
    pair = pairs[name]
    assert len(lines(pair["err"], "Traceback")) == len(lines(pair["err"], error)) == 1
    assert set(pair["statuses"].values()) == {1}
    assert pair["seconds"] < DEADLINE


def test_rank_of_a_single_failure_is_reported(pairs):
    assert pairs["one process"]["statuses"] == {1: 1}


def test_zero3_saves_a_model_that_answers_as_in_training(pairs):
    pair = pairs["train.py, ZeRO-3"]
    assert pair["statuses"] == {}, pair["err"][-3000:]
    before, after = (line for line in pair["out"].splitlines() if "held-out" in line)
    assert before == "step 0: 54 of 200 held-out problems right (0.270)"
    assert after == f"step 6: {score.result(score.main(str(pairs['folder'] / 'whole')))}"
    assert after.partition(":")[2] != before.partition(":")[2], "it has learned"


def test_command_trains_an_adapter_under_zero3(pairs):
    pair = pairs["trl-opsd train, ZeRO-3"]
    assert pair["statuses"] == {}, pair["err"][-3000:]
    for false_alarm in ("None of the inputs have requires_grad", "is deprecated", "accumulation steps mismatch"):
        assert false_alarm not in pair["err"]
    assert "  2, DeepSpeed ZeRO-3" in pair["out"] + pair["err"]
    student = AutoPeftModelForCausalLM.from_pretrained(pairs["folder"] / "adapter")
    adapters = [parameter for name, parameter in student.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(parameter.any() for parameter in adapters)
