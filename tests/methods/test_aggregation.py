"""What counts alike in the loss: each aggregation against a few lines of float64, whatever the micro-batches are."""

from __future__ import annotations

import faulthandler
import math
import re
from functools import cache
from types import SimpleNamespace
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
from trl_opsd.methods import METHODS
from trl_opsd.methods.aggregation import Aggregation
from trl_opsd.methods.selection import TokenSelection
from trl_opsd.methods.turns import EqualTurns, by_turn

WORDS = tiny.tokenizer()
ANSWERS = [
    "4",
    " blue, as it is on most days in May",
    "",
    " three four five six seven",
    "no",
    " and white",
    "1",
    " b c d",
]
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
    return torch.ones_like(places), 1.0


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
    "turns": {"equal_turns": True},
    "a user's": {"methods": [User()]},
    "changed": {"cls": Changing},
}


KNOWN = ("prefix", "student_entropy", "turns", "a user's")
"""Settings that are another step, and not only another way to it."""


def trainer_of(
    folder: Any, name: str, cls: type = OPSDTrainer, methods: Any = (), of: Any = None, **given: Any
) -> OPSDTrainer:
    student, teachers = of or models()
    prompts = map(tuple, WORDS(tiny.PROMPTS)["input_ids"])
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1, "optim": "sgd"}
    options["shuffle_dataset"] = False  # of two processes the first has more tokens, so that rows are exchanged
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


@pytest.mark.parametrize("batch", [3, *(pytest.param(one, marks=pytest.mark.long) for one in (1, 8))])
@pytest.mark.parametrize(
    "name", ["teachers", *(pytest.param(one, marks=pytest.mark.long) for one in AGGREGATIONS if one != "teachers")]
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


IN_TWO = ("by twos", "prefix", "budget", "student_entropy", "a user's", "step")
"""The first two also where both processes read each row."""


def trained_in_two(folder: Any, settings: tuple[str, ...]) -> dict[Any, Any]:
    """The log of each run in one of two processes, how far it moved the weights, and an evaluation before it."""
    faulthandler.dump_traceback_later(290, exit=True)
    runs = [(name, one) for name in AGGREGATIONS for one in settings if one != "step" or "teachers" not in name]
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


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
@pytest.mark.parametrize("strategy", ["ddp", "zero3_cpu", "fsdp2_cpu", "sp_cpu"])
def test_two_processes_take_the_step_of_float64(tmp_path, strategy):
    settings = IN_TWO[:2] if strategy == "sp_cpu" else IN_TWO
    found = forks.results(strategy, trained_in_two, tmp_path, settings)[0]
    for (name, setting), (log, moved, evaluated) in found.items():
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


def test_turns_stay_alike_within_a_row_that_counts_as_one():
    rows = [SimpleNamespace(prompt_weight=1.5, gate=0.5), SimpleNamespace(prompt_weight=1.0, gate=1.0)]
    spoken_BC = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    found = Aggregation(None).weighed(by_turn(spoken_BC.float(), spoken_BC), rows)
    assert found.tolist() == [[0.375, 0, 0.1875, 0.1875, 0], [0] * 5]
    assert METHODS.index(TokenSelection) < METHODS.index(EqualTurns) < METHODS.index(Aggregation)


def test_one_teacher_is_as_tokens(make_trainer):
    """Bit for bit, and the option is named as one without effect."""
    plain, other = (make_trainer(loss_aggregation=one) for one in ("tokens", "teachers"))
    assert other.methods.get(Aggregation) is None
    assert "no effect         loss_aggregation='teachers'" in repr(other)
    assert "no effect" not in repr(plain)


def weighed(value: Any, said: str = "each with a finite number above 0") -> Any:
    given = {"loss_aggregation": "teachers", "teacher_weights": value}
    return pytest.param(given, f"`teacher_weights={value!r}`: expected a dict of the names of teachers, {said}")


OF_THREE = "the teachers of rows are ['idle', 'math', 'prose']: expected one number for each of these"
REFUSED = [
    ({"loss_aggregation": "row"}, "`loss_aggregation='row'`: expected one of 'tokens', 'rows', 'teachers'. Did you"),
    ({"loss_aggregation": "teachers", "overlap": "step"}, "set `loss_aggregation='rows'`, or `overlap='ahead'`"),
    *(weighed({"math": one, "prose": 1}) for one in (0, -1, math.inf, math.nan, True, "1", None)),
    *map(weighed, ([1, 2], "math", 2, {1: 1.0})),
]
MISNAMED: dict[str, Any] = {"none": {}, "missing": {"math": 1, "prose": 1}, "unknown": {**WEIGHTS, "maths": 1}}


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_values_that_mean_nothing_are_refused(tmp_path, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        tiny.config(tmp_path, **given)


@pytest.mark.parametrize("kind", MISNAMED)
def test_weights_of_other_teachers_are_refused(tmp_path, kind):
    said = f"`teacher_weights` is of {sorted(MISNAMED[kind])}, but {OF_THREE}"
    with pytest.raises(ValueError, match=re.escape(said)):
        trainer_of(tmp_path, "teachers", teacher_weights=MISNAMED[kind])


@pytest.mark.long
def test_another_aggregation_is_refused_on_resume(tmp_path):
    given = {"save_strategy": "steps", "save_steps": 1}
    trainer_of(tmp_path, "teachers", **given).train()
    trainer_of(tmp_path, "teachers", max_steps=2, **given).train(resume_from_checkpoint=True)
    for name, option in (("rows", "loss_aggregation"), ("weighted teachers", "teacher_weights")):
        with pytest.raises(ValueError, match=f"{option}: "):
            trainer_of(tmp_path, name, max_steps=3, **given).train(resume_from_checkpoint=True)


@pytest.mark.long
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_teacher_of_short_answers_has_its_share(tmp_path, name):
    """Ten times shorter; the share holds in each step, and teachers get closer by what they weigh."""
    trainer = trainer_of(tmp_path, name, max_steps=30, optim="adamw_torch", learning_rate=3e-3, num_train_epochs=30)
    words = {"math": "4 4", "prose": " blue today, as it was last week"[:30]}
    prompts = map(tuple, WORDS(tiny.PROMPTS)["input_ids"])
    answers = (WORDS(words[its])["input_ids"] for its in TEACHERS)
    trainer.rollout = Apart(dict(zip(prompts, answers, strict=True)))
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    share = {"tokens": 1 / 11, "rows": 1 / 2, "teachers": 1 / 2, "weighted teachers": 3 / 4}[name]
    assert [row["loss_share/teacher/math"] for row in logs] == pytest.approx([share] * 30, rel=1e-5)
    assert {(row["tokens/teacher/math"], row["tokens/teacher/prose"]) for row in logs} == {(12, 120)}
    print(
        name, *(f"{one} {logs[0][of]:.3f} {logs[-1][of]:.3f}" for one in words for of in [f"divergence/teacher/{one}"])
    )
