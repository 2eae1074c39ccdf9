"""Every benchmark runs on tiny shapes, and those of its results that do not depend on the clock are right."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support import processes

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs a benchmark as its command line would, and returns what it prints as JSON."""

    def call(name: str, *options: object):
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options), "--json"])
        benchmark = importlib.import_module(name)
        benchmark.main()
        printed = capfd.readouterr().out
        *_, start = re.finditer(r"^[\[{]$", printed, re.MULTILINE)  # libraries print before it
        return json.loads(printed[start.start() :])

    return call


def test_losses_form_logits_once_and_equal_the_oracle(run):
    sizes = ("--tokens", 32, "--vocab", 128, "--student-width", 16, "--teacher-width", 24, "--error-tokens", 8)
    rows = run("loss", *sizes, "--divergences", "jsd", "--repeats", 1, "--device", "cpu")
    ours = {row["head"]: row for row in rows if row["program"] == "streamed"}
    assert len(ours) == 2
    for head, row in ours.items():
        assert row["products"] == ("3S+1T" if head == "trainable" else "2S+1T")
        assert max(row["errors"]) < 1e-5


def test_a_prefix_that_rows_share_is_read_once(run):
    none, stream = run("shared_prefix", "--layers", 1, "--shared", 300, "--device", "cpu")
    for row in (none, stream):
        tokens = row["tokens"]
        assert tokens["first"] < tokens["whole"] - 6 * 300
        assert tokens["later"] == tokens["whole"] - 8 * 300
        assert row["distance"] < 1e-6


def test_products_are_formed_to_choose_tokens_and_of_those_chosen(run):
    sizes = ("--tokens", 40, "--vocab", 320, "--student-width", 32, "--teacher-width", 32, "--layers", 1)
    rows = run("selection", *sizes, "--repeats", 1, "--steps", 1, "--step-repeats", 1, "--device", "cpu")
    for what, products in {"loss, head trained": 4, "loss, head frozen": 3}.items():
        counted = {row["criterion"]: row["flops"] for row in rows if row["what"] == what}
        choosing = {"all tokens": 0.7, "prefix": 0, "random": 0, "student_entropy": 1 / products}
        choosing |= {"teacher_confidence": 1 / products, "student_surprise": 1 / products}
        expected = {**choosing, "teacher_divergence": 2 / products}
        assert counted == {one: pytest.approx(0.3 + added) for one, added in expected.items()}
    assert sum(row["what"] == "whole step" for row in rows) == 7


def test_finished_rows_are_not_decoded(run):
    shape = ("--batches", 4, "--tokens", 16, "--prompt-tokens", 4, "--width", 64, "--layers", 1, "--vocab", 128)
    rows = run("rollout", *shape, "--repeats", 1, "--no-vllm", "--no-compiled", "--device", "cpu")
    ragged = {row["engine"]: row["rows_per_token"] for row in rows if row["lengths"] == "ragged"}
    assert ragged["ours"] == 1.0
    assert ragged["trl"] > 1.5


def test_every_placement_of_the_teacher_gives_the_same_targets(run):
    shape = ("--layers", 4, "--rows", 2, "--length", 8)
    (result,) = run("teacher", *shape, "--repeats", 1, "--device", "cpu")
    assert all(row["equal"] for row in result["placements"].values())
    assert result["placements"]["stream"]["during"] < result["model_bytes"]


def test_a_bf16_step_is_in_bfloat16_in_every_phase(run):
    shape = ("--width", 64, "--layers", 1, "--vocab", 320, "--rows", 2, "--prompt-tokens", 6, "--tokens", 4)
    (found,) = run("bf16", *shape, "--repeats", 1, "--device", "cpu")
    assert found["dtypes"] == {phase: ["bfloat16"] for phase in ("teach", "student", "loss", "backward")}


