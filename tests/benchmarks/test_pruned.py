"""The comparison of pruned students, from start to end, of a model that is right at first and two steps."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from arithmetic import TEACHER


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_student_has_a_line_and_is_trained_once(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    benchmark = importlib.import_module("pruned")
    asked = ["sums", "--model", TEACHER, "--output", str(tmp_path), "--steps", "2", "--held_out", "16", "--drop", "1"]
    benchmark.main(asked)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    names = [f"{choice}, {way}" for choice, ways in benchmark.PLAN.items() for way in ways]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == names
    cells = [[float(cell) for cell in line.strip("| ").split(" | ")[1:]] for line in lines]
    right, *divergences = cells[0][:3]
    assert 0 < right < 1, "a layer is missing"
    assert all(0.01 < one < 1 for one in divergences)
    monkeypatch.setattr(benchmark, "run", None)
    benchmark.main(asked)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:] == lines
