"""Between the student's forward pass and its backward pass the host waits for the device once a step: to read the sums.

On a GPU each further wait leaves it without work until the host has caught up.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
from datasets import Dataset
from support import device_waits, tiny

from trl_opsd import HFRollout, OPSDTrainer


def test_the_host_waits_once_per_step_between_forward_and_backward(make_trainer):
    rows = Dataset.from_list([{"prompt": "2+2=", "teacher": name} for name in ("a", "b")] * 4)
    trainer = make_trainer(
        teacher_model={"a": tiny.qwen2(48, seed=2), "b": tiny.qwen2(32, seed=3)},
        train_dataset=rows,
        rollout=HFRollout(),
        max_completion_length=6,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        token_selection="teacher_divergence",  # whose path is the longest
        token_fraction=0.5,
    )
    assert device_waits.of_each_micro_batch(trainer) == [[], ["tolist"]] * 2


def test_unchanged_weights_are_copied_to_host_once_per_step(make_trainer):
    """To copy them in each micro-batch waits for the backward pass of the one before it."""

    class Changed(OPSDTrainer):
        change, copied, weights = staticmethod(lambda rollout: rollout), 0, ()

        def compare(self, student, rollout, *others):
            to_host = torch.Tensor.cpu

            def noted(tensor):
                self.copied += tensor.dtype == torch.float32
                return to_host(tensor)

            with patch.object(torch.Tensor, "cpu", noted):
                parts = super().compare(student, self.change(rollout), *others)
            self.weights = (*self.weights, float(parts.rows[:, 0].sum()))
            return parts

    def in_place(rollout):
        rollout.weights.mul_(0.5)
        return rollout

    found = {}
    for change in (lambda rollout: rollout, in_place, lambda rollout: replace(rollout, weights=rollout.weights / 2)):
        trainer = make_trainer(Changed, max_steps=1, gradient_accumulation_steps=4)
        trainer.change = change
        trainer.train()
        found[change] = trainer.copied, trainer.weights
    (dealt, weights), *changed = found.values()
    assert (dealt, len(weights)) == (0, 4)
    assert changed == [(4, tuple(weight / 2 for weight in weights))] * 2
