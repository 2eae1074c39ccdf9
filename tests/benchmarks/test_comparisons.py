"""Comparisons for the notes run from end to end, with a line for each way; two steps say nothing of which is best."""

from __future__ import annotations

import math

import compare
import compare_agents
import drafters
import merging
import pytest
import quantisation
from arithmetic import STUDENT
from experts import make

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_methods_are_compared_on_as_many_tokens_in_every_setting(tmp_path):
    arguments = ["--steps", "2", "--seeds", "0", "--held-out", "8", "--practice", "2"]
    results = compare.main(["--output", str(tmp_path), *arguments])
    every = {(method, setting) for method in compare.METHODS for setting in compare.SETTINGS}
    assert {(one["method"], one["setting"]) for one in results} == every - compare.LEFT_OUT < every
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    tokens = [one["tokens"] for one in results]
    assert max(tokens) < 1.1 * min(tokens)


def test_every_way_to_train_an_agent_has_a_line(tmp_path, capsys):
    few = ["--tokens", "1", "--seconds", "1e-9", "--points", "1", "--held-out", "4", "--seeds", "0"]
    compare_agents.main(["doors", "--output", str(tmp_path), *few])
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n| {name} |") == 4 for name in (*compare_agents.METHODS, *compare_agents.CONTROLS))


def test_every_way_to_merge_experts_has_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "STEPS", dict.fromkeys(make.STEPS, 3))
    monkeypatch.setattr(make, "ROWS", 100)
    merging.main(["--output", str(tmp_path), "--steps", "2", "--seeds", "0", "--held-out", "4", "--controls"])
    names = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert all(any(way in name for name in names) for way in merging.WAYS)


def test_every_way_to_quantise_has_a_line(tmp_path, capsys):
    options = ["--output", str(tmp_path), "--model", STUDENT, "--steps", "2", "--seeds", "0", "--held_out", "4"]
    lines = quantisation.main([*options, "--controls"])
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]] for line in lines[2:]}
    assert [*cells] == ["original", "int2, not trained", *quantisation.WAYS, *quantisation.CONTROLS]
    assert cells["original"][1] == "1.000"
    assert 0 < float(cells["int2, not trained"][1]) != float(cells["on-policy, forward KL"][1])


def test_counted_acceptance_is_what_the_metric_predicts(tmp_path):
    results = drafters.main(["--output", str(tmp_path), "--methods", "negative log acceptance", "--prompts", "150"])
    before, after = (results[name]["0"] for name in ("before", "negative log acceptance"))
    for found in (before, after):
        assert abs(found["off by standard errors"]) < 3
        assert found["metric"] == pytest.approx(found["accepted"], abs=3 / math.sqrt(4 * 150 * 8))
    assert after["metric"] > before["metric"] + 0.1
    assert after["tokens per step"] > before["tokens per step"] + 0.3
