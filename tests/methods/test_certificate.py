"""Certificates: KL(teacher‖student) and agreement of an evaluation, and of which rows they are measured."""

from __future__ import annotations

import faulthandler
from typing import Any

import pytest
import torch
from support import forks, tiny

from trl_opsd import FixedRollout, OPSDTrainer

WORDS = tiny.tokenizer()


def trainer_of(folder: Any, **given: Any) -> Any:
    rows = tiny.rows(8)
    return OPSDTrainer(
        model=tiny.qwen2(32, seed=0),
        teacher_model=tiny.qwen2(48, seed=1),
        args=tiny.config(folder, **{"certificate": True, **given}),
        train_dataset=rows,
        eval_dataset=rows.select(range(5)),
        processing_class=WORDS,
        rollout=FixedRollout(tiny.recorded(WORDS)),
    )


def expected(number: int) -> tuple[float, float, float]:
    """In float64, row by row; the last is the mean over rows of their mean KL."""
    student, teacher = tiny.qwen2(32, seed=0).double(), tiny.qwen2(48, seed=1).double()
    kls, same = [], []
    for prompt, ids in list(tiny.recorded(WORDS).items())[:number]:
        read, at = torch.tensor([[*prompt, *ids]]), slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        with torch.no_grad():
            own, target = (one(read).logits[0, at].log_softmax(-1) for one in (student, teacher))
        kls.append((target.exp() * (target - own)).sum(-1))
        same.append((own.argmax(-1) == target.argmax(-1)).double())
    of_rows = sum(float(one.mean()) for one in kls) / len(kls)
    return float(torch.cat(kls).mean()), float(torch.cat(same).mean()), of_rows


def measured(folder: Any) -> list[float]:
    faulthandler.dump_traceback_later(forks.SECONDS, exit=True)
    trainer = trainer_of(folder, per_device_eval_batch_size=2)
    found = trainer.evaluate()
    faulthandler.cancel_dump_traceback_later()
    return [found[f"eval_certificate/{name}"] for name in ("kl", "agreement")]


@pytest.mark.parametrize(
    "strategy",
    [
        "alone",
        pytest.param("ddp", marks=[pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]),
    ],
)
def test_rows_that_only_fill_a_batch_are_not_measured(tmp_path, strategy):
    found = measured(tmp_path) if strategy == "alone" else forks.results(strategy, measured, tmp_path)[0]
    assert found == pytest.approx(expected(5)[:2], rel=1e-5)


def test_each_token_counts_alike_whatever_counts_alike_in_the_loss(tmp_path):
    options = {"loss_aggregation": "rows", "divergence": "forward_kl", "per_device_eval_batch_size": 2}
    found = trainer_of(tmp_path, **options).evaluate()
    kl, agreement, of_rows = expected(5)
    assert abs(kl - of_rows) > 1e-3
    assert found["eval_certificate/kl"] == pytest.approx(kl, rel=1e-5)
    assert found["eval_certificate/agreement"] == pytest.approx(agreement, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(of_rows, rel=1e-5)
    assert found["eval_divergence/mean"] == found["eval_loss"]
