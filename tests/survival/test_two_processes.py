"""Two real processes, one of which breaks: nothing is learned from it, and neither is left waiting."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from pairs import PATIENCE
from printed import DEADLINE, check_one_traceback
from processes import SECONDS, launch, run

HERE = Path(__file__).parent

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("pairs")
    for student in (folder / "student", folder / "fsdp2" / "student"):
        tiny.qwen2(32, seed=0).save_pretrained(student)
    try:
        run(HERE / "pairs.py", folder, seconds=SECONDS)
    except AssertionError as error:
        error.add_note("".join(path.read_text() for path in folder.glob("*.err"))[-3000:])
        raise
    return json.loads((folder / "results.json").read_text()), folder


@pytest.fixture(scope="module")
def zero3(tmp_path_factory) -> tuple[list[dict[str, Any]], Path, str, float]:
    folder = tmp_path_factory.mktemp("zero3")
    tiny.qwen2(32, seed=0).save_pretrained(folder / "student")
    printed = launch("zero3", HERE / "zero3.py", folder, status=1)
    ended = time.time()
    assert (folder / "results.json").exists(), printed[-3000:]
    return json.loads((folder / "results.json").read_text()), folder, printed, ended


def check_raised(each: list[dict[str, Any]], side: str, where: str = " on rank 1") -> None:
    said = {"teacher": "The teacher's logits are", "student": "The student's logits are", "gradient": "gradient is"}
    assert [one["processes"] for one in each] == [2, 2]
    for one in each:
        assert re.search(rf"{said[side]} NaN or infinite in step 2{where}: ", one["error"])
        assert one["steps"] == 1
        assert one["unchanged"]
        assert one["learned_before"]
    seconds = max(one["ended"] for one in each) - each[1]["poisoned"][0]
    print(f"\n{side}: an error in both processes after {seconds:.2f} s")
    assert seconds < DEADLINE


def check_skipped(each: list[dict[str, Any]]) -> None:
    for one in each:
        assert one["error"] == ""
        assert one["steps"] == 3
        assert one["skipped"] == [0, 1, 1]
        assert one["unchanged"]
        assert one["learned_before"]
        assert one["learned_after"]


@pytest.mark.parametrize("launched", ["every nan", "every nan, fsdp2"])
@pytest.mark.parametrize("variant", ["teacher", "student", "gradient", "gradient unclipped"])
def test_a_nan_in_one_process_stops_or_skips_the_step_of_both(pairs, variant, launched):
    returned = pairs[0][launched]["returned"]
    assert all(one["split"] == ("fsdp2" in launched) for one in returned["0"].values())
    side = variant.split()[0]
    where = "" if side == "gradient" and "fsdp2" in launched else " on rank 1"
    check_raised([returned[rank][f"raise {variant}"] for rank in "01"], side, where)
    check_skipped([returned[rank][f"skip {variant}"] for rank in "01"])
    rates = returned["0"][f"skip {variant}"]["rates"]
    assert len(rates) == 3


@pytest.mark.parametrize("phase", ["complete", "teach", "compare", "save"])
def test_a_failed_process_ends_both_and_its_error_is_shown(pairs, phase):
    results, folder = pairs
    printed = (folder / f"{phase}.err").read_text()
    assert results[phase]["first"] == 1, "the agent names the process that failed, not the one that lost its peer"
    assert f"[rank1]: RuntimeError: injected into {phase}" in printed
    check_one_traceback(printed, results[phase]["ended"], first=1)


def test_an_error_in_both_processes_is_printed_once(pairs):
    results, folder = pairs
    printed = (folder / "nan.err").read_text()
    first = results["nan"]["first"]
    what = "NonFiniteError: The teacher's logits are NaN or infinite in step 2 on rank 1"
    assert f"[rank{first}]: trl_opsd.run.errors.{what}" in printed
    check_one_traceback(printed, results["nan"]["ended"], first)


def test_a_process_that_hangs_ends_both_after_the_timeout(pairs):
    results, folder = pairs
    printed = (folder / "hang.err").read_text()
    (began,) = map(float, re.findall(r"^HANGS (.*)$", printed, re.MULTILINE))
    seconds = results["hang"]["ended"] - began
    print(f"\nboth ended {seconds:.2f} s after one of them hung")
    assert PATIENCE <= seconds < PATIENCE + DEADLINE
    assert results["hang"]["first"] == 0, "the one that hangs is ended by the agent, because the other failed"
    check_one_traceback(printed, results["hang"]["ended"], first=0)


def test_the_record_has_each_non_finite_step_of_both_processes(pairs):
    lines = (pairs[1] / "out" / "opsd_nonfinite.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    sides = ["teacher", "student", "gradient", "gradient"]
    assert [(one["side"], one["ranks"], one["step"]) for one in found] == [
        (side, [1], 2) for side in [*sides, *sides, "teacher"]
    ]
    first, second = found[0]["sums"]
    assert (first["tokens"], second["teacher_entropy"]) == (12.0, "nan"), "the other has the longer rows"
    assert isinstance(first["teacher_entropy"], float)
    assert found[2]["sums"] == []


def test_a_nan_stops_or_skips_the_step_of_a_sharded_student(zero3):
    each = zero3[0]
    assert all(one["split"] for one in each[0].values())
    for variant in ("teacher", "student", "gradient", "gradient unclipped"):
        check_raised([one[f"raise {variant}"] for one in each], variant.split()[0])
    check_skipped([one["skip divergence"] for one in each])
    check_skipped([one["skip gradient unclipped"] for one in each])


def test_a_failure_under_accelerate_launch_ends_both_and_is_shown(zero3):
    _, folder, printed, ended = zero3
    assert "[rank1]: RuntimeError: injected into save" in printed
    check_one_traceback(printed, ended, first=1)
    assert "checkpoint-1 was not finished; earlier checkpoints are unchanged." in printed
    assert not list((folder / "out").glob("checkpoint-*"))
    root = printed[printed.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", root)


def test_processes_stop_a_run_that_collapses_at_the_same_step(pairs):
    first, second = pairs[0]["collapse"]["returned"].values()
    assert first == second, "they have the same figures, of all rows"
    assert first["steps"] == 20
