"""Between the student's forward pass and its backward pass the host waits for the device once: to read the sums.

On a GPU each further wait leaves it without work until the host has caught up.
"""

from __future__ import annotations

import tiny
import waits
from datasets import Dataset

from trl_opsd import HFRollout


def test_the_host_waits_once_between_forward_and_backward(make_trainer):
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
    assert waits.of_each_micro_batch(trainer) == [["tolist"]] * 4
