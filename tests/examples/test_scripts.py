"""Every example runs from end to end, most for two steps, and writes the files and reaches the numbers it promises."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import merge_experts
import nbformat
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
from nbclient import NotebookClient
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
def test_script_that_made_the_models_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_models.py", "student", "--steps", "2", "--output", str(tmp_path)])
    make_models.main()
    made, shipped = map(AutoModelForCausalLM.from_pretrained, (tmp_path / "student", STUDENT))
    assert made.num_parameters() == shipped.num_parameters()


@pytest.mark.long
def test_experts_are_made_and_merged_from_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "STEPS", dict.fromkeys(make.STEPS, 3))
    monkeypatch.setattr(make, "ROWS", 100)
    merge_experts.main(["--output", str(tmp_path), "--steps", "2", "--held-out", "4"])
    printed = capsys.readouterr().out
    assert all(f"{name}" in printed for name in (*merge_experts.TASKS, "student after", str(tmp_path / "experts.yaml")))
    assert (tmp_path / "student" / "adapter_config.json").exists()


def test_saved_student_is_quantised_and_answers(tmp_path):
    metrics = quantised.main(["--output", str(tmp_path), "--steps", "2", "--held-out", "16"])
    assert metrics["student_accuracy_before"] < 0.8 < 0.9 < metrics["teacher_accuracy"]
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "student" / "quantized")
    weight = served.model.layers[0].mlp.up_proj.weight.dequantize()
    assert all(len(group.unique()) <= 4 for group in weight.view(-1, 32)), "two bits"
    assert len(answers(served, AutoTokenizer.from_pretrained(STUDENT), draw(2, held_out=True))) == 2


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


@pytest.mark.long
def test_notebook_ends_with_curves_completions_and_a_report(tmp_path):
    """With 20 steps in place of 200, in a folder that holds the task too."""
    examples = Path(quickstart.__file__).parent
    (tmp_path / "arithmetic").symlink_to(examples / "arithmetic")
    notebook = nbformat.read(examples / "opsd_quickstart.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    steps = next(cell for cell in cells if "STEPS = 200" in cell.source)
    steps.source = steps.source.replace("STEPS = 200", "STEPS = 20")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in one.get("data", {}) for one in outputs) == 1
    *_, table, report = (one.data["text/html"] for one in outputs if "text/html" in one.get("data", {}))
    assert all(f"<th>{name}</th>" in table for name in ("prompt", "before", "after", "right"))
    assert table.count("<tr>") == 10
    assert report.startswith("<iframe srcdoc=")
    assert "&lt;!doctype html&gt;" in report.lower()
    assert report.count("eval") > 3, "its completions, token by token"
    printed = "".join(one.text for one in outputs if "text" in one)
    assert "20/20" in printed
    assert "'loss'" not in printed
    assert "IProgress" not in printed
