"""Processes that reach servers of different teachers are told, and agree on what all of them can read."""

from __future__ import annotations

import pytest
from served_processes import reach_each
from support import forks, serving


@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
def test_processes_compare_the_answers_of_their_servers(tmp_path):
    path = serving.save_teacher(tmp_path / "untied", seed=1)
    first, second = forks.results("ddp", reach_each, path).values()
    assert first["one teacher"] == second["one teacher"] == "context 101", "the lowest of 101 and 102"
    for case, said in (
        ("another teacher", "256 bytes per token in float32) is"),
        ("another dtype", "128 bytes per token in bfloat16) is different from"),
    ):
        assert f"of process 1 ({second[case].split()[0]}; " in first[case]
        for found in (first, second):
            assert said in found[case]
