"""What counts alike in the loss: each aggregation against a few lines of float64, whatever the micro-batches are."""

from __future__ import annotations

import faulthandler
import math
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from datasets import Dataset
from support import forks, fsdp_on_cpu, tiny
from support.rollouts import Apart
from torch import Tensor
from transformers import TrainerCallback

from trl_opsd import Method, OPSDTrainer
from trl_opsd._compat.sharding import trained_parameters, whole

WORDS = tiny.tokenizer()
ANSWERS = ["4", " blue, as it is on most days in May", "", " three four five six seven", "no", " and white", "1", " b c d"]
TEACHERS = ["math", "prose", "math", "prose", "math", "prose", "prose", "math"]
WEIGHTS = {"math": 3, "prose": 1, "idle": 5}
"""No row names the third."""
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "rows": {"loss_aggregation": "rows"},
    "teachers": {"loss_aggregation": "teachers"},
    "weighted teachers": {"loss_aggregation": "teachers", "teacher_weights": WEIGHTS},
}
GROWTH, PULL = 1.25, 0.2


def ids_of(place: int) -> list[int]:
    return WORDS(ANSWERS[place] + "<|im_end|>" * (place % 2))["input_ids"]


def models() -> tuple[Any, dict[str, Any]]:
    idle = tiny.qwen2(48, seed=3)
    return tiny.qwen2(32, seed=0), {"math": tiny.qwen2(48, seed=1), "prose": tiny.llama(64, seed=2), "idle": idle}


def rows() -> Dataset:
    return Dataset.from_dict({"prompt": tiny.PROMPTS, "teacher": TEACHERS})


# ---- In float64, one row after the other -----------------------------------------------------------------------------


def worth(place: int, count: int, setting: str) -> tuple[Tensor, float]:
    """The weights of the tokens of a row, and that of the row."""
    places = torch.arange(count, dtype=torch.float64)
    if setting == "prefix":
        return (places < math.ceil(count / 2)).double(), 1.0
    if setting == "a user's":
        return GROWTH**places, {1: 0.0, 3: 1.5, 4: 0.25}.get(place, 1.0)
    if setting == "turns":
        return torch.full_like(places, 1 / count), 1.0
    return 0.8**places if setting == "discount" else torch.ones_like(places), 1.0


@cache
def expected(name: str, setting: str = "") -> tuple[float, Tensor, dict[str, float]]:
    """The loss of a step of all rows, its gradient, and the share of each teacher."""
    student, teachers = models()
    student.double()
    values, weights, names = [], [], []
    for place, (prompt, teacher) in enumerate(zip(tiny.PROMPTS, TEACHERS, strict=True)):
        before, ids = WORDS(prompt)["input_ids"], ids_of(place)
        if not ids:
            continue
        read, at = torch.tensor([[*before, *ids]]), slice(len(before) - 1, -1)
        log = student(read).logits[0, at].log_softmax(-1)
        target = teachers[teacher].double()(read).logits[0, at].detach().log_softmax(-1)
        value = (log.exp() * (log - target)).sum(-1)
        if setting == "a user's":
            value = value - PULL * log.gather(1, torch.tensor(ids)[:, None])[:, 0]
        each, row = worth(place, len(ids), setting)
        if setting == "student_entropy":
            kept = (log.exp() * log).sum(-1).argsort()[: math.ceil(len(ids) / 2)]
            each = torch.zeros_like(each).index_fill(0, kept, 1.0)
        if name == "rows":
            each = each / each.sum()
        if row:
            values.append(value), weights.append(each * row), names.append(teacher)
    of = {name: sum(float(one.sum()) for one, its in zip(weights, names, strict=True) if its == name) for name in names}
    if "teachers" in name:
        asked = {one: float(WEIGHTS[one]) if "weighted" in name else 1.0 for one in of}
        weights = [one * asked[its] / of[its] for one, its in zip(weights, names, strict=True)]
        of = asked
    total = sum(of.values())
    loss = sum((one * value).sum() for one, value in zip(weights, values, strict=True)) / total
    loss.backward()
    gradient = torch.cat([one.grad.flatten() for one in student.parameters()])
    return float(loss.detach()), gradient, {name: one / total for name, one in of.items()}


