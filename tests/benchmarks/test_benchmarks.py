"""Every benchmark runs on tiny shapes, and those of its results that do not depend on the clock are right."""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import processes
from support.byte_languages import Language, byte_pairs

from trl_opsd.bytes.vocabulary import ByteVocabulary


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs a benchmark as its command line would, and returns what it prints as JSON."""

    def call(name: str, *options: object):
        monkeypatch.setattr(sys, "argv", [name, *map(str, options), "--json"])
        import_module(name).main()
        printed = capfd.readouterr().out
        *_, start = re.finditer(r"^[\[{]$", printed, re.MULTILINE)  # libraries print before it
        return json.loads(printed[start.start() :])

    return call


def test_a_prefix_that_rows_share_is_read_once(run):
    for row in run("shared_prefix", "--layers", 1, "--shared", 300, "--device", "cpu"):
        tokens = row["tokens"]
        assert tokens["first"] < tokens["whole"] - 6 * 300
        assert tokens["later"] == tokens["whole"] - 8 * 300
        assert row["distance"] < 1e-6


def test_products_are_formed_to_choose_tokens_and_of_those_chosen(run):
    sizes = ("--tokens", 40, "--vocab", 320, "--student-width", 32, "--teacher-width", 32, "--layers", 1)
    rows = run("selection", *sizes, "--repeats", 1, "--steps", 1, "--step-repeats", 1, "--device", "cpu")
    for what, products in {"loss, head trained": 4, "loss, head frozen": 3}.items():
        counted = {row["criterion"]: row["flops"] for row in rows if row["what"] == what}
        choosing = {"all tokens": 0.7, "prefix": 0, "random": 0, "teacher_divergence": 2 / products}
        choosing |= dict.fromkeys(("student_entropy", "teacher_confidence", "student_surprise"), 1 / products)
        assert counted == {one: pytest.approx(0.3 + added) for one, added in choosing.items()}
    assert sum(row["what"] == "whole step" for row in rows) == 7


def test_finished_rows_are_not_decoded(run):
    shape = ("--batches", 4, "--tokens", 16, "--prompt-tokens", 4, "--width", 64, "--layers", 1, "--vocab", 128)
    rows = run("rollout", *shape, "--repeats", 1, "--no-vllm", "--no-compiled", "--device", "cpu")
    ragged = {row["engine"]: row["rows_per_token"] for row in rows if row["lengths"] == "ragged"}
    assert ragged["ours"] == 1.0
    assert ragged["trl"] > 1.5


@pytest.mark.parametrize(("tuning", "lengths"), [("full", "even"), ("lora", "ragged")])
def test_whole_steps_are_measured_on_the_same_work_as_trls(tuning, lengths):
    benchmark = import_module("end_to_end")
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
    runs["ours"][0]["losses"][1] += 1e-3
    with pytest.raises(ValueError, match="not the same"):
        benchmark.summed_up(runs, args.tolerance)


@pytest.mark.long
@pytest.mark.distributed
def test_processes_that_share_a_row_keep_half_its_activations():
    script = Path(__file__).parents[2] / "benchmarks" / "shared_rows.py"
    said = processes.run(script, "--tokens", 256, "--width", 32, "--layers", 2, "--json", seconds=200)
    (found,) = json.loads(said[said.rindex("[\n") :])
    assert found["two_processes"] == pytest.approx(found["one_process"] / 2, rel=0.25)


def test_overlapping_step_learns_before_the_last_row_is_written(run, tmp_path):
    sizes = ("--rows", 8, "--at-once", 2, "--rollout", 0.5, "--teach", 0.01, "--learn", 0.01)
    waits, overlaps = run("overlap", *sizes, "--steps", 1, "--repeats", 1, "--picture", tmp_path / "steps.png")
    assert waits["first_backward"] > waits["last_row"]
    assert overlaps["first_backward"] < overlaps["last_row"] < overlaps["end"]
    assert (tmp_path / "steps.png").stat().st_size > 1000


@pytest.mark.long
def test_study_of_objectives_trains_for_its_tokens_and_resumes(monkeypatch, tmp_path):
    benchmark, study, found = import_module("objectives"), tmp_path / "study.jsonl", []
    options = ["--tokens", "2500", "--seeds", "0", "--tasks", "self", "--output", str(study)]
    for objectives in (["jsd"], ["jsd", "forward_kl, clipped at 0.05"]):
        monkeypatch.setattr(sys, "argv", ["objectives", *options, "--objectives", *objectives])
        benchmark.main()
        found.append(benchmark.read(study))
    assert found[1][0] == found[0][0], "trained once"
    assert [one["objective"] for one in found[1]] == ["jsd", "forward_kl, clipped at 0.05"]
    for one in found[1]:
        assert 2500 <= one["tokens"] < 2500 + benchmark.ROWS * benchmark.LONGEST
        assert one["steps"] == len(one["loss"]) > 1


LEAST = {"Gold": 0.1, "GoldShifted": 0.03, "GoldHybrid": 0.05, "GoldBayesian": 0.03, "Overlap": 0.05}
"""Losses of TRL and KDFlow on one language in two tokenizers; by bytes below 1e-4 (`tests/losses/test_bytewise.py`)."""


def test_other_losses_differ_between_models_of_one_language():
    benchmark, language = import_module("cross_tokenizer"), Language.of_sentences()
    student, teacher = (
        ByteVocabulary.of(byte_pairs(size, start=start), "it") for size, start in ((200, 0), (120, 9000))
    )
    texts = random.Random(1).choices(list(language.texts), list(language.texts.values()), k=10)

    def side(vocabulary, text):
        """Logits, labels, ids, and the bytes of each token, after a prompt of one token."""
        ids, logits = language.logits(text, vocabulary)
        ends = torch.tensor([0, *(len(vocabulary.texts[one] or b"") for one in ids)]).cumsum(0).tolist()
        labels, ids = torch.tensor([[-100, *ids]]), torch.tensor([[0, *ids]])
        return torch.cat([logits, logits[-1:]])[None], labels, ids, [[[0, 0], *map(list, pairwise(ends))]]

    def loss_of(name, its, text):
        loss = getattr(benchmark, name)
        trainer = SimpleNamespace(
            processing_class=student.tokenizer,
            readers=SimpleNamespace(tokenizers={"teacher": its.tokenizer}),
            teacher=SimpleNamespace(its=its, _student=student),
            settings=getattr(loss, "settings", {}),
            shifts=getattr(loss, "shifts", False),
        )
        return float(loss.loss(trainer, side(student, text), side(its, text)))

    for name, least in LEAST.items():
        assert statistics.mean(loss_of(name, teacher, text) for text in texts) > least
    assert loss_of("Overlap", student, texts[0]) == pytest.approx(0, abs=1e-6)
