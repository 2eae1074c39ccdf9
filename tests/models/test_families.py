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
        pytest.param("bart", "rollout", "exact", marks=pytest.mark.long),
        ("mamba", "teacher", "exact"),
        ("mamba", "rollout", "exact"),
        ("gemma3n_text", "teacher", "exact"),
        pytest.param("llama4_text", "student", "exact", marks=pytest.mark.long),
        ("deepseek_v4", "rollout", "exact"),
        ("git", "rollout", "exact"),
        pytest.param("rwkv", "rollout", "exact", marks=pytest.mark.long),
        ("recurrent_gemma", "student", "exact"),
        pytest.param("recurrent_gemma", "rollout", "exact", marks=pytest.mark.long),
        pytest.param("xlstm", "rollout", "exact", marks=pytest.mark.long),
        (
            "reformer",
            "student",
            "refused: ValueError: The student (ReformerModelWithLMHead) cannot run on eight tokens",
        ),
        ("bert", "teacher", "refused: ValueError: The teacher (BertLMHeadModel) does not compute its logits as"),
        ("phimoe", "LoRA", "refused: ValueError: The student (PeftModel) cannot run on eight tokens, AttributeError"),
    ],
)
def test_each_family_is_exact_or_refused_with_the_reason(verdict, family, role, expected):
    assert verdict(role, family).startswith(expected)


@pytest.mark.parametrize("family", ["bart", "deepseek_v3", "gemma3n_text", "gpt2", "mamba", "mixtral", "qwen3_moe"])
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


def test_the_table_counts_every_verdict_and_shortens_reasons(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    from families import document

    page = document(
        {
            "sound": {"student": "exact 1e-05", "teacher": "exact 0e+00"},
            "apart": {"student": "exact 1e-05 (rows of the same length together)", "teacher": "exact 0e+00"},
            "odd": {"student": "refused: ValueError: in a second forward pass", "teacher": "WRONG 0.3"},
            "absent": {"student": "not built: ImportError", "teacher": "not built: ImportError"},
        },
        ["student", "teacher"],
    )
    assert "| student | 0 | 2 | 1 |" in page
    assert "| teacher | 1 | 2 | 0 |" in page
    assert "| odd | refused: it draws random numbers while it reads | WRONG 0.3 |" in page
    assert "is not installed: absent." in page
    assert "\nsound.\n" in page
    assert "\napart.\n" in page
