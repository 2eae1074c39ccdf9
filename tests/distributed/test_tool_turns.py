"""Two processes whose rows call tools for different numbers of turns write together until the last has answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import SECONDS, run
from tool_turns import ANSWER, CALL, CALLS, LAUNCHES

pytestmark = [pytest.mark.distributed, pytest.mark.vllm, pytest.mark.timeout(SECONDS + 60)]
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool_turns")
    run(Path(__file__).parent / "tool_turns.py", folder, seconds=SECONDS)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_process_takes_part_in_the_turns_of_others(results, name):
    found = results[name]
    assert found["train"]["turns"] == [[2, 2, 1, 1], [2, 0, 0, 0]], "rows of each turn"
    assert found["evaluate"]["turns"] == [[2, 0, 0], [2, 2, 1]]
    for what, of_each in CALLS.items():
        assert found[what]["learned"] == sorted(CALL * calls + ANSWER for each in of_each for calls in each)
    assert found["calls"] == 4 / 4
    assert found["loss"] == pytest.approx(results["ddp"]["loss"], abs=1e-5)
