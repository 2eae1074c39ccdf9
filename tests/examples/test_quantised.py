"""The example of a quantised student, from start to end with a model that has learned little."""

from __future__ import annotations

import pytest
import quantised
import torch
from arithmetic import STUDENT
from arithmetic.evaluate import answers
from arithmetic.task import draw
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_way_has_a_line_and_saved_student_is_quantised(tmp_path, capsys):
    options = ["--model", STUDENT, "--steps", "2", "--seeds", "0", "--held_out", "4", "--controls"]
    lines = quantised.main(["--output", str(tmp_path), *options])
    capsys.readouterr()
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["original", "int2, not trained", *quantised.WAYS, *quantised.CONTROLS]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:5]] for line in lines[2:]}
    assert cells["original"][2] == "1.000"
    assert 0 < float(cells["int2, not trained"][1]) != float(cells["on-policy, forward KL"][1])
    words = AutoTokenizer.from_pretrained(STUDENT)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "student" / "quantized")
    weight = served.model.layers[0].mlp.up_proj.weight.dequantize()
    assert all(len(group.unique()) <= 4 for group in weight.view(-1, 32)), "two bits"
    assert torch.isfinite(weight).all()
    assert len(answers(served, words, draw(2, held_out=True))) == 2
    assert quantised.main(["--output", str(tmp_path), *options]) == lines, "results are not measured again"
    assert not capsys.readouterr().out.count("OPSDTrainer")
