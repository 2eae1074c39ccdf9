"""A divergence, a teacher or weights of one's own that are wrong are named, before the student learns from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from support import tiny

from trl_opsd import FrozenTeacher, OPSDTrainer, Teacher
from trl_opsd.losses import Divergence, ForwardKL, ReverseKL
from trl_opsd.teacher import Resident
from trl_opsd.teacher.teachers import Teachers

pytestmark = pytest.mark.refusal
OURS = ("trl_opsd.teacher", "trl_opsd.loop", "trl_opsd.types.metrics", "trl_opsd.types", "trl_opsd.trainer")


class Own(Teacher):
    """Another teacher whose answers a function may change."""

    def __init__(self, change=lambda rollout, targets: targets):
        self.inner = FrozenTeacher(Resident(tiny.gpt2(48, seed=1), torch.device("cpu")))
        self.change, self.asked = change, 0

    @property
    def head(self):
        return self.inner.head

    @property
    def context(self):
        return self.inner.context

    def targets(self, rollout):
        self.asked += 1
        return self.change(rollout, self.inner.targets(rollout))


def states(change):
    """Changes the hidden states only."""
    return lambda rollout, targets: replace(targets, hidden=change(targets.hidden))


@pytest.fixture
def said(caplog):
    """What was warned of so far by this package."""
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith(OURS)]


SHAPES = {
    "a tensor": (lambda rollout, targets: targets.hidden, "Tensor"),
    "nothing": (lambda rollout, targets: None, "NoneType"),
    "logits": (states(lambda hidden: hidden @ torch.ones(48, 259)), r"\[2, 6, 259\] in torch.float32"),
    "a row": (states(lambda hidden: hidden[:1]), r"\[1, 6, 48\] in .*"),
    "more tokens": (states(lambda hidden: torch.cat([hidden, hidden], 1)), r"\[2, 12, 48\] in .*"),
    "integers": (states(torch.Tensor.long), r"\[2, 6, 48\] in torch.int64"),
    "lists": (states(torch.Tensor.tolist), "in list"),
}
WARNED = {
    "behind": (
        states(lambda hidden: torch.cat([hidden[:, :1], hidden[:, :-1]], 1)),
        "do not depend on the token right before",
    ),
    "hindsight": (states(lambda hidden: hidden + hidden.sum(1, keepdim=True)), "depends on later tokens"),
    "other rows": (states(lambda hidden: hidden.flip(0)), "when called again"),
    "dropout": (states(torch.nn.functional.dropout), "when called again"),
}


def asked(teacher, names=("teacher",), tokens=(4, 6), of_tool=()):
    """What the trainer gets from teachers for rows of so many tokens, some of them the answer of a tool."""
    PartialState(cpu=True)  # warnings are those of the main process
    ids = torch.arange(20).reshape(2, 10) + 40
    mask = (torch.arange(6) < torch.tensor(tokens)[:, None]).long()
    rollout = tiny.rollout(ids[:, :4], ids[:, 4:], mask)
    rollout.weights[:, list(of_tool)] = 0
    return Teachers(dict.fromkeys(names, teacher)).targets(rollout, [*names] * 2)


class TestTeacher:
    @pytest.mark.parametrize("case", SHAPES)
    def test_targets_of_another_kind_name_the_teacher(self, case):
        change, got = SHAPES[case]
        with pytest.raises(ValueError, match=rf"^`Own.targets` returned .*{got}: expected .*\[2, 6, 48\] of floats"):
            asked(Own(change))

    @pytest.mark.quick
    @pytest.mark.parametrize("shift", [1, 2])
    def test_teacher_that_reads_the_token_it_predicts_is_refused(self, shift):
        with pytest.raises(ValueError, match=rf"`Own.targets` .* {shift} tokens? ahead: .*P - 1 : -1"):
            asked(Own(states(lambda hidden: hidden.roll(-shift, 1))))

    def test_the_student_learns_nothing_from_a_shifted_teacher(self, make_trainer):
        trainer = make_trainer(teacher_model=Own(states(lambda hidden: hidden.roll(-1, 1))))
        before = tiny.weights(trainer)
        with pytest.raises(ValueError, match="1 token ahead"):
            trainer.train()
        assert torch.equal(before, tiny.weights(trainer))

    @pytest.mark.parametrize("case", WARNED)
    def test_targets_that_are_hardly_meant_are_said(self, said, case):
        change, words = WARNED[case]
        asked(Own(change))
        assert [words in one and "calls the teacher a second time" in one for one in said()] == [True]

    @pytest.mark.parametrize("tokens", [(4, 6), (2, 2), (1, 0), (0, 0)])
    @pytest.mark.parametrize("of_tool", [(), range(6)], ids=["", "all of a tool"])
    def test_nothing_is_said_of_a_sound_teacher(self, said, tokens, of_tool):
        asked(Own(), tokens=tokens, of_tool=of_tool)
        assert said() == []

    @pytest.mark.parametrize("of_tool", [(4, 5), (2, 3)])
    def test_tokens_that_cannot_count_do_not_mislead(self, said, of_tool):
        asked(Own(), tokens=(1, 6), of_tool=of_tool)
        assert said() == []
        with pytest.raises(ValueError, match="1 token ahead"):
            asked(Own(states(lambda hidden: hidden.roll(-1, 1))), tokens=(1, 6), of_tool=of_tool)

    def test_asking_a_teacher_once_more_keeps_random_numbers(self, trained):
        drawn = []

        class Noisy(Own):
            def targets(self, rollout):
                drawn.append((len(rollout.input_ids), torch.rand(()).item()))
                return super().targets(rollout)

        class Drawing(OPSDTrainer):
            def weigh(self, rollout, rows, targets):
                drawn.append(torch.rand(()).item())
                return rollout.weights

        trainer = trained(Drawing, teacher_model=Noisy(), max_steps=1)
        (rows, _), (again, number), after = drawn
        assert (rows, again) == (2, 2)
        assert number == after
        trainer.train()
        assert len(drawn) == 3 + 2


class InPlace(OPSDTrainer):
    """Writes into the rollout that it is given."""

    def weigh(self, rollout, rows, targets):
        self.write(rollout)
        return rollout.weights


def write_to(name, value=0):
    def write(rollout):
        getattr(rollout, name)[:, -1] = value

    return write


class TestWrittenInPlace:
    @pytest.mark.quick
    @pytest.mark.parametrize("name", ["completion_ids", "completion_mask", "prompt_ids", "prompt_mask"])
    def test_tokens_that_weigh_overwrites_are_refused(self, make_trainer, name):
        trainer = make_trainer(InPlace)
        trainer.write = write_to(name, 1 - tiny.tokenizer()("=")["input_ids"][0])
        with pytest.raises(ValueError, match=r"^`InPlace.teach`, `InPlace.weigh`, or .* in place: change a copy"):
            trainer.train()

    def test_masks_that_a_teacher_overwrites_are_refused(self, make_trainer):
        def masking(rollout, targets):
            rollout.completion_mask[:, 1] = 0
            return targets

        with pytest.raises(ValueError, match=r"^`OPSDTrainer.teach`, `OPSDTrainer.weigh`, or the teacher changed"):
            make_trainer(teacher_model=Own(masking)).train()

    def test_weights_may_be_written_in_place_but_not_for_padding(self, make_trainer):
        rows = [{"prompt": text} for text in tiny.PROMPTS[:2]]
        trainer = make_trainer(InPlace)
        trainer.write = write_to("weights")
        assert trainer.score(rows).rollout.weights[:, -1].eq(0).all()
        trainer.write = lambda rollout: rollout.weights.add_(1)
        with pytest.raises(ValueError, match="which is padding, was not generated by the student, or is excluded"):
            trainer.score(rows)


class Upwards(Divergence):
    """Falls where the student leaves the teacher."""

    def value(self, log_student_RV, log_teacher_RV):
        return -ReverseKL().value(log_student_RV, log_teacher_RV)


class OnlyValue(ReverseKL):
    """Would be minimised as a reverse KL."""

    def value(self, log_student_RV, log_teacher_RV):
        return (log_student_RV - log_teacher_RV).square().sum(-1)


class TestDivergence:
    REFUSED = r"^`OnlyValue.value_and_gradient`, that of `ReverseKL`, does not match `OnlyValue.value`"

    def test_one_that_contradicts_itself_is_refused(self, make_trainer, tmp_path):
        for given in ({"divergence": OnlyValue()}, {"args": tiny.config(tmp_path, divergence=OnlyValue())}):
            with pytest.raises(ValueError, match=self.REFUSED):
                make_trainer(**given)

    def test_only_a_negative_divergence_is_reported(self, make_trainer, said):
        make_trainer(divergence=Upwards())
        assert ["`Upwards.value` is negative, -" in one for one in said()] == [True]
        assert repr(Upwards()) == "Upwards()"
        make_trainer().divergence = ForwardKL()
        assert len(said()) == 1
        make_trainer().divergence = Saturated()
        assert ["The gradient of `Saturated.value` is 0 for" in one for one in said()] == [False, True]


class Weighing(OPSDTrainer):
    """Returns the weights that a test sets."""

    def weigh(self, rollout, rows, targets):
        return self.weighed(rollout.weights)


class Saturated(Divergence):
    """Depends on the student, but has a gradient of 0 everywhere."""

    def value(self, log_student_RV, log_teacher_RV):
        return 1 + 0 * (log_student_RV - log_teacher_RV).sum(-1)


class Surrogate(Divergence):
    """Has the gradient of a KL, and the value 0."""

    def value(self, log_student_RV, log_teacher_RV):
        value_R = ReverseKL().value(log_student_RV, log_teacher_RV)
        return value_R - value_R.detach()


class Comparing(OPSDTrainer):
    """Changes what is returned for a micro-batch."""

    def compare(self, *args):
        return self.change(super().compare(*args))


KIND = r".*: expected `LossParts.* rows of shape \[2, 45\]"
PARTS = {
    "a tensor": (lambda parts: parts.loss, KIND),
    "nothing": (lambda parts: None, KIND),
    "a tuple": (lambda parts: (parts.loss, parts.rows), KIND),
    "a number": (lambda parts: replace(parts, loss=parts.loss.item()), KIND),
    "no graph": (lambda parts: replace(parts, loss=parts.loss.detach()), "a loss without a graph"),
    "a vector": (lambda parts: replace(parts, loss=parts.loss.expand(2)), KIND),
    "one row": (lambda parts: replace(parts, rows=parts.rows.sum(0)), KIND),
}


class TestCompare:
    @pytest.mark.parametrize("case", PARTS)
    def test_parts_of_another_kind_name_the_method(self, make_trainer, case):
        trainer = make_trainer(Comparing)
        trainer.change, got = PARTS[case]
        with pytest.raises(ValueError, match=rf"^`Comparing.compare` returned {got}"):
            trainer.train()

    @pytest.mark.parametrize("accumulated", [1, 2])
    def test_a_nan_in_the_loss_alone_is_called_that(self, make_trainer, accumulated):
        trainer = make_trainer(Comparing, gradient_accumulation_steps=accumulated)
        factors = iter([float("nan"), 1.0])
        trainer.change = lambda parts: replace(parts, loss=parts.loss * next(factors))
        before = tiny.weights(trainer)
        with pytest.raises(
            FloatingPointError, match=r"^The sums of the loss .* but the `loss` is NaN .* in step 1 on rank 0: "
        ):
            trainer.train()
        assert torch.equal(before, tiny.weights(trainer))


class TestFirstStep:
    def test_surrogate_of_value_0_is_no_equal_teacher(self, trained, said):
        trainer = trained(divergence=Surrogate(), max_steps=1)
        assert trainer.state.log_history[0]["grad_norm"] > 1e-2
        assert said() == []


class Root(Divergence):
    """Sound, but for its gradient where both models agree, and for what a test has it multiplied with."""

    factor = 1.0

    def value(self, log_student_RV, log_teacher_RV):
        return self.factor * ReverseKL().value(log_student_RV, log_teacher_RV).abs().sqrt()


class TestNotFinite:
    @pytest.mark.quick
    @pytest.mark.parametrize("factor", [float("nan"), float("inf")])
    def test_a_value_is_blamed_on_the_divergence(self, make_trainer, factor):
        trainer = make_trainer(divergence=Root())
        trainer.divergence.factor = factor
        with pytest.raises(FloatingPointError, match=r"^The logits of both .* but the divergence .* in step 1 "):
            trainer.train()

    @pytest.mark.parametrize("policy", ["raise", "skip"])
    def test_a_gradient_is_blamed_on_the_divergence(self, make_trainer, said, policy):
        rows = tiny.rows().add_column("teacher_prompt", tiny.PROMPTS)
        student = {"teacher_model": None, "teacher_model_kind": "live", "train_dataset": rows}
        trainer = make_trainer(divergence=Root(), nonfinite=policy, max_steps=1, **student)
        before = tiny.weights(trainer)
        if policy == "raise":
            with pytest.raises(FloatingPointError, match=r"^The logits of both .* but the divergence .* in step 1"):
                trainer.train()
        else:
            trainer.train()
            assert any("Skipped: The logits of both models are finite, but" in one for one in said())
        assert torch.equal(before, tiny.weights(trainer))


@pytest.mark.quick
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_only_ratios_of_weights_count(make_trainer, factor):
    trainers = [make_trainer(Weighing, max_steps=2, gradient_accumulation_steps=2) for _ in range(2)]
    for trainer, scale in zip(trainers, (1, factor), strict=True):
        trainer.weighed = lambda weights, scale=scale: weights * scale
        trainer.train()
    ones, scaled = ([entry["grad_norm"] for entry in one.state.log_history[:2]] for one in trainers)
    assert scaled == pytest.approx(ones, rel=1e-4)
