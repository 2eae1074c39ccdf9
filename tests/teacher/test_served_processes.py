"""Processes that reach servers of different teachers are told, and agree on what all of them can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import serving

SCRIPT = Path(__file__).with_name("served_processes.py")


@pytest.mark.timeout(300)
def test_processes_compare_what_their_servers_answer(tmp_path):
    path = serving.save_teacher(tmp_path / "untied", seed=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, path]
    places = os.pathsep.join([str(SCRIPT.parent.parent), str(SCRIPT.parent.parent.parent)])
    finished = subprocess.run(
        [*command, tmp_path],
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first["one teacher"] == second["one teacher"] == "context 101", "the lowest of 101 and 102"
    for case, said in (
        ("another teacher", "times their length apart, in float32 and float32"),
        ("another dtype", "in float32 and bfloat16"),
    ):
        for found in (first, second):
            url = found[case].split()[0]
            assert url in found[case][len(url) :], "both addresses are named"
            assert "of process 0 (" in found[case]
            assert "of process 1 (" in found[case]
            assert said in found[case]
