"""A model with Python code of its own is loaded with the option that allows it: the student's, or the teacher's."""

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


def own_code(folder: Path) -> str:
    """A model that transformers has no class for."""
    tiny.qwen2(32).save_pretrained(folder)
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    _change(folder / "config.json", model_type="mine", architectures=["MineForCausalLM"], auto_map=classes)
    (folder / "mine.py").write_text(MODULE)
    return str(folder)


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("role", TRUST)
def test_a_model_with_code_is_loaded_with_its_option(make_trainer, tmp_path, role):
    path = own_code(tmp_path / "mine")
    trainer = make_trainer(**{role: path}, **{TRUST[role]: True})
    assert type(trainer.model if role == "model" else trainer.teacher_model).__name__ == "MineForCausalLM"
    init = {"model": "model_init_kwargs", "teacher_model": "teacher_model_init_kwargs"}[role]
    make_trainer(**{role: path}, **{init: {"trust_remote_code": True}})
