"""What counts alike in the loss: each aggregation against a few lines of float64, whatever the micro-batches are.

With other options, and by bytes, aggregations are in `equivalence/test_pairs.py`.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from support import tiny
from support.rollouts import Apart
from torch import Tensor
from turns import EqualTurns

from trl_opsd import OPSDTrainer
from trl_opsd.methods import METHODS
from trl_opsd.methods.selection import TokenSelection
from trl_opsd.methods.weights import Aggregation

WORDS = tiny.tokenizer()
PROMPTS = WORDS(tiny.PROMPTS)["input_ids"]
TEXTS = "4<|im_end|>; blue, as it is on most days in May;; three four five six seven;no; and white<|im_end|>;1; b c d"
IDS: list[list[int]] = WORDS(TEXTS.split(";"))["input_ids"]
"""The completions; the third has no token."""
TEACHERS = ["math", "prose", "math", "prose", "math", "prose", "prose", "math"]
ROWS = Dataset.from_dict({"prompt": tiny.PROMPTS, "teacher": TEACHERS})
WEIGHTS = {"math": 3, "prose": 1, "idle": 5}
"""No row names the third."""
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "rows": {"loss_aggregation": "rows"},
    "teachers": {"loss_aggregation": "teachers"},
    "weighted teachers": {"loss_aggregation": "teachers", "teacher_weights": WEIGHTS},
}


def models() -> tuple[Any, dict[str, Any]]:
    teachers = {"math": tiny.qwen2(48, seed=1), "prose": tiny.llama(64, seed=2), "idle": tiny.qwen2(48, seed=3)}
    return tiny.qwen2(32, seed=0), teachers


@cache
def expected(name: str) -> tuple[float, Tensor, dict[str, float]]:
    """In float64, row by row: the loss of a step of all rows, its gradient, and the share of each teacher."""
    student, teachers = models()
    student.double()
    values, weights, of = [], [], {"math": 0.0, "prose": 0.0}
    for prompt, ids, teacher in zip(PROMPTS, IDS, TEACHERS, strict=True):
        read, at = torch.tensor([[*prompt, *ids]]), slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        log = student(read).logits[0, at].log_softmax(-1)
        target = teachers[teacher].double()(read).logits[0, at].detach().log_softmax(-1)
        values.append((log.exp() * (log - target)).sum())
        weights.append(1 / max(len(ids), 1) if name == "rows" else 1.0)
        of[teacher] += len(ids) * weights[-1]
    if "teachers" in name:
        asked = {one: float(WEIGHTS[one]) if "weighted" in name else 1.0 for one in of}
        weights = [asked[its] / of[its] for its in TEACHERS]
        of = asked
    loss = sum(one * value for one, value in zip(weights, values, strict=True)) / sum(of.values())
    loss.backward()
    gradient = torch.cat([one.grad.flatten() for one in student.parameters()])
    return float(loss.detach()), gradient, {name: one / sum(of.values()) for name, one in of.items()}


def trainer_of(folder: Any, name: str, of: Any = None, **given: Any) -> OPSDTrainer:
    student, teachers = of or models()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1, "optim": "sgd"}
    options |= {"per_device_eval_batch_size": 3, "divergence": "reverse_kl", "learning_rate": 1.0, "max_grad_norm": 0.0}
    return OPSDTrainer(
        model=student,
        teacher_model=teachers,
        args=tiny.config(folder, max_completion_length=60, **{**options, **AGGREGATIONS[name], **given}),
        train_dataset=ROWS,
        processing_class=WORDS,
        rollout=Apart(dict(zip(map(tuple, PROMPTS), IDS, strict=True))),
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "by twos": {},
    "at once": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "by ones": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "budget": {"max_tokens_per_microbatch": 30},
    "packed": {"padding_free": True, "max_tokens_per_microbatch": 30},
    "step": {"overlap": "step"},
    "ahead": {"overlap": "ahead", "overlap_max_divergence": 1e9},
}
RUNS = [(name, one) for name in AGGREGATIONS for one in SETTINGS if one != "step" or "teachers" not in name]


SHORT = {("rows", "step"), ("teachers", "budget"), ("weighted teachers", "ahead")}


@pytest.mark.parametrize(
    ("name", "setting"), [pytest.param(*one, marks=() if one in SHORT else pytest.mark.long) for one in RUNS]
)
def test_step_and_evaluation_equal_float64(tmp_path, name, setting):
    """At a rate of 1 a step moves the weights by its gradient."""
    given = {"per_device_eval_batch_size": one} if (one := {"by ones": 1, "at once": 8}.get(setting)) else {}
    trainer = trainer_of(tmp_path, name, **SETTINGS[setting], **given)
    evaluated, before = trainer.evaluate(ROWS), tiny.weights(trainer)
    trainer.train()
    loss, gradient, shares = expected(name)
    assert float((before - tiny.weights(trainer) - gradient).abs().max() / gradient.abs().max()) < 1e-5
    log = trainer.state.log_history[-2]
    assert log["loss_share/teacher/idle"] == 0
    for logs in (log, {one.removeprefix("eval_"): value for one, value in evaluated.items()}):
        assert [logs["loss"], logs["divergence/mean"]] == pytest.approx([loss, loss], rel=1e-5)
        for one, share in shares.items():
            each = [len(ids) for ids, its in zip(IDS, TEACHERS, strict=True) if its == one]
            mean = sum(max(1, length) for length in each) / len(each)  # without a token there is one of padding
            assert logs[f"loss_share/teacher/{one}"] == pytest.approx(share, rel=1e-5)
            assert logs[f"tokens/teacher/{one}"] == sum(each)
            assert logs[f"completions/mean_length/teacher/{one}"] == pytest.approx(mean)


def test_turns_stay_alike_within_a_row_that_counts_as_one():
    rows = [SimpleNamespace(prompt_weight=1.5, gate=0.5), SimpleNamespace(prompt_weight=1.0, gate=1.0)]
    spoken_BC = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    alike_BC = EqualTurns().token_weights(spoken_BC.float(), SimpleNamespace(generated=spoken_BC), rows, None)
    found = Aggregation("rows").final_weights(alike_BC, rows)
    assert found.tolist() == [[0.375, 0, 0.1875, 0.1875, 0], [0] * 5]
    assert METHODS.index(TokenSelection) < METHODS.index(Aggregation)


def test_one_teacher_is_as_tokens(make_trainer):
    alike, plain = make_trainer(loss_aggregation="teachers"), make_trainer()
    for one in (alike, plain):
        one.train()
    assert tiny.logged(alike, "loss") == tiny.logged(plain, "loss")


WRONG = [{"math": one, "prose": 1} for one in (0, math.inf, math.nan, None)]
WRONG += [[1, 2], {1: 1.0}, {}, {"math": 1, "prose": 1}, {**WEIGHTS, "maths": 1}]
REFUSED = [("Aggregation.by=", {"loss_aggregation": "row"}), ("overlap", {"overlap": "step"})]
REFUSED += [("Aggregation.weights=", {"teacher_weights": one}) for one in WRONG]
MODELS = cache(models)


@pytest.mark.parametrize(("named", "given"), REFUSED)
def test_values_that_mean_nothing_are_refused(tmp_path, named, given):
    with pytest.raises(ValueError, match=named):
        trainer_of(tmp_path, "teachers", of=MODELS(), **given)
