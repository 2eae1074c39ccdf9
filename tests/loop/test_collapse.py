"""Runs that collapse are warned of or stopped, with the reason; healthy ones are not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support import tiny

from trl_opsd.methods.collapse import COMPARED_STEPS, CollapseGuard, Course, Figures, is_repetition

START = Figures(divergence=0.3, student_entropy=0.8, teacher_entropy=0.5, length=200.0, repeated=0.02)
"""A step of a run that begins."""


def followed(*later: Figures, first: Figures = START) -> Course:
    """A course with twice the same later steps, so that each is the median of the last ones."""
    course = Course()
    for step in [first] * COMPARED_STEPS + list(later) * COMPARED_STEPS:
        course.add(step)
    return course


@pytest.mark.quick
@pytest.mark.parametrize(
    ("length", "now", "signs"),
    [
        (200.0, {"divergence": 1.9}, ["divergence"]),
        (200.0, {"divergence": -1.9}, ["divergence"]),
        (200.0, {"student_entropy": 0.04}, ["entropy"]),
        (200.0, {"length": 1.1, "divergence": 0.25}, ["length"]),
        (200.0, {"repeated": 0.6, "length": 512.0}, ["repetition"]),
        (200.0, {"divergence": 1.15}, []),  # it rises at first
        (200.0, {"divergence": 0.001, "student_entropy": 0.005, "teacher_entropy": 0.004}, []),  # both are as certain
        (200.0, {"student_entropy": 0.07}, []),  # it was far less certain than its teacher
        (200.0, {"divergence": 0.02, "length": 1.5}, []),  # it has learned to be brief
        (200.0, {"length": 512.0, "divergence": 0.2}, []),  # it has learned to explain
        (200.0, {"length": 1000.0, "repeated": 0.3}, []),
        (8.0, {"length": 1.0}, ["length"]),  # the end token alone
        (2.0, {"length": 1.0}, ["length"]),
        (8.0, {"length": 1.5}, []),
        (1.0, {"length": 1.0}, []),
        (1.5, {"length": 1.0}, []),
    ],
)
def test_signs_of_collapse_are_named_and_healthy_runs_have_none(length, now, signs):
    start = replace(START, length=length)
    assert followed(replace(start, **now), first=start).signs() == signs


@pytest.mark.quick
@pytest.mark.parametrize(("divergence", "signs"), [(4.0, ["divergence"]), (2.0, [])])
def test_run_collapsing_at_once_is_compared_with_its_first_step(divergence, signs):
    course = Course()
    for step in [START] + [replace(START, divergence=divergence)] * (2 * COMPARED_STEPS):
        course.add(step)
    assert course.signs() == signs, "a single step may be low by chance"


@pytest.mark.quick
@pytest.mark.parametrize("noise", [0.2, 0.5])
def test_outlier_steps_are_no_sign_of_collapse(noise):
    draw = random.Random(0)
    course = Course()
    for step in range(300):
        outlier = 100 if step % 4 == 0 and step else 1
        course.add(replace(START, divergence=0.3 * draw.lognormvariate(0, noise) * outlier))
        assert course.signs() == []


@pytest.mark.quick
def test_only_the_last_steps_are_compared_with_the_first():
    course = followed(*[replace(START, divergence=1.9)] * 3)
    assert course.signs() == ["divergence"]
    for _ in range(COMPARED_STEPS):
        course.add(START)
    assert course.signs() == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ids", "repeats"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        ([*range(40), *[1, 2, 3, 4, 5] * 7], True),
        ([*range(32)], False),
        ([*([1, 2, 3] * 40), *range(32)], False),  # it has found its way out
        ([one for pair in zip(range(16), [9] * 16, strict=True) for one in pair], False),  # a list
        ([], False),
    ],
)
def test_repetition_is_detected_at_end_of_completion(ids, repeats):
    assert is_repetition(ids) is repeats


# ---- Trainings ------------------------------------------------------------------------------------------------------


COLLAPSES = {
    "learning_rate": 1.0, "max_steps": 22, "logging_steps": 22, "train_dataset": tiny.rows(1),
    "per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 15,
}  # fmt: skip
SIGN = "The student may be collapsing, by its entropy, at step 20 (docs/distributed.md)."
"""At the first step at which there are 10 and 10."""


def test_collapsing_run_warns_once_also_if_it_resumes(trained, tmp_path, caplog):
    whole = trained(**COLLAPSES)
    assert whole.state.global_step == 22
    assert caplog.text.count(SIGN) == 1
    caplog.clear()
    resumed = trained(**COLLAPSES, resume=str(tmp_path / "checkpoint-15"))
    assert caplog.text.count(SIGN) == 1
    courses = [one.methods.get(CollapseGuard).course for one in (whole, resumed)]
    assert courses[0] == courses[1]
