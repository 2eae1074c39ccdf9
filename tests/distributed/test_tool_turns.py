"""Two processes whose rows call tools for different numbers of turns write together until the last has answered."""

from __future__ import annotations

from functools import cache

import pytest
import tool_turns
from support import forks
from tool_turns import ANSWER, CALL, CALLS, LAUNCHES

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]
SHORT = ("ddp", "zero3, not gathered")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool_turns")
    tool_turns.save_models(folder)

    @cache
    def launched(name):
        strategy, options = LAUNCHES[name]
        return forks.results(strategy, tool_turns.trained, folder, name, options)[0]

    return launched


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long] + [pytest.mark.vllm] * ("vllm" in name))
        for name in LAUNCHES
    ],
)
def test_process_takes_part_in_tool_turns_of_others(launched, name):
    if "vllm" in name:
        pytest.importorskip("vllm")
    found = launched(name)
    assert found["train"]["turns"] == [[2, 2, 1, 1], [2, 0, 0, 0]], "rows of each turn"
    assert found["evaluate"]["turns"] == [[2, 0, 0], [2, 2, 1]]
    for what, of_each in CALLS.items():
        assert found[what]["learned"] == sorted(CALL * calls + ANSWER for each in of_each for calls in each)
    assert found["calls"] == 4 / 4
    assert found["loss"] == pytest.approx(launched("ddp")["loss"], abs=1e-5)
