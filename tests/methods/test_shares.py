"""Shares of a step: what was really generated for, counted by teacher, step by step."""

from __future__ import annotations

import logging
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from support import forks, tiny
from support.rollouts import Answering

from trl_opsd import Method, OPSDTrainer
from trl_opsd.methods.shares import turns

WORDS = tiny.tokenizer()
MATH, CODE = 11, 5
"""Rows of each teacher."""


def rows(math: int = MATH, code: int = CODE, **more: Any) -> Dataset:
    """All of one teacher, and then all of the other: as far from shares as an order can be."""
    names = ["math"] * math + ["code"] * code
    prompts = [f"{name} {number}=" for name, count in (("math", math), ("code", code)) for number in range(count)]
    return Dataset.from_dict({"prompt": prompts, "teacher": names, **more})


class Noting(Answering):
    """Notes what it generates for."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__(lambda prompt: [prompt[-2], 9, 2], apart)
        self.prompts: list[list[str]] = []

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self.prompts.append([WORDS.decode(ids) for ids in prompt_ids])
        return super().complete(prompt_ids, step)


class Taught(OPSDTrainer):
    """Notes the prompts that are taught, by step."""

    def teach(self, rollout: Any, rows: Any) -> Any:
        if self.model.training:
            self.__dict__.setdefault("taught", []).extend((self.state.global_step, row["prompt"]) for row in rows)
        return super().teach(rollout, rows)


def options(**given: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "teacher_shares": {"math": 2, "code": 1},
        "max_steps": 6, "learning_rate": 1e-2, **given,
    }  # fmt: skip


def trained(make_trainer: Any, resume: str | None = None, cls: type = OPSDTrainer, **given: Any) -> Any:
    models = {"math": tiny.qwen2(48, 1), "code": tiny.llama(32, 2)}
    fixed = {"rollout": Noting(), "train_dataset": rows(), "teacher_model": models}
    trainer = make_trainer(cls, **{**fixed, **options(**given)})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_of(trainer: Any) -> list[list[str]]:
    """The prompts of each step, a prompt once for each time that it was drawn."""
    each = trainer.args.num_generations
    found = [prompts[::each] for prompts in trainer.rollout.prompts]
    repeated = [[one for one in prompts for _ in range(each)] for prompts in found]
    assert repeated == trainer.rollout.prompts, "completions of a prompt are adjacent"
    return found


def counts(prompts: list[str]) -> dict[str, int]:
    return dict(Counter(prompt.split()[0] for prompt in prompts))


def check_passes(steps: list[list[str]], of: dict[str, int]) -> None:
    """Each teacher's rows come once before one comes again."""
    for name, number in of.items():
        drawn = [prompt for prompts in steps for prompt in prompts if prompt.startswith(name)]
        for start in range(0, len(drawn), number):
            assert max(Counter(drawn[start : start + number]).values()) == 1


@pytest.mark.parametrize("shares", [(2, 1), (1, 1, 1), (0.7, 0.2, 0.1), (5, 3, 2, 2, 1e-3), (1 / 3, 2.5, 7)])
def test_running_counts_stay_within_one_of_the_exact_shares(shares):
    exact = [Fraction(str(one)) / sum(Fraction(str(each)) for each in shares) for one in shares]
    drawn = [0] * len(shares)
    for n, (number, before) in zip(range(1, 1500), turns(shares), strict=False):
        assert drawn[number] == before
        drawn[number] += 1
        assert all(abs(count - n * share) < 1 for count, share in zip(drawn, exact, strict=True))


@pytest.mark.long
def test_running_counts_of_any_shares_stay_within_one():
    draw = Random(0)
    for _ in range(200):
        shares = [draw.choice((draw.randint(1, 30), round(draw.random(), 2) + 0.01)) for _ in range(draw.randint(2, 9))]
        test_running_counts_stay_within_one_of_the_exact_shares(shares)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two completions": {"num_generations": 2, "per_device_train_batch_size": 6},
    "one call": {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1},
    "in order": {"shuffle_dataset": False},
    "workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "ahead": {"overlap": "ahead", "rollout": Noting(apart=True), "overlap_max_divergence": 99.0},
    "as they end": {"overlap": "step", "rollout": Noting(apart=True)},
    "epochs": {"max_steps": -1, "num_train_epochs": 3},
}


