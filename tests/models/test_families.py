"""One model family of each kind, checked by the tool that checks all: exact, exact because read apart, or refused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.models.checks import whole_checkpoint

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def verdict():
    sys.path.insert(0, str(TOOLS))
    import families

    yield families.verdict
    sys.path.remove(str(TOOLS))


@pytest.mark.parametrize(
    ("family", "role", "expected"),
    [
        ("bart", "student", "exact"),
        ("mamba", "teacher", "exact"),
        ("mamba", "rollout", "exact"),
        ("gemma3n_text", "teacher", "exact"),
        pytest.param("llama4_text", "student", "exact", marks=pytest.mark.long),
        ("deepseek_v4", "rollout", "exact"),
        ("git", "rollout", "exact"),
        ("recurrent_gemma", "student", "exact"),
        (
            "reformer",
            "student",
            "refused: ValueError: The student (ReformerModelWithLMHead) cannot run on eight tokens in training mode",
        ),
        ("bert", "teacher", "refused: ValueError: The teacher (BertLMHeadModel) does not compute its logits as"),
        ("phimoe", "LoRA", "refused: ValueError: The student (PeftModel) cannot run on eight tokens, AttributeError"),
    ],
)
def test_each_family_is_exact_or_refused_with_the_reason(verdict, family, role, expected):
    assert verdict(role, family).startswith(expected)


@pytest.mark.parametrize("family", ["bart", "gemma3n_text", "mamba", "qwen3_moe"])
def test_only_a_checkpoint_that_lacks_weights_is_refused(verdict, family, tmp_path):
    made = importlib.import_module("toys").toy(family, 259)
    made.save_pretrained(tmp_path)
    with whole_checkpoint("model"):
        create_model_from_path(str(tmp_path), device_map=None)
    saved = load_file(tmp_path / "model.safetensors")
    torn = {name: one for name, one in saved.items() if ".3." not in name}  # without the last layer
    save_file(torn, tmp_path / "model.safetensors", {"format": "pt"})
    with whole_checkpoint("model"), pytest.raises(ValueError, match=rf"lacks weights of {type(made).__name__}.*\.3\."):
        create_model_from_path(str(tmp_path), device_map=None)
