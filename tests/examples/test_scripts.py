"""Every example runs from end to end, most for two steps, and writes the files and reaches the numbers it promises."""

from __future__ import annotations

import copy
import json

import compare
import merge_experts
import pictures.train
import pytest
import quantised
import quickstart
import self_distillation
import torch
import two_teachers
import two_tokenizers.train
from arithmetic import READER, STUDENT, make_models
from arithmetic.evaluate import answers
from arithmetic.task import draw
from experts import make
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer


def test_the_quickstart_learns_and_writes_what_it_promises(tmp_path):
    metrics = quickstart.main(["--output", str(tmp_path), "--steps", "2", "--held-out", "16"])
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert {"student_accuracy_before", "student_accuracy_after"} < set(metrics)
    assert metrics["steps"] == 2
    assert metrics["teacher_accuracy"] > 0.8
    assert 2 * 64 * 8 < metrics["completion_tokens"] < 2 * 64 * 40
    assert metrics["train_seconds"] > 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    trained, start = map(AutoModelForCausalLM.from_pretrained, (tmp_path / "student", STUDENT))
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "student").chat_template


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


@pytest.mark.long
def test_the_comparison_runs_every_method_in_every_setting_on_as_many_tokens(tmp_path):
    arguments = ["--steps", "2", "--seeds", "0", "--held-out", "8", "--practice", "2"]
    results = compare.main(["--output", str(tmp_path), *arguments])
    every = {(method, setting) for method in compare.METHODS for setting in compare.SETTINGS}
    assert {(one["method"], one["setting"]) for one in results} == every - compare.LEFT_OUT < every
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    tokens = [one["tokens"] for one in results]
    assert max(tokens) < 1.1 * min(tokens)


@pytest.mark.long
def test_script_that_made_the_models_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_models.py", "student", "--steps", "2", "--output", str(tmp_path)])
    make_models.main()
    made, shipped = map(AutoModelForCausalLM.from_pretrained, (tmp_path / "student", STUDENT))
    assert made.num_parameters() == shipped.num_parameters()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_way_to_merge_experts_has_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "STEPS", dict.fromkeys(make.STEPS, 3))
    monkeypatch.setattr(make, "ROWS", 100)
    merge_experts.main(["--output", str(tmp_path), "--steps", "2", "--seeds", "0", "--held_out", "4", "--controls"])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("|")[1].strip() for line in lines[-len(merge_experts.WAYS) - 6 :]]
    assert {"expert of sums", "student before", "average of the weights"} <= set(names)
    assert all(any(way in name for name in names) for way in merge_experts.WAYS)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_way_to_quantise_has_a_line_and_saved_student_is_quantised(tmp_path, capsys):
    options = ["--output", str(tmp_path), "--model", STUDENT, "--steps", "2", "--seeds", "0", "--held_out", "4"]
    lines = quantised.main([*options, "--controls"])
    capsys.readouterr()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]] for line in lines[2:]}
    assert [*cells] == ["original", "int2, not trained", *quantised.WAYS, *quantised.CONTROLS]
    assert cells["original"][1] == "1.000"
    assert 0 < float(cells["int2, not trained"][1]) != float(cells["on-policy, forward KL"][1])
    words = AutoTokenizer.from_pretrained(STUDENT)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "student" / "quantized")
    weight = served.model.layers[0].mlp.up_proj.weight.dequantize()
    assert all(len(group.unique()) <= 4 for group in weight.view(-1, 32)), "two bits"
    assert torch.isfinite(weight).all()
    assert len(answers(served, words, draw(2, held_out=True))) == 2
    assert quantised.main([*options, "--controls"]) == lines, "results are not measured again"
    assert not capsys.readouterr().out.count("OPSDTrainer")


def test_two_steps_on_pictures_teach_only_who_sees_less(tmp_path, capsys):
    few = ["--output", str(tmp_path), "--student-steps", "2", "--steps", "2", "--held-out", "8"]
    crop, same = "student-0", "teacher-same-image-3"
    for options, name in ([], crop), (["--writer", "teacher", "--same-image", "--seed", "3"], same):
        found = pictures.train.main([*few, *options])
        assert json.loads((tmp_path / name / "metrics.json").read_text()) == found
        assert f"crop_after    {found['crop_after']:.3f}\n" in capsys.readouterr().out
        assert AutoProcessor.from_pretrained(tmp_path / name).chat_template
    start, taught, untaught = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name).lm_head.weight for name in ("student", crop, same)
    )
    assert not torch.equal(taught, start)
    assert torch.equal(untaught, start), "and the student that was made at first was loaded again"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_crop_teaches_the_student_to_read_whole_pictures(tmp_path):
    found = pictures.train.main(["--output", str(tmp_path)])
    assert found["whole_before"] < 0.7
    assert found["crop_before"] > 0.95
    assert found["whole_after"] > 0.9
    alone = pictures.train.main(["--output", str(tmp_path), "--same-image", "--steps", "20"])
    assert abs(alone["whole_after"] - alone["whole_before"]) < 0.1


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_teacher_with_another_tokenizer_is_learned_from_byte_by_byte(tmp_path):
    found = two_tokenizers.train.main(["--output", str(tmp_path)])
    assert found["divergence_after"] < 0.5 * found["divergence_before"]
    assert found["right_after"] > found["right_before"] + 0.3
    assert found["nats_per_byte_after"] < found["nats_per_byte_before"]
    assert found["used"] > 0.7
