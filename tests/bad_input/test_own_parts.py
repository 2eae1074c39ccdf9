"""A divergence, a teacher or weights of one's own that are wrong are named, before the student learns from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from support import tiny

from trl_opsd import FrozenTeacher, OPSDTrainer, Teacher
from trl_opsd.errors import NonFiniteError
from trl_opsd.losses import Divergence, ForwardKL, ReverseKL
from trl_opsd.teacher import Resident
from trl_opsd.teacher.teachers import Teachers

pytestmark = pytest.mark.refusal
OURS = ("trl_opsd.teacher", "trl_opsd.loop", "trl_opsd.types.metrics", "trl_opsd.types", "trl_opsd.trainer")


@pytest.fixture
def said(caplog):
    """What was warned of so far by this package."""
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith(OURS)]


# ---- A teacher -------------------------------------------------------------------------------------------------------


class Own(Teacher):
    """Another teacher whose answers a function may change."""

    def __init__(self, change=lambda rollout, targets: targets):
        self.inner = FrozenTeacher(Resident(tiny.gpt2(48, seed=1), torch.device("cpu")))
        self.change = change

    @property
    def head(self):
        return self.inner.head

    @property
    def context(self):
        return self.inner.context

    def targets(self, rollout):
        return self.change(rollout, self.inner.targets(rollout))


def states(change):
    """Changes the hidden states only."""
    return lambda rollout, targets: replace(targets, hidden=change(targets.hidden))


def ahead(tokens):
    """States of the tokens that follow."""
    return states(lambda hidden: hidden.roll(-tokens, 1))


def asked(teacher, tokens=(4, 6), of_tool=(), times=1):
    """Has a teacher score rows of so many tokens, some of them the answer of a tool."""
    PartialState(cpu=True)  # warnings are those of the main process
    ids = torch.arange(20).reshape(2, 10) + 40
    mask = (torch.arange(6) < torch.tensor(tokens)[:, None]).long()
    rollout = tiny.rollout(ids[:, :4], ids[:, 4:], mask)
    rollout.weights[:, list(of_tool)] = 0
    teachers = Teachers({"teacher": teacher})
    for _ in range(times):
        teachers.targets(rollout, ["teacher"] * 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda rollout, targets: targets.hidden,
        lambda rollout, targets: None,
        states(lambda hidden: hidden @ torch.ones(48, 259)),  # logits
        states(lambda hidden: hidden[:1]),
        states(lambda hidden: torch.cat([hidden, hidden], 1)),
        states(torch.Tensor.long),
        states(torch.Tensor.tolist),
    ],
)
def test_targets_of_another_kind_name_the_teacher(change):
    with pytest.raises(ValueError, match=r"^`Own.targets` returned .*: expected .*\[2, 6, 48\] of floats"):
        asked(Own(change))


@pytest.mark.quick
@pytest.mark.parametrize("shift", [1, 2])
def test_teacher_that_reads_the_token_it_predicts_is_refused(refuses, shift):
    with pytest.raises(ValueError, match=rf"`Own.targets` .* {shift} tokens? ahead"):
        asked(Own(ahead(shift)))
    refuses("ahead", {"teacher_model": Own(ahead(shift))})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (states(lambda hidden: torch.cat([hidden[:, :1], hidden[:, :-1]], 1)), "do not depend on the token right"),
        (states(lambda hidden: hidden + hidden.sum(1, keepdim=True)), "depend on later tokens"),
        (states(lambda hidden: hidden.flip(0)), "when called again"),
        (states(torch.nn.functional.dropout), "when called again"),
    ],
)
def test_targets_that_are_hardly_meant_warn(said, change, words):
    asked(Own(change))
    assert [words in one for one in said()] == [True]


@pytest.mark.parametrize("tokens", [(4, 6), (2, 2), (1, 0), (0, 0)])
@pytest.mark.parametrize("of_tool", [(), range(6)], ids=["", "all of a tool"])
def test_nothing_is_said_of_a_sound_teacher(said, tokens, of_tool):
    asked(Own(), tokens=tokens, of_tool=of_tool)
    assert said() == []


@pytest.mark.parametrize("of_tool", [(4, 5), (2, 3)])
def test_tokens_that_cannot_count_do_not_mislead(said, of_tool):
    asked(Own(), tokens=(1, 6), of_tool=of_tool)
    assert said() == []
    with pytest.raises(ValueError, match="1 token ahead"):
        asked(Own(ahead(1)), tokens=(1, 6), of_tool=of_tool)


def test_asking_a_teacher_once_more_keeps_random_numbers():
    drawn = []

    def drawing(rollout, targets):
        drawn.append(torch.rand(()).item())
        return targets

    asked(Own(drawing), times=2)
    assert len(drawn) == 3, "once more in the first call"
    assert len({*drawn}) == 2
    assert drawn[1] == drawn[2]


# ---- What is written in place ----------------------------------------------------------------------------------------


def writing(write):
    """A trainer that writes into the rollout that it is given."""

    class InPlace(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            write(rollout)
            return rollout.weights

    return InPlace


@pytest.mark.quick
@pytest.mark.parametrize("name", ["completion_ids", "completion_mask", "prompt_ids", "prompt_mask"])
def test_tokens_that_weigh_overwrites_are_refused(refuses, name):
    other = 1 - tiny.tokenizer()("=")["input_ids"][0]
    refuses("`InPlace.weigh`", {"cls": writing(lambda rollout: getattr(rollout, name)[:, -1].fill_(other))})


def test_masks_that_a_teacher_overwrites_are_refused(refuses):
    def masking(rollout, targets):
        rollout.completion_mask[:, 1] = 0
        return targets

    refuses("or the teacher changed", {"teacher_model": Own(masking)})


def test_weights_may_be_written_in_place_but_not_for_padding(make_trainer):
    rows = [{"prompt": text} for text in tiny.PROMPTS[:2]]
    trainer = make_trainer(writing(lambda rollout: rollout.weights[:, -1].fill_(0)))
    assert trainer.score(rows).rollout.weights[:, -1].eq(0).all()
    trainer = make_trainer(writing(lambda rollout: rollout.weights.add_(1)))
    with pytest.raises(ValueError, match="which is padding"):
        trainer.score(rows)


class Scaled(OPSDTrainer):
    factor = 1.0

    def weigh(self, rollout, rows, targets):
        return rollout.weights * self.factor


@pytest.mark.quick
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_only_ratios_of_weights_count(trained, factor):
    classes = Scaled, type("Other", (Scaled,), {"factor": factor})
    ones, scaled = (
        tiny.logged(trained(cls, max_steps=2, gradient_accumulation_steps=2), "grad_norm") for cls in classes
    )
    assert scaled == pytest.approx(ones, rel=1e-4)


# ---- A divergence ----------------------------------------------------------------------------------------------------


class Upwards(Divergence):
    """Falls where the student leaves the teacher."""

    def value(self, log_student_RV, log_teacher_RV):
        return -ReverseKL().value(log_student_RV, log_teacher_RV)


class OnlyValue(ReverseKL):
    """Would be minimised as a reverse KL."""

    def value(self, log_student_RV, log_teacher_RV):
        return (log_student_RV - log_teacher_RV).square().sum(-1)


class Saturated(Divergence):
    """Depends on the student, but has a gradient of 0 everywhere."""

    def value(self, log_student_RV, log_teacher_RV):
        return 1 + 0 * (log_student_RV - log_teacher_RV).sum(-1)


class Root(Divergence):
    """Sound, but for its gradient where both models agree, and for what a test has it multiplied with."""

    factor = 1.0

    def value(self, log_student_RV, log_teacher_RV):
        return self.factor * ReverseKL().value(log_student_RV, log_teacher_RV).abs().sqrt()


def test_one_that_contradicts_itself_is_refused(refuses, tmp_path):
    for given in ({"divergence": OnlyValue()}, {"args": tiny.config(tmp_path, divergence=OnlyValue())}):
        refuses("`OnlyValue.value_and_gradient`, that of `ReverseKL`", given)


def test_only_a_negative_divergence_is_reported(make_trainer, said):
    make_trainer(divergence=Upwards())
    assert ["`Upwards.value` is negative" in one for one in said()] == [True]
    make_trainer().divergence = ForwardKL()
    assert len(said()) == 1
    make_trainer().divergence = Saturated()
    assert ["The gradient of `Saturated.value` is 0" in one for one in said()] == [False, True]


@pytest.mark.quick
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_value_is_blamed_on_the_divergence(make_trainer, factor):
    trainer = make_trainer(divergence=Root())
    trainer.divergence.factor = factor
    with pytest.raises(FloatingPointError, match=r"^The logits of both .* but the divergence .* in step 1: "):
        trainer.train()


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_gradient_is_blamed_on_the_divergence(refuses, make_trainer, said, policy):
    rows = tiny.rows().add_column("teacher_prompt", tiny.PROMPTS)
    given = {"teacher_model": None, "teacher_model_kind": "live", "train_dataset": rows, "divergence": Root()}
    if policy == "raise":
        refuses(r"^The logits of both .* but the divergence .* in step 1", given, NonFiniteError)
        return
    trainer = make_trainer(**given, nonfinite="skip", max_steps=1)
    before = tiny.weights(trainer)
    trainer.train()
    assert any("Skipped: The logits of both models are finite, but" in one for one in said())
    assert torch.equal(before, tiny.weights(trainer))


# ---- What `compare` returns ------------------------------------------------------------------------------------------


def comparing(change):
    """A trainer that changes what is returned for a micro-batch."""

    class Comparing(OPSDTrainer):
        def compare(self, *args):
            return change(super().compare(*args))

    return Comparing


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda parts: parts.loss, "Tensor: expected"),
        (lambda parts: None, "NoneType: expected"),
        (lambda parts: replace(parts, loss=parts.loss.item()), "LossParts: expected"),
        (lambda parts: replace(parts, loss=parts.loss.detach()), "a loss without a graph"),
        (lambda parts: replace(parts, loss=parts.loss.expand(2)), "LossParts: expected"),
        (lambda parts: replace(parts, rows=parts.rows.sum(0)), "LossParts: expected"),
    ],
)
def test_parts_of_another_kind_name_the_method(refuses, change, named):
    refuses(f"^`Comparing.compare` returned {named}", {"cls": comparing(change)})


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_nan_in_the_loss_alone_is_an_error(refuses, accumulated):
    factors = iter([float("nan"), 1.0])
    cls = comparing(lambda parts: replace(parts, loss=parts.loss * next(factors)))
    given = {"cls": cls, "gradient_accumulation_steps": accumulated}
    refuses(r"are finite, but the loss or the student's gradient is NaN .* in step 1: ", given, NonFiniteError)