PLAIN: dict[str, list[list[str]]] = {}


@pytest.mark.parametrize("name", [name if name == "two completions" else
                                  pytest.param(name, marks=pytest.mark.long) for name in VARIANTS])  # fmt: skip
def test_each_step_has_each_teachers_share_of_prompts(make_trainer, name):
    trainer = trained(make_trainer, **VARIANTS[name])
    steps = steps_of(trainer)
    assert [counts(prompts) for prompts in steps] == [{"math": 4, "code": 2}] * 6
    check_passes(steps, {"math": MATH, "code": CODE})
    assert trainer.state.max_steps == 6, "that many as without shares: 16 rows have two steps of 6 prompts"
    if name == "in order":
        drawn = [prompt for prompts in steps for prompt in prompts if prompt.startswith("code")]
        assert drawn == [f"code {number % CODE}=" for number in range(12)]
    assert steps == (PLAIN.setdefault("steps", steps) if name != "in order" else steps), "by the step alone"


@pytest.mark.long
@pytest.mark.parametrize("given", [
    {"lmbda": 0.5, "train_dataset": rows(completion=["so"] * 16)},
    {"prompt_weight_fn": lambda row, last: float("0" not in row["prompt"])},
])  # fmt: skip
def test_rows_that_the_student_does_not_complete_are_drawn_too(make_trainer, given):
    trainer = trained(make_trainer, cls=Taught, max_steps=4, **given)
    for step in range(4):
        drawn = [prompt for at, prompt in trainer.taught if at == step]
        assert counts(drawn) == {"math": 4, "code": 2}
    if "prompt_weight_fn" in given:
        assert not any("0" in prompt for prompts in trainer.rollout.prompts for prompt in prompts)


@pytest.mark.long
def test_uneven_shares_are_kept_over_the_steps(make_trainer):
    steps = steps_of(trained(make_trainer, per_device_train_batch_size=2, max_steps=9))
    total: Counter[str] = Counter()
    for number, prompts in enumerate(steps, 1):
        total.update(counts(prompts))
        assert abs(total["math"] - 4 * number * 2 / 3) < 1
        assert counts(prompts)["math"] in (2, 3)
    assert total == {"math": 24, "code": 12}


@pytest.mark.parametrize("ignore", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_resumed_run_equals_an_uninterrupted_one(make_trainer, tmp_path, ignore):
    given: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}  # an epoch has two steps
    whole = trained(make_trainer, output_dir=str(tmp_path / "one"), **given)
    given |= {"output_dir": str(tmp_path / "two"), "ignore_data_skip": ignore}
    again = trained(make_trainer, str(tmp_path / "one/checkpoint-3"), **given)
    assert steps_of(again) == steps_of(whole)[3:]
    # Without a skip, torch draws a seed for the loader that it had drawn by then, so rows are dealt otherwise.
    torch.testing.assert_close(tiny.weights(again), tiny.weights(whole), rtol=0, atol=1e-5 if ignore else 0)
    assert tiny.logged(again, "epochs/teacher/code") == tiny.logged(whole, "epochs/teacher/code")
    with pytest.raises(ValueError, match=r"teacher_shares: \{'math': 2, 'code': 1\} in the checkpoint"):
        trained(make_trainer, str(tmp_path / "one/checkpoint-3"), teacher_shares={"math": 1, "code": 1}, **given)


