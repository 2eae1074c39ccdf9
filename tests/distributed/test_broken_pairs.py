"""Two real processes, one of which breaks: nothing is learned from it, and neither is left waiting."""

from __future__ import annotations

import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import broken_pairs
import pytest
from broken_pairs import PATIENCE, VARIANTS
from support import forks, processes, tiny
from support.one_traceback import DEADLINE, check_one_traceback

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]
long = pytest.mark.long
TRIED = {
    "ddp": tuple(VARIANTS),
    "zero3_cpu": ("raise teacher", "raise gradient", "skip divergence", "skip gradient unclipped", "raise empty"),
    "zero3_cpu, every NaN": tuple(VARIANTS),
    "fsdp2_cpu": tuple(VARIANTS),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Launches what one process does while the other breaks, once; how that ended, and its folder."""

    @cache
    def launched(what: str, strategy: str = "ddp", *given: Any) -> tuple[forks.Launched, Path]:
        folder = tmp_path_factory.mktemp("pairs")
        tiny.qwen2(32, seed=0).save_pretrained(folder / "student")
        return forks.launched(strategy, broken_pairs.script, what, folder, *given), folder

    return launched


def check_raised(each: list[dict[str, Any]], side: str, where: str = " on rank 1") -> None:
    said = {"teacher": "The teacher's logits are", "student": "The student's logits are", "gradient": "gradient is"}
    for one in each:
        assert re.search(rf"{said[side]} NaN or infinite in step 2{where}: ", one["error"])
        assert one["steps"] == 1
        assert one["unchanged"]
        assert one["learned_before"]
    seconds = max(one["ended"] for one in each) - each[1]["poisoned"][0]
    print(f"\n{side}: an error in both processes after {seconds:.2f} s")
    assert seconds < DEADLINE


def check_skipped(each: list[dict[str, Any]], broken: int) -> None:
    for one in each:
        assert one["error"] == ""
        assert one["steps"] == 3
        assert one["skipped"] == ([0, 1, 1] if broken else [None] * 3)
        assert one["losses"] == [True, bool(broken), True]
        assert one["unchanged"]
        assert one["learned_before"]
        assert one["learned_after"]
        assert len(one["rates"]) == 3


@pytest.mark.parametrize(
    "tried",
    ["ddp", *(pytest.param(name, marks=long) for name in TRIED if name != "ddp")],
)
def test_nan_in_one_process_stops_or_skips_step_of_both(launched, tried):
    strategy = tried.partition(",")[0]
    found = launched("every nan", strategy, TRIED[tried])[0]
    assert found.results is not None, found.printed[-3000:]
    for variant in TRIED[tried]:
        each = [of_rank[variant] for of_rank in found.results.values()]
        assert [(one["processes"], one["split"]) for one in each] == [(2, strategy != "ddp")] * 2
        policy, side, *_ = variant.split()
        if policy == "skip" or side == "empty":
            check_skipped(each, 0 if side == "empty" else 1)
        else:
            check_raised(each, side, "" if side == "gradient" and "fsdp2" in strategy else " on rank 1")


@pytest.mark.parametrize(
    ("phase", "strategy"),
    [
        ("complete", "ddp"),
        ("save", "zero3_cpu"),
        pytest.param("teach", "ddp", marks=long),
        pytest.param("compare", "ddp", marks=long),
        pytest.param("save", "ddp", marks=long),
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
    printed = processes.launch("zero3", Path(broken_pairs.__file__), tmp_path, status=1)
    assert "[rank1]: RuntimeError: injected into save" in printed
    check_one_traceback(printed, time.time(), first=1)
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    root = printed[printed.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", root)


def test_error_in_both_processes_is_printed_once(launched):
    found, _ = launched("nan")
    what = "NonFiniteError: The teacher's logits are NaN or infinite in step 2 on rank 1"
    assert f"[rank{found.first}]: trl_opsd.errors.{what}" in found.printed
    check_one_traceback(found.printed, found.ended, found.first)


def test_process_that_hangs_ends_both_after_the_timeout(launched):
    found, _ = launched("hang")
    (began,) = map(float, re.findall(r"^HANGS (.*)$", found.printed, re.MULTILINE))
    seconds = found.ended - began
    print(f"\nboth ended {seconds:.2f} s after one of them hung")
    assert PATIENCE <= seconds < PATIENCE + DEADLINE
    assert found.first == 0, "the one that hangs is ended by the agent, because the other failed"
    check_one_traceback(found.printed, found.ended, first=0)


def test_both_processes_have_the_figures_of_all_rows(launched):
    first, second = launched("collapse")[0].results.values()
    assert first == second
    assert len(first["course"]["first"]) == len(first["course"]["last"]) == 10
