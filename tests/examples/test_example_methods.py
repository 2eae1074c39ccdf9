"""The methods of `examples/methods`, which `tests/equivalence/test_pairs.py` compares with float64: what is left."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from visits import Visits

SKIPPED = {tiny.PROMPTS[0], tiny.PROMPTS[3]}
EPOCHS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "shuffle_dataset": False,
    "save_strategy": "steps", "save_steps": 3,
}  # fmt: skip
"""Two steps are an epoch."""


class SkipSecond(Visits):
    """Skips two prompts at their second visit."""

    def weight(self, row, last):
        return float(last is None or row["prompt"] not in SKIPPED)


def test_skipped_prompts_cost_nothing_and_a_resume_remembers_them(make_trainer, tmp_path):
    whole, resumed = (make_trainer(**EPOCHS, methods=[SkipSecond()]) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    lengths = dict(zip(tiny.PROMPTS, map(len, tiny.tokenizer()(tiny.ANSWERS)["input_ids"]), strict=True))
    saved = sum(lengths[one] for one in SKIPPED)
    assert tiny.logged(whole, "prompts/skipped") == tiny.logged(resumed, "prompts/skipped") == [0, 0, 0.5, 0]
    assert tiny.logged(resumed, "prompts/tokens_saved_total")[-1] == saved
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))
    tokens = [lengths[one] for one in tiny.PROMPTS[:4] if one not in SKIPPED]
    assert tiny.logged(whole, "completions/mean_length")[2] == pytest.approx(sum(tokens) / len(tokens))
