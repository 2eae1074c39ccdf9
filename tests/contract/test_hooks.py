"""The methods of TRL's loop that we override have the signatures we expect, and our overrides are used."""

from __future__ import annotations

import functools

import pytest
import torch
from support import tiny

from trl_opsd import FixedRollout, OPSDTrainer

pytestmark = pytest.mark.quick


class Counting(OPSDTrainer):
    """Records the calls of the verbs."""

    def __init__(self, *args, **kwargs):
        self.calls: list[str] = []
        super().__init__(*args, **kwargs)

    def complete(self, prompt_ids):
        self.calls.append("complete")
        return super().complete(prompt_ids)

    def teach(self, rollout, rows):
        self.calls.append("teach")
        return super().teach(rollout, rows)

    def compare(self, student, rollout, targets, num_items):
        self.calls.append("compare")
        return super().compare(student, rollout, targets, num_items)


def test_rows_are_completed_and_read_once_a_step_and_compared_by_micro_batch(make_trainer, monkeypatch):
    trainer = make_trainer(Counting, gradient_accumulation_steps=4, max_steps=2)
    forward = trainer.teacher.model.base_model.forward

    @functools.wraps(forward)  # keeps the signature, from which the positions are decided
    def counted(**kwargs):
        trainer.calls.append(f"read {len(kwargs['input_ids'])}")
        return forward(**kwargs)

    monkeypatch.setattr(trainer.teacher.model.base_model, "forward", counted)
    trainer.train()
    assert trainer.calls == ["complete", "teach", "read 8", *["compare"] * 4] * 2


def test_an_empty_completion_becomes_a_masked_row(make_trainer):
    answers = tiny.recorded(words := tiny.tokenizer())
    trainer = make_trainer(rollout=FixedRollout({**answers, tuple(words("x")["input_ids"]): []}))
    both = trainer.score([{"prompt": "2+2="}, {"prompt": "x"}])
    assert both.rollout.completion_mask.tolist() == [[1, 1], [0, 0]]
    assert both.rollout.weights.sum() == 2
    alone = trainer.score([{"prompt": "2+2="}])
    loss, expected = (trainer.compute_loss(trainer.model, batch) for batch in (both, alone))
    torch.testing.assert_close(loss, expected)


def test_batch_of_empty_completions_gives_no_loss_or_gradient(make_trainer):
    nothing = {prompt: [] for prompt in tiny.recorded(tiny.tokenizer())}
    trainer = make_trainer(rollout=FixedRollout(nothing), max_steps=1)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert not tiny.logged(trainer, "loss")
    assert all(torch.equal(was, now) for was, now in zip(before, trainer.model.parameters(), strict=True))


def test_a_tensor_count_leaves_a_metric_that_is_saved(make_trainer, tmp_path):
    class Recording(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            self.record("mine", rollout.weights.mean(), rollout.weights.sum())
            return rollout.weights

    trainer = make_trainer(Recording, eval_dataset=tiny.rows(4))
    assert isinstance(trainer.evaluate()["eval_mine"], float)
    trainer.state.save_to_json(str(tmp_path / "state.json"))
