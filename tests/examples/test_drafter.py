"""The example of a drafter: how it counts what speculative decoding accepts."""

from __future__ import annotations

import drafter
import pytest
import torch
from support import tiny

PROMPTS = [[5, 6, 7], [9, 8], [4]]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(drafter, "LONGEST", 11)


def pair(apart=0.0):
    """A target, and the same with noise in its weights; without an end token, so that completions have 11 tokens."""
    models = tiny.qwen2(48, seed=1), tiny.qwen2(48, seed=1)
    generator = torch.Generator().manual_seed(0)
    for model, noise in zip(models, (0.0, apart), strict=True):
        model.generation_config.eos_token_id = None
        for weight in model.parameters():
            weight.data.add_(noise * weight.data.std(correction=0) * torch.randn(weight.shape, generator=generator))
    return models


def test_the_target_as_its_own_drafter_is_always_accepted():
    target, same = pair()
    for sample in (False, True):
        found = drafter.decoded(target, same, PROMPTS, sample)
        assert found["tokens"] == 33
        assert found["forwards"] == 3 * 3, "two times four drafts and a token of the target's own, and the last one"
        assert found["accepted"] == sum(len(tested) for _, tested in found["tested"]) == 3 * 8


def test_counts_are_those_of_decoding_step_by_step():
    target, other = pair(apart=0.3)
    found = drafter.decoded(target, other, PROMPTS, sample=False)
    accepted = tested = forwards = 0
    for prompt in PROMPTS:
        ids = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=11)[0].tolist()
        assert found["completions"][tuple(prompt)] == ids[len(prompt) :]
        place = len(prompt)
        while place < len(ids):
            forwards += 1
            for _ in range(min(drafter.DRAFTED, len(ids) - place - 1)):
                draft = other(torch.tensor([ids[:place]])).logits[0, -1].argmax().item()
                tested, place = tested + 1, place + 1
                if draft != ids[place - 1]:
                    place -= 1
                    break
                accepted += 1
            place += 1
    assert 0 < accepted < tested
    assert (found["accepted"], found["forwards"]) == (accepted, forwards)
    assert sum(len(places) for _, places in found["tested"]) == tested


@pytest.mark.long
def test_more_of_a_trained_drafter_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(drafter, "LONGEST", 48)
    found = drafter.main(["--output", str(tmp_path), "--prompts", "30"])
    for name in ("accepted, sampled", "accepted, greedy"):
        assert found["after"][name] > found["before"][name] + 0.1