@pytest.mark.parametrize(("tuning", "lengths"), [("full", "even"), ("lora", "ragged")])
def test_whole_steps_are_measured_on_the_same_work_as_trls(monkeypatch, tuning, lengths):
    monkeypatch.syspath_prepend(FOLDER)
    benchmark = importlib.import_module("end_to_end")
    shape = ("--width", 64, "--layers", 1, "--vocab", 320, "--prompt-tokens", 8, "--tokens", 4, "--steps", 1)
    cut = ("--micro", "2x2", "--divergence", "jsd", "--lengths", lengths, "--tuning", tuning)
    args = benchmark.arguments([*map(str, shape), *cut, "--device", "cpu", "--option", "loss_chunk_tokens=3"])
    (case,) = benchmark.cases(args)
    runs = {side: [benchmark.train(side, case, args)] for side in benchmark.SIDES}
    trl, ours = benchmark.summed_up(runs, args.tolerance)
    for row in (trl, ours):
        if lengths == "even":  # nothing is padded: 8 tokens of a prompt and 4 of a completion
            assert row["student_tokens"] == row["teacher_tokens"] == 1.0
            assert row["loss_tokens"] == pytest.approx(1 / 3)
        else:
            assert 1.0 <= row["student_tokens"] <= trl["student_tokens"] == trl["teacher_tokens"] > 1.1
        phases = [row["processor"][phase] for phase in benchmark.PHASES]
        assert min(phases[1:6]) > 0  # all but what replays, and what is left over
        assert sum(phases) == pytest.approx(row["processor"]["total"])
        assert row["peak"] > 1e8
    assert trl["wall"]["over_trl"] == 1.0
    runs["ours"][0]["losses"][1] += 1e-3
    with pytest.raises(ValueError, match="not the same"):
        benchmark.summed_up(runs, args.tolerance)


def test_options_have_the_types_of_their_defaults_and_summaries_the_ranges(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    common = importlib.import_module("common")
    given = ["--rates", "2", "3", "--no-dense", "--dtype", "bfloat16"]
    asked = common.options("", given, rates=[0.5], dense=True, dtype=torch.float32, tokens=7)
    assert vars(asked) == {"rates": [2.0, 3.0], "dense": False, "dtype": torch.bfloat16, "tokens": 7, "json": False}
    lines = [{"way": way, "right": right} for way, right in (("a", 0.1), ("b", 0.5), ("b", 1.0))]
    table = "| way | right |\n|---|---|\n| b | 0.75 (0.50–1.00) |\n| a | 0.10 |"
    assert common.summary(lines, ["way"], {"right": 2}) == table
    assert common.table([{"a": {"b": 1}, "errors": [1e-7, 2.0]}]).split() == ["errors", "a.b", "1e-07,", "2", "1"]


@pytest.mark.long
@pytest.mark.distributed
def test_processes_that_share_a_row_keep_half_its_activations():
    said = processes.run(
        FOLDER / "shared_rows.py", "--tokens", 256, "--width", 32, "--layers", 2, "--json", seconds=200
    )
    (found,) = json.loads(said[said.rindex("[\n") :])
    assert found["two_processes"] == pytest.approx(found["one_process"] / 2, rel=0.25)


def test_overlapping_step_learns_before_the_last_row_is_written(run, tmp_path):
    sizes = ("--rows", 8, "--at-once", 2, "--rollout", 0.5, "--teach", 0.01, "--learn", 0.01)
    rows = run("overlap", *sizes, "--steps", 1, "--repeats", 1, "--picture", tmp_path / "steps.png")
    waits, overlaps = rows
    assert waits["first_backward"] > waits["last_row"]
    assert overlaps["first_backward"] < overlaps["last_row"] < overlaps["end"]
    assert (tmp_path / "steps.png").stat().st_size > 1000


@pytest.mark.long
def test_study_of_objectives_trains_for_its_tokens_and_resumes(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    study, found = tmp_path / "study.jsonl", []
    options = ["--tokens", "2500", "--seeds", "0", "--tasks", "self", "--output", str(study)]
    benchmark = importlib.import_module("objectives")
    for objectives in (["jsd"], ["jsd", "forward_kl, clipped at 0.05"]):
        monkeypatch.setattr(sys, "argv", ["objectives", *options, "--objectives", *objectives])
        benchmark.main()
        found.append(benchmark.read(study))
    assert found[1][0] == found[0][0], "trained once"
    assert [one["objective"] for one in found[1]] == ["jsd", "forward_kl, clipped at 0.05"]
    for one in found[1]:
        assert 2500 <= one["tokens"] < 2500 + benchmark.ROWS * benchmark.LONGEST
        assert one["steps"] == len(one["loss"]) > 1
    assert min(found[0][0]["loss"]) > 0
    assert capsys.readouterr().out.count("| self | jsd |") == 2
