"""Two real processes, one of which breaks: nothing is learned from it, and neither is left waiting.

As a script, it fails in a save.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from support import faults, forks, processes, tiny
from support.one_traceback import DEADLINE, check_one_traceback

from trl_opsd.methods.collapse import CollapseGuard

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]
long = pytest.mark.long

SIDES = (("teacher", 1.0), ("student", 1.0), ("gradient", 1.0), ("gradient", 0.0), ("divergence", 1.0))
VARIANTS = {
    f"{policy} {side}{' unclipped' if norm == 0 else ''}": {"side": side, "nonfinite": policy, "max_grad_norm": norm}
    for policy in ("raise", "skip")
    for side, norm in SIDES
    if (policy, side) != ("raise", "divergence")
}
VARIANTS["raise empty"] = {"side": "empty", "weight_decay": 0.1}
PATIENCE = 10
"""Seconds, as `ddp_timeout`, that one process waits for the other."""
SECONDS = 300
"""Time limit after which a process that still waits prints its stack and ends."""


def every_nan(folder):
    """All variants, in one pair of processes."""
    teacher = tiny.qwen2(48, seed=1)  # before there is a DeepSpeed config, so that it stays whole
    return {name: faults.trained_with_nan(folder, teacher, **given) for name, given in VARIANTS.items()}


def collapses(folder):
    """A training at a rate that is far too high, of which each process has other rows."""
    options = {"learning_rate": 1.0, "max_steps": 24, "num_train_epochs": 99}
    trainer = faults.make_trainer(folder, tiny.qwen2(48, seed=1), **options)
    trainer.train()
    return {"steps": trainer.state.global_step, "course": trainer.methods.get(CollapseGuard).state()}


def fails(folder, phase):
    """A training that fails: in a phase, because of a NaN, or because one process hangs."""
    patience = {"ddp_timeout": PATIENCE} if phase == "hang" else {}
    trainer = faults.make_trainer(folder, tiny.qwen2(48, seed=1), save_strategy="steps", save_steps=1, **patience)
    if phase == "nan":
        faults.poison(trainer, "teacher")
    elif phase == "hang":
        faults.hang(trainer)
    else:
        faults.fail_in(trainer, phase)
    trainer.train()


def script(what, folder):
    """Ends as a script would: on SIGTERM, or through `sys.excepthook` with a status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the agent, which it was forked from
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        return {"every nan": every_nan, "collapse": collapses}.get(what, lambda _: fails(folder, what))(folder)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Launches what one process does while the other breaks, once; how that ended, and its folder."""

    @cache
    def launched(what, strategy="ddp"):
        folder = tmp_path_factory.mktemp("pairs")
        tiny.qwen2(32, seed=0).save_pretrained(folder / "student")
        return forks.launched(strategy, script, what, folder), folder

    return launched


def check_raised(each, side):
    said = {"teacher": "The teacher's logits are", "student": "The student's logits are", "gradient": "gradient is"}
    for one in each:
        assert re.search(rf"{said[side]} NaN or infinite in step 2: ", one["error"])
        assert (one["steps"], one["unchanged"], one["learned_before"]) == (1, True, True)
    assert max(one["ended"] for one in each) - each[1]["poisoned"][0] < DEADLINE


def check_skipped(each, broken):
    for one in each:
        assert (one["error"], one["steps"], len(one["rates"])) == ("", 3, 3)
        assert one["skipped"] == ([0, 1, 1] if broken else [None] * 3)
        assert one["losses"] == [True, bool(broken), True]
        assert one["unchanged"]
        assert one["learned_before"]
        assert one["learned_after"]


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero3_cpu", marks=long), pytest.param("fsdp2_cpu", marks=long)]
)
def test_nan_in_one_process_stops_or_skips_step_of_both(launched, strategy):
    found = launched("every nan", strategy)[0]
    assert found.results is not None, found.printed[-3000:]
    for variant in VARIANTS:
        each = [of_rank[variant] for of_rank in found.results.values()]
        assert [(one["processes"], one["split"]) for one in each] == [(2, strategy != "ddp")] * 2
        policy, side, *_ = variant.split()
        if policy == "skip" or side == "empty":
            check_skipped(each, 0 if side == "empty" else 1)
        else:
            check_raised(each, side)


@pytest.mark.parametrize(
    ("phase", "strategy"),
    [
        ("complete", "ddp"),
        ("save", "zero3_cpu"),
        *(pytest.param(phase, "ddp", marks=long) for phase in ("teach", "compare", "save")),
    ],
)
def test_failed_process_ends_both_and_its_error_is_shown(launched, phase, strategy):
    found, folder = launched(phase, strategy)
    assert found.first == 1, "the agent names the process that failed, not the one that lost its peer"
    assert f"[rank1]: RuntimeError: injected into {phase}" in found.printed
    check_one_traceback(found.printed, found.ended, first=1)
    if phase == "save":
        assert not list((folder / "out").glob("checkpoint-*"))


@long
def test_failure_under_accelerate_launch_ends_both_and_is_shown(tmp_path):
    tiny.qwen2(32, seed=0).save_pretrained(tmp_path / "student")
    printed = processes.launch("zero3", Path(__file__), tmp_path, status=1)
    assert "[rank1]: RuntimeError: injected into save" in printed
    check_one_traceback(printed, time.time(), first=1)
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert re.search(r"rank +: 1 ", printed[printed.index("Root Cause") :])


def test_error_in_both_processes_is_printed_once(launched):
    found, _ = launched("nan")
    assert f"[rank{found.first}]: trl_opsd.errors.NonFiniteError: The teacher's logits are NaN" in found.printed
    check_one_traceback(found.printed, found.ended, found.first)


def test_process_that_hangs_ends_both_after_the_timeout(launched):
    found, _ = launched("hang")
    (began,) = map(float, re.findall(r"^HANGS (.*)$", found.printed, re.MULTILINE))
    assert PATIENCE <= found.ended - began < PATIENCE + DEADLINE
    assert found.first == 0, "the one that hangs is ended by the agent, because the other failed"
    check_one_traceback(found.printed, found.ended, first=0)


def test_both_processes_have_the_figures_of_all_rows(launched):
    first, second = launched("collapse")[0].results.values()
    assert first == second
    assert len(first["course"]["first"]) == len(first["course"]["last"]) == 10


if __name__ == "__main__":
    fails(Path(sys.argv[1]), "save")
