"""The probe of the sync proof, and which differences it accepts as rounding; the engine is a stub."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import tiny
from support.lone_host import LoneHost

from trl_opsd.data.readers import PromptLimits
from trl_opsd.errors import SyncError
from trl_opsd.rollout.sync_proof import PROMPTED, RELATIVE, WRITTEN, SyncProof
from trl_opsd.types import Completion


class StubEngine:
    """Writes the same ids after every prompt, with the student's log-probabilities shifted by `off` nats."""

    name, block_size = "an engine", 16

    def __init__(self, student):
        self.asked, self._student, self.off = [], student, torch.zeros(1)

    @torch.no_grad()
    def write(self, prompts, options):
        self.asked += [(prompt, given["max_tokens"]) for prompt, given in zip(prompts, options, strict=True)]
        return [self._row(prompt, given["max_tokens"]) for prompt, given in zip(prompts, options, strict=True)]

    def _row(self, prompt, length):
        written = [number * 31 % 259 for number in range(length)]
        ids = torch.tensor([prompt + written])
        scores = self._student(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        scores = (scores + torch.nn.functional.pad(self.off, (0, len(scores) - len(self.off)))).tolist()
        return Completion(
            prompt_ids=prompt, completion_ids=written, prompt_logprobs=scores[:-length], logprobs=scores[-length:]
        )


@pytest.fixture
def proof():
    student = tiny.qwen2(64).requires_grad_(False)
    host = LoneHost(student, PromptLimits(vocabulary=tiny.VOCABULARY, context=256, completion=16))
    return SyncProof(host, StubEngine(student), torch.bfloat16)


PROMPTS = [[5, 6, 7], [], [8, 9]]


def test_the_probe_is_made_of_the_first_prompts(proof):
    """Rounding moves the log-probabilities of arbitrary ids by nats, which would look like a fault."""
    proof.check()
    assert {(len(prompt), length) for prompt, length in proof._engine.asked} == {(1, PROMPTED)}, "what it writes"
    proof._engine.asked.clear()
    for prompts in ([], PROMPTS, [[1, 2]]):
        proof.take_prompts(prompts)
    proof.check()
    text = ([5, 6, 7, 8, 9] * PROMPTED)[:PROMPTED]
    assert proof._engine.asked == [(text, WRITTEN)] * 2, "the first prompts there were"


@pytest.mark.parametrize(
    ("off", "fault"),
    [
        (torch.zeros(1), False),
        (4.84 * torch.nn.functional.one_hot(torch.tensor(7), 70), False),
        (torch.full((79,), 0.1), True),
        (torch.full((60,), 0.1), True),
        (torch.full((20,), 3.0), True),
        (torch.full((1,), torch.nan), True),
    ],
    ids=["nothing", "one token of rounding", "all slightly", "most slightly", "some strongly", "nan"],
)
def test_rounding_passes_the_proof_and_faults_do_not(proof, off, fault):
    proof.take_prompts(PROMPTS)
    scale = float(proof._trainer.model(torch.tensor([[5, 6, 7, 8, 9]])).logits.square().mean().sqrt())
    assert 0.03 < RELATIVE[torch.bfloat16] * scale < 0.05, "nats that rounding explains"
    proof._engine.off = off
    if fault:
        with pytest.raises(SyncError, match="times what rounding in bfloat16 explains"):
            proof.check()
    else:
        assert proof.check() == pytest.approx(float(off.abs().max()), abs=1e-4)


@pytest.mark.parametrize(
    "lacking",
    [{"prompt_logprobs": []}, {"logprobs": []}, {"completion_ids": [1]}, {"prompt_ids": [9] * PROMPTED}],
    ids="".join,
)
def test_an_engine_without_comparable_log_probabilities_is_refused(proof, lacking):
    complete = proof._engine._row
    proof._engine._row = lambda prompt, length: replace(complete(prompt, length), **lacking)
    proof.take_prompts(PROMPTS)
    with pytest.raises(SyncError, match="an engine did not return 16 tokens after a prompt of 64"):
        proof.check()