# ---- Trainings -------------------------------------------------------------------------------------------------------


class User(Method):
    """Weighs tokens, prompts and rows, and pulls."""

    skips = pulls = True

    def before(self, rows: Any) -> None:
        for row in rows:
            row.prompt_weight *= {tiny.PROMPTS[1]: 0.0, tiny.PROMPTS[3]: 1.5}.get(row["prompt"], 1.0)
            row.pull += PULL

    def generated(self, batch: Any) -> None:
        for row in batch.rows:
            row.gate *= 0.25 if row["prompt"] == tiny.PROMPTS[4] else 1.0

    def weigh(self, weights: Any, rollout: Any, rows: Any, targets: Any) -> Any:
        return weights * GROWTH ** torch.arange(weights.size(1))


class Changing(OPSDTrainer):
    """Its micro-batches are weighed anew, since a token of each row is masked and restored."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, "scored": batch["scored"] + 1}


class Gradient(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found = torch.cat([one.grad.flatten() for one in model.parameters()])


SETTINGS: dict[str, dict[str, Any]] = {
    "by twos": {},
    "at once": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "by ones": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "budget": {"max_tokens_per_microbatch": 30},
    "packed": {"padding_free": True, "max_tokens_per_microbatch": 30},
    "step": {"overlap": "step"},
    "ahead": {"overlap": "ahead", "overlap_max_divergence": 1e9},
    "prefix": {"token_selection": "prefix", "token_fraction": 0.5},
    "student_entropy": {"token_selection": "student_entropy", "token_fraction": 0.5},
    "discount": {"position_discount": 0.8},
    "turns": {"equal_turns": True},
    "a user's": {"methods": [User()]},
    "changed": {"cls": Changing},
}


KNOWN = ("prefix", "student_entropy", "discount", "turns", "a user's")
"""Settings that are another step, and not only another way to it."""


def trainer_of(
    folder: Any, name: str, cls: type = OPSDTrainer, methods: Any = (), of: Any = None, **given: Any
) -> OPSDTrainer:
    student, teachers = of or models()
    prompts = map(tuple, WORDS(tiny.PROMPTS)["input_ids"])
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1, "optim": "sgd"}
    options |= {"divergence": "reverse_kl", "learning_rate": 1.0, "max_grad_norm": 0.0, **AGGREGATIONS[name], **given}
    fsdp_on_cpu.allow()
    return cls(
        model=student,
        teacher_model=teachers,
        args=tiny.config(folder, max_completion_length=60, **options),
        train_dataset=rows(),
        processing_class=WORDS,
        rollout=Apart(dict(zip(prompts, map(ids_of, range(8)), strict=True))),
        methods=methods,
    )


def logged(trainer: OPSDTrainer) -> dict[str, float]:
    return next(row for row in trainer.state.log_history if "loss" in row)


def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


SHORT = {("rows", "step"), ("teachers", "budget"), ("weighted teachers", "a user's"), ("rows", "student_entropy")}
CASES = [
    pytest.param(name, setting, marks=() if (name, setting) in SHORT else pytest.mark.long)
    for name in AGGREGATIONS
    for setting in SETTINGS
    if not ("teachers" in name and setting == "step")
]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_step_equals_float64(tmp_path, name, setting):
    trainer = trainer_of(tmp_path, name, **SETTINGS[setting])
    trainer.add_callback(callback := Gradient())
    trainer.train()
    loss, gradient, shares = expected(name, setting if setting in KNOWN else "")
    log = logged(trainer)
    print(f"{name}, {setting}: {abs(log['loss'] / loss - 1):.1e} {gap(callback.found, gradient):.1e}")
    assert log["loss"] == pytest.approx(loss, rel=1e-5)
    assert gap(callback.found, gradient) < 1e-5
    assert [log[f"loss_share/teacher/{one}"] for one in shares] == pytest.approx([*shares.values()], rel=1e-5)
    assert log["loss_share/teacher/idle"] == 0


@pytest.mark.parametrize(
    ("name", "batch"), [("teachers", 3), *(pytest.param(*one, marks=pytest.mark.long) for one in product(AGGREGATIONS, (1, 3, 8)))]
)
def test_an_evaluation_aggregates_over_the_whole_dataset(tmp_path, name, batch):
    found = trainer_of(tmp_path, name, per_device_eval_batch_size=batch).evaluate(rows())
    check_evaluation(name, found)


def check_evaluation(name: str, found: dict[str, float]) -> None:
    loss, _, shares = expected(name)
    assert [found["eval_loss"], found["eval_divergence/mean"]] == pytest.approx([loss, loss], rel=1e-5)
    assert [found[f"eval_loss_share/teacher/{one}"] for one in shares] == pytest.approx([*shares.values()], rel=1e-5)
    for prefix, counted in lengths().items():
        assert {one: found[f"eval_{prefix}/teacher/{one}"] for one in shares} == counted


def lengths() -> dict[str, dict[str, float]]:
    """Metrics of each teacher: tokens in the loss, and the mean length, by which an empty completion has one token."""
    each = {one: [len(ids_of(place)) for place, its in enumerate(TEACHERS) if its == one] for one in ("math", "prose")}
    means = {one: sum(max(1, length) for length in its) / len(its) for one, its in each.items()}
    return {"tokens": {one: sum(its) for one, its in each.items()}, "completions/mean_length": means}


IN_TWO = ("by twos", "budget", "student_entropy", "a user's", "step")


def trained_in_two(folder: Any, names: list[str], every: bool) -> dict[Any, Any]:
    """Of one process of two: the log of each run, the weights that it moved, and an evaluation of the student before."""
    faulthandler.dump_traceback_later(290, exit=True)
    runs = [(name, one) for name in names for one in IN_TWO if one != "step" or "teachers" not in name]
    runs = runs if every else runs[::2]
    made = [models() for _ in runs]  # before there is a DeepSpeed config, which would split them
    found = {}
    for (name, setting), of in zip(runs, made, strict=True):
        given = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 3, **SETTINGS[setting]}
        before = torch.cat([one.detach().flatten() for one in of[0].parameters()])
        trainer = trainer_of(folder, name, of=of, **given)
        evaluated = trainer.evaluate(rows())
        trainer.train()
        parameters = trained_parameters(trainer.accelerator.unwrap_model(trainer.model)).values()
        after = torch.cat([whole(one).detach().flatten() for one in parameters])
        found[name, setting] = logged(trainer), (before - after).numpy(), evaluated
    faulthandler.cancel_dump_traceback_later()
    return found


@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
@pytest.mark.parametrize(
    ("strategy", "every"),
    [pytest.param(one, True, marks=pytest.mark.long) for one in ("ddp", "zero3_cpu", "fsdp2_cpu")],
)
def test_two_processes_take_the_step_of_float64(tmp_path, strategy, every):
    for (name, setting), (log, moved, evaluated) in forks.results(
        strategy, trained_in_two, tmp_path, [*AGGREGATIONS], every
    )[0].items():
        loss, gradient, shares = expected(name, setting if setting in KNOWN else "")
        off = gap(torch.from_numpy(moved), gradient)
        print(f"{strategy}, {name}, {setting}: {abs(log['loss'] / loss - 1):.1e} {off:.1e}")
        assert log["loss"] == pytest.approx(loss, rel=1e-5)
        assert off < 3e-5
        assert [log[f"loss_share/teacher/{one}"] for one in shares] == pytest.approx([*shares.values()], rel=1e-5)
        if setting != "a user's":  # whose gates are of evaluations too
            check_evaluation(name, evaluated)
        if setting == "by twos":
            for prefix, counted in lengths().items():
                assert {one: log[f"{prefix}/teacher/{one}"] for one in shares} == counted