@pytest.mark.long
def test_used_up_rows_are_named_once_per_pass(make_trainer, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = trained(make_trainer)
    said = re.findall(r"Step (\d) ends pass (\d) over the \d+ rows of the teacher '(\w+)'", caplog.text)
    assert said == [("3", "1", "code"), ("3", "1", "math"), ("5", "2", "code"), ("6", "2", "math")]
    assert tiny.logged(trainer, "epochs/teacher/code") == pytest.approx([2 * step / CODE for step in range(1, 7)])
    assert tiny.logged(trainer, "epochs/teacher/math") == pytest.approx([4 * step / MATH for step in range(1, 7)])
    drawn = [prompt for prompts in steps_of(trainer) for prompt in prompts if prompt.startswith("math")]
    assert drawn[:MATH] != drawn[MATH : 2 * MATH], "shuffled anew"


def in_two(folder: Path, resume: str | None) -> Any:
    """Prompts by step over both processes, and the weights."""
    args = tiny.config(folder, **options(per_device_train_batch_size=3, gradient_accumulation_steps=1,
                       save_strategy="steps", save_steps=3, num_generations=2, max_steps=5))  # fmt: skip
    trainer = Taught(
        model=tiny.qwen2(32, 0), teacher_model={"math": tiny.qwen2(48, 1), "code": tiny.llama(32, 2)}, args=args,
        train_dataset=rows(), processing_class=WORDS, rollout=Noting(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return gather_object(trainer.taught), tiny.weights(trainer).numpy()


@pytest.mark.long
@pytest.mark.distributed
def test_two_processes_share_a_step_and_resume(tmp_path):
    whole, weights = forks.results("ddp", in_two, tmp_path / "one", None)[0]
    for step in range(5):
        drawn = Counter(prompt for at, prompt in whole if at == step)
        assert set(drawn.values()) == {2}, "completions of a prompt"
        assert counts([*drawn]) == {"math": 2, "code": 1}
    again, theirs = forks.results("ddp", in_two, tmp_path / "two", str(tmp_path / "one/checkpoint-3"))[1]
    assert sorted(again) == sorted(one for one in whole if one[0] >= 3)
    assert (theirs == weights).all()


STREAM = {"train_dataset": rows().to_iterable_dataset()}


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(("given", "message"), [
    ({"teacher_shares": {"math": 2, "code": 0}}, "expected a dict of the names of at least two teachers with a finite"),
    *(({"teacher_shares": one}, "expected a dict") for one in ({"math": 2}, [2, 1], "2:1", '{"math": 2, "code": -1}')),
    ({"teacher_shares": '{"math": 2, "code"}'}, "is not JSON"),
    ({"teacher_shares": {"math": 2, "prose": 1}}, r"by \['code', 'math'\]: expected a share for each"),
    ({"teacher_shares": {"math": 2, "code": 1, "prose": 1}}, r"but rows are taught by \['code', 'math'\]"),
    ({"teacher_model": tiny.qwen2(48, 1)}, r"but rows are taught by \['teacher'\]"),
    (STREAM, "with a stream as `train_dataset`"),
    ({"train_dataset": rows().with_transform(dict)}, "with rows that `set_transform` computes as"),
    ({"train_dataset": rows(9, 0)}, "the teacher 'code', but none of the 9 rows of train_dataset names it"),
    ({"train_dataset": tiny.rows()}, "train_dataset has no column 'teacher'"),
])  # fmt: skip
def test_shares_that_cannot_be_drawn_are_refused_before_loading(make_trainer, given, message):
    with pytest.raises(ValueError, match=message):
        trained(make_trainer, **given)


class Hardest(Method):
    """Draws the last rows first."""

    def draw(self, rows, step):
        last = len(self.host.train_dataset) - step * len(rows)
        return range(last - len(rows), last)


def test_a_users_method_draws_rows(make_trainer):
    given = {"teacher_shares": None, "teacher_model": tiny.qwen2(48, 1), "train_dataset": rows(), "max_steps": 2}
    steps = steps_of(trained(make_trainer, methods=[Hardest()], **given))
    prompts = rows()["prompt"]
    assert steps == [prompts[10:16], prompts[4:10]]
    with pytest.raises(ValueError, match=r"`Hardest.draw` returned .*: expected 6 integers, numbers of the 16 rows"):
        trained(make_trainer, methods=[Hardest()], **{**given, "max_steps": 3, "num_train_epochs": 9})
    with pytest.raises(ValueError, match="is a stream, whose rows come in its own order, with `Hardest`"):
        trained(make_trainer, methods=[Hardest()], **{**given, **STREAM})
