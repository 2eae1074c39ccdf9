"""Every example runs from end to end for two steps and writes the files it promises."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import compare
import pytest
import quickstart
import self_distillation
import torch
import two_teachers
from arithmetic import READER, STUDENT
from arithmetic.task import draw
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    code = "import json, quickstart; print(json.dumps(quickstart.main()))"
    given = ["--output", str(folder), "--steps", "2", "--held-out", "16"]
    done = subprocess.run(
        [sys.executable, "-c", code, *given],
        cwd=Path(quickstart.__file__).parent,
        env={name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    *shown, metrics = done.stdout.splitlines()
    return folder, json.loads(metrics), shown


def test_the_quickstart_writes_the_metrics_it_promises(demo):
    folder, metrics, _ = demo
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert set(metrics) == {
        "student_accuracy_before",
        "student_accuracy_after",
        "teacher_accuracy",
        "steps",
        "completion_tokens",
        "train_seconds",
    }
    assert metrics["steps"] == 2
    assert metrics["teacher_accuracy"] > 0.8
    assert 2 * 64 * 8 < metrics["completion_tokens"] < 2 * 64 * 40
    assert metrics["train_seconds"] > 0


def test_the_quickstart_draws_a_picture(demo):
    assert (demo[0] / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_quickstart_model_loads_in_transformers_and_has_learned(demo):
    trained = AutoModelForCausalLM.from_pretrained(demo[0] / "student")
    start = AutoModelForCausalLM.from_pretrained(STUDENT)
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    assert AutoTokenizer.from_pretrained(demo[0] / "student").chat_template


@pytest.mark.long
def test_self_distillation_trains_only_an_adapter_and_it_loads(tmp_path):
    metrics = self_distillation.main(["--output", str(tmp_path), "--steps", "2", "--held-out", "64"])
    assert metrics["teacher_accuracy"] > 0.9 > 0.6 > metrics["student_accuracy_before"]
    base = AutoModelForCausalLM.from_pretrained(READER)
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert any(parameter.any() for name, parameter in adapted.named_parameters() if "lora_B" in name)
    for name, parameter in adapted.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base.get_parameter(name.replace(".base_layer", "")))


@pytest.mark.long
def test_two_teachers_each_know_one_domain_and_teach_one_student(tmp_path):
    table = two_teachers.main(["--output", str(tmp_path), "--steps", "2", "--held-out", "64"])
    assert table["sums"]["sums"] > 0.9 > 0.1 > table["sums"]["differences"]
    assert table["differences"]["differences"] > 0.9 > 0.1 > table["differences"]["sums"]
    assert set(table) == {"sums", "differences", "student before", "student after"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    arguments = ["--output", str(folder), "--steps", "2", "--seeds", "0", "--held-out", "8", "--practice", "2"]
    return folder, arguments, compare.main(arguments)


@pytest.mark.long
def test_the_comparison_runs_every_method_in_every_setting(compared):
    folder, _, results = compared
    every = {(method, setting) for method in compare.METHODS for setting in compare.SETTINGS}
    assert {(one["method"], one["setting"]) for one in results} == every - compare.LEFT_OUT
    assert every > compare.LEFT_OUT
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_methods_of_the_comparison_train_on_about_as_many_tokens(compared):
    tokens = [one["tokens"] for one in compared[2]]
    assert max(tokens) < 1.1 * min(tokens)


def test_training_problems_are_as_many_as_asked_none_held_out():
    many, few = compare.training_problems(None, 640, seed=0), compare.training_problems(50, 640, seed=0)
    assert len(many) == len(few) == 640
    assert (len(set(many)), len(set(few))) == (640, 50)
    assert not set(many + few) & set(draw(2000, held_out=True))
