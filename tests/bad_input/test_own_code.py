"""A model or tokenizer with Python code of its own names the option that allows it: the student's, or the teacher's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny

MODULE = """
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


class MineConfig(Qwen2Config):
    model_type = "mine"


class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
"""
TRUST = {"model": "trust_remote_code", "teacher_model": "teacher_trust_remote_code"}
OTHER = {"model": "teacher_trust_remote_code", "teacher_model": "trust_remote_code"}
ADVICE = "comes with its own Python code.* set `{}=True` in `OPSDConfig`, which applies only to {}"
EXPECTED = {
    "model": ADVICE.format(TRUST["model"], "the student"),
    "teacher_model": ADVICE.format(TRUST["teacher_model"], "teachers"),
}


def own_code(folder: Path) -> str:
    """A model that transformers has no class for."""
    tiny.qwen2(32).save_pretrained(folder)
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    _change(folder / "config.json", model_type="mine", architectures=["MineForCausalLM"], auto_map=classes)
    (folder / "mine.py").write_text(MODULE)
    return str(folder)


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.quick
@pytest.mark.parametrize("role", TRUST)
def test_model_with_code_names_its_option_before_loading(make_trainer, tmp_path, role):
    path = own_code(tmp_path / "mine")
    for others in ({}, {OTHER[role]: True}):
        with pytest.raises(ValueError, match=f"^`{role}='{path}'` {EXPECTED[role]}"):
            make_trainer(**{role: path}, **others)


@pytest.mark.refusal
@pytest.mark.before_loading
def test_one_of_several_teachers_with_code_is_named(make_trainer, tmp_path):
    tiny.qwen2(48, seed=1).save_pretrained(tmp_path / "plain")
    teachers = {"plain": str(tmp_path / "plain"), "mine": own_code(tmp_path / "mine")}
    with pytest.raises(ValueError, match=rf"^`teacher_model\['mine'\]='.*'` {EXPECTED['teacher_model']}"):
        make_trainer(teacher_model=teachers, train_dataset=tiny.rows().add_column("teacher", ["plain", "mine"] * 4))


@pytest.mark.parametrize("role", TRUST)
def test_a_model_with_code_is_loaded_with_its_option(make_trainer, tmp_path, role):
    path = own_code(tmp_path / "mine")
    trainer = make_trainer(**{role: path}, **{TRUST[role]: True})
    assert type(trainer.model if role == "model" else trainer.teacher_model).__name__ == "MineForCausalLM"
    init = {"model": "model_init_kwargs", "teacher_model": "teacher_model_init_kwargs"}[role]
    make_trainer(**{role: path}, **{init: {"trust_remote_code": True}})
