"""Two processes that fail before training print their error and end soon; under ZeRO-3 they train."""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import score
import train
from support import forks, tiny
from support.one_traceback import DEADLINE

from trl_opsd import OPSDConfig, OPSDTrainer

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(forks.SECONDS + 60)]
SECONDS = 200
"""Time limit after which a process that still waits prints its stack and ends."""


def trainer(folder: Path, teacher: Any) -> OPSDTrainer:
    words = tiny.tokenizer()
    return OPSDTrainer(tiny.qwen2(32), teacher, tiny.config(folder), train_dataset=tiny.rows(), processing_class=words)


def in_one_process_only(folder: Path) -> None:
    """The other waits for it."""
    if tiny.config(folder).process_index == 1:
        raise RuntimeError("only here")
    trainer(folder, tiny.qwen2(48))
    time.sleep(SECONDS)


FAILURES = {
    "option": (
        lambda folder: OPSDConfig(str(folder), divergence="forward", use_cpu=True),
        "ValueError: `divergence='forward'`",
    ),
    "one process": (in_one_process_only, "RuntimeError: only here"),
    "train.py, model": (lambda folder: train.main(["--dataset_name", str(folder)]), "ValueError: No student: pass"),
}


def failing(name: str, folder: Path) -> None:
    """Ends as a script would, through `sys.excepthook` with a status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the agent, which it was forked from
    sys.argv = [__file__]
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    print(f"\nBEGINS {time.time()}", file=sys.stderr, flush=True)
    try:
        FAILURES[name][0](folder)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_before_training_is_printed_where_it_is_and_ends_both(name, tmp_path):
    found = forks.launched("ddp", failing, name, tmp_path)
    assert found.results is None
    ranks = [re.findall(rf"^\[rank(\d)\]: {start}", found.printed, re.M) for start in ("Traceback", FAILURES[name][1])]
    assert sorted(ranks[0]) == sorted(ranks[1]) == sorted({*ranks[0]})
    began = re.search(r"^BEGINS ([\d.]+)", found.printed, re.M)
    assert found.ended - float(began[1]) < DEADLINE
    if name == "one process":
        assert (found.first, ranks[0]) == (1, ["1"])
    else:
        assert str(found.first) in ranks[0]


def train_arithmetic(folder: Path) -> None:
    options = ["--task", "arithmetic", "--max_steps", "6", "--per_device_train_batch_size", "8"]
    train.main([*options, "--learning_rate", "1e-4", "--output_dir", str(folder)])


def test_zero3_saves_a_model_that_answers_as_in_training(tmp_path):
    found = forks.launched("zero3_cpu", train_arithmetic, tmp_path)
    assert found.results is not None, found.printed[-3000:]
    before, after = re.findall(r"step \d: \d+ of 200 held-out problems right \([\d.]+\)", found.printed)
    assert before == "step 0: 54 of 200 held-out problems right (0.270)"
    assert after == f"step 6: {score.result(score.main(str(tmp_path)))}"
    assert after.partition(":")[2] != before.partition(":")[2], "it has learned"
