"""`trl-opsd doctor --vllm` passes a vLLM that has the student's weights, and fails one that has not got them."""

from __future__ import annotations

import pytest
import torch
from support import tiny

pytest.importorskip("vllm")

from vllm_lab import student

from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd.cli import doctor as checks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("engines_are_shared")]


def examine(model) -> dict:
    words = tiny.tokenizer()
    pair = checks.Pair(model, tiny.qwen2(48, seed=1), words, teacher_tokenizer=words)
    return {one.name: one for one in checks.examine(pair, vllm=True)}


def test_stale_engine_fails_one_check_a_fresh_one_none(tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMEngine, "close", lambda self: None)  # the second has what the first has left
    model = student(tmp_path).eval()
    found = examine(model)
    assert [one for one in found.values() if one.verdict != "ok"] == []
    assert int(found["vLLM rollout"].said.split()[0]) > 3

    with torch.no_grad():  # a hundredth part of each weight, which changes hardly any of its likeliest tokens
        for part in model.parameters():
            part.add_(0.01 * part.std() * torch.randn(part.shape, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(VLLMEngine, "load", lambda self, weights: [None for _ in weights] and None)
    found = examine(model)
    assert [one.name for one in found.values() if one.verdict != "ok"] == ["vLLM rollout"]
    assert "disagree by" in found["vLLM rollout"].said
