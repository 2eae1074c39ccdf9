"""What the proof of a sync asks, and which differences it takes for rounding; its engine is told what to say."""

from __future__ import annotations

import pytest
import tiny
import torch
from lone_host import LoneHost

from trl_opsd.data.prompts import PromptLimits
from trl_opsd.rollout.sync_proof import PROMPTED, RELATIVE, WRITTEN, SyncProof
from trl_opsd.run.errors import SyncError
from trl_opsd.types import Completion


class Told:
    """Writes the same ids after every prompt, and says what the student would, but for `off`, in nats."""

    name = "an engine"

    block_size = 16

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
    return SyncProof(host, Told(student), torch.bfloat16, with_adapter=False)


PROMPTS = [[5, 6, 7], [], [8, 9]]


def test_a_probe_that_is_no_text_is_noticed(proof):
    """Rounding moves what a model says about arbitrary ids by nats, which was taken for a fault."""
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
        pytest.param(torch.zeros(1), False, id="nothing"),
        pytest.param(4.84 * torch.nn.functional.one_hot(torch.tensor(7), 70), False, id="one token of rounding"),
        pytest.param(torch.full((79,), 0.1), True, id="all a little"),
        pytest.param(torch.full((60,), 0.1), True, id="most a little"),
        pytest.param(torch.full((20,), 3.0), True, id="some by much"),
        pytest.param(torch.full((1,), torch.nan), True, id="no number"),
    ],
)
def test_rounding_taken_for_a_fault_or_a_fault_for_rounding_is_noticed(proof, off, fault):
    proof.take_prompts(PROMPTS)
    scale = float(proof._trainer.model(torch.tensor([[5, 6, 7, 8, 9]])).logits.square().mean().sqrt())
    assert 0.03 < RELATIVE[torch.bfloat16] * scale < 0.05, "nats that rounding explains"
    proof._engine.off = off
    if not fault:
        assert proof.check() == pytest.approx(float(off.abs().max()), abs=1e-4)
        return
    with pytest.raises(SyncError, match="times what rounding in bfloat16 explains"):
        proof.check()
