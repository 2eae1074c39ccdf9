"""The streamed divergence equals the dense one, in values and gradients, for all arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from heads import excluding, lower
from test_cost import STUDENT, TOKENS, VOCABULARY, counted_flops
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from trl_opsd import losses
from trl_opsd.losses import (
    Divergence,
    ForwardKL,
    GeneralizedJSD,
    LazyLogits,
    OutputHead,
    ReverseKL,
    SampledReverseKL,
    dense_divergence,
    streamed_divergence,
)
from trl_opsd.losses.divergence import Entrywise
from trl_opsd.losses.streamed import streamed_entropy

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class OwnKL(Divergence):
    """A divergence as a user would write it, with its gradient by autograd."""

    skew: float

    def value(self, log_student_RV, log_teacher_RV):
        shares = math.log(1 - self.skew), math.log(self.skew)
        mixture_RV = torch.logaddexp(log_teacher_RV + shares[0], log_student_RV + shares[1])
        return (log_student_RV.exp() * (log_student_RV - mixture_RV)).sum(-1)


MADE = [make() for make in losses.DIVERGENCES.values()]
NAMED = [*(one for one in MADE if one != SampledReverseKL()), GeneralizedJSD(0.1)]
ENTRYWISE = [one for one in NAMED if isinstance(one, Entrywise)]
every_entrywise = pytest.mark.parametrize("divergence", ENTRYWISE, ids=repr)
every_divergence = pytest.mark.parametrize("divergence", [*NAMED, OwnKL(0.2)], ids=repr)
each_head = pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])


def cut(side, rows):
    """The first rows of a head alone."""
    head = side.head
    return replace(
        side, head=replace(head, weight=head.weight[:rows], bias=None if head.bias is None else head.bias[:rows])
    )


class TestEqualsTheOracle:
    @every_divergence
    @each_head
    @pytest.mark.parametrize(
        ("tokens", "vocabulary", "chunk", "block"),
        [(1, 37, None, None), (2, 3, 1, None), *((7, 37, one, None) for one in (3, 7, 50)), (13, 1001, 4, 1)],
    )
    def test_values_entropies_and_gradients_equal_the_oracle(
        self, make_pair, assert_equals_oracle, divergence, rich, tokens, vocabulary, chunk, block, monkeypatch
    ):
        if block is not None:  # one row of a tile at a time
            monkeypatch.setattr("trl_opsd.losses.streamed._BLOCK_ELEMENTS", {"cpu": block})
        assert_equals_oracle(make_pair(tokens, vocabulary, rich=rich), divergence, chunk_tokens=chunk)

    @every_divergence
    @pytest.mark.parametrize("setting", ["bias", "scale", "softcap", "temperature"])
    @pytest.mark.parametrize("side", ["student", "teacher"])
    def test_each_setting_acts_on_its_own_side_only(self, make_pair, assert_equals_oracle, divergence, setting, side):
        plain, rich = (dict(zip(("student", "teacher"), make_pair(rich=kind), strict=True)) for kind in (False, True))
        if setting == "temperature":
            changed = replace(plain[side], temperature=rich[side].temperature)
        else:
            value = getattr(rich[side].head, setting)
            changed = replace(plain[side], head=replace(plain[side].head, **{setting: value}))
        found, _ = assert_equals_oracle(tuple({**plain, side: changed}.values()), divergence)
        without = dense_divergence(*plain.values(), divergence).divergence
        assert not torch.allclose(found.divergence.detach(), without, rtol=1e-3)

    @every_divergence
    def test_no_tokens_give_empty_values_and_zero_gradients(self, make_pair, gradients, divergence, nan_in_new_memory):
        per_token, grads = gradients(streamed_divergence, make_pair(0, rich=True), divergence)
        assert [value.shape for value in (per_token.divergence, per_token.student_entropy)] == [(0,), (0,)]
        assert_close(grads, [torch.zeros(0, 5), torch.zeros(37, 5), torch.zeros(37)])


class TestClip:
    """`kl_clip`: no token of the vocabulary adds more than so many nats."""

    @every_entrywise
    @each_head
    @pytest.mark.parametrize("clip", [0.005, 0.1, 100.0])
    def test_a_clipped_divergence_equals_the_oracle(self, make_pair, assert_equals_oracle, divergence, rich, clip):
        weights = torch.linspace(0, 2, 11)
        found, _ = assert_equals_oracle(make_pair(11, rich=rich), divergence, weights, 4, kl_clip=clip)
        assert found.clipped.sum() > 0 if clip < 0.1 else clip < 100 or found.clipped.sum() == 0


UPSTREAMS = {
    "sum": torch.Tensor.sum,
    "mean": torch.Tensor.mean,
    "scaled sum": lambda d: d.sum() * -0.3,
    "one token": lambda d: d[2],
    "different for each token": lambda d: (d * torch.linspace(-1, 2, len(d))).sum(),
    "nonlinear": lambda d: d.square().sum(),
    "none": lambda d: d.sum() * 0,
}


class TestUpstreamGradient:
    @every_divergence
    @pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
    @pytest.mark.parametrize("upstream", UPSTREAMS.values(), ids=UPSTREAMS)
    def test_gradients_are_right_for_any_upstream_gradient(
        self, make_pair, assert_equals_oracle, divergence, upstream, weighted
    ):
        weights = torch.linspace(-1, 2, 7) if weighted else None
        assert_equals_oracle(make_pair(rich=True), divergence, weights, 3, upstream=upstream, atol=1e-4)

    def test_a_second_backward_adds_the_same_gradient_again(self, make_pair, gradients):
        student, teacher = make_pair()
        weight = student.head.weight.requires_grad_()
        loss = streamed_divergence(student, teacher, ReverseKL()).divergence.sum() / 7
        loss.backward(retain_graph=True)
        loss.backward()
        streamed_divergence(student, teacher, ReverseKL()).divergence.sum().backward()
        _, (_, expected) = gradients(dense_divergence, (student, teacher), ReverseKL())
        assert_close(weight.grad, (1 + 2 / 7) * expected, rtol=1e-4, atol=2e-5)

    def test_teacher_weights_and_entropies_get_no_gradient(self, make_pair):
        student, teacher = make_pair()
        weights = torch.ones(7, requires_grad=True)
        tensors = (student.hidden, teacher.hidden, teacher.head.weight)
        for tensor in tensors:
            tensor.requires_grad_()
        per_token = streamed_divergence(student, teacher, ForwardKL(), weights)
        per_token.divergence.sum().backward()
        assert [tensor.grad is None for tensor in (*tensors, weights)] == [False, True, True, True]
        assert not per_token.student_entropy.requires_grad
        assert not per_token.teacher_entropy.requires_grad

    @pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("bias",), ("hidden", "bias"), ("weight", "bias")])
    def test_freezing_a_parameter_changes_no_other_gradient(self, make_pair, assert_equals_oracle, frozen):
        assert_equals_oracle(make_pair(rich=True), ReverseKL(), frozen=frozen)

    def test_a_changed_input_and_a_second_derivative_are_errors(self, make_pair):
        student, teacher = make_pair()
        hidden = student.hidden.requires_grad_()
        loss = streamed_divergence(student, teacher, ForwardKL()).divergence.square().sum()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
        student, teacher = make_pair()
        student.head.weight.requires_grad_()
        loss = streamed_divergence(student, teacher, ForwardKL()).divergence.sum()
        student.hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestExtremes:
    @pytest.mark.parametrize(
        ("divergence", "clip"), [*((one, None) for one in NAMED), *((one, 1e-6) for one in ENTRYWISE)], ids=str
    )
    def test_identical_models_have_no_divergence_and_no_gradient(self, make_pair, gradients, divergence, clip):
        student, _ = make_pair(rich=True)
        per_token, grads = gradients(streamed_divergence, (student, student), divergence, kl_clip=clip)
        assert not any(one.any() for one in (per_token.divergence, per_token.clipped, *grads))
        assert_close(per_token.student_entropy, per_token.teacher_entropy)

    @pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
    def test_jsd_of_nearly_equal_models_is_not_lost_in_rounding(self, make_pair, beta):
        student, _ = make_pair()
        near = replace(student, hidden=student.hidden * (1 + 1e-3))
        ours, oracle = (f(student, near, GeneralizedJSD(beta)) for f in (streamed_divergence, dense_divergence))
        assert (oracle.divergence < 1e-5).all()
        assert_close(ours.divergence, oracle.divergence, rtol=0.02, atol=2e-9)

    @every_divergence
    def test_columns_excluded_in_both_models_equal_removed_columns(self, make_pair, gradients, assert_same, divergence):
        sides = [excluding(side, range(30, 37)) for side in make_pair()]
        per_token, (hidden, *head) = gradients(streamed_divergence, sides, divergence)
        expected = gradients(dense_divergence, [cut(side, 30) for side in sides], divergence)
        assert_same((per_token, [hidden, *(one[:30] for one in head)]), expected)
        assert not any(one[30:].any() for one in head)

    @pytest.mark.parametrize(
        ("divergence", "side", "columns"),
        [
            *((one, "teacher", (0, 5, 36)) for one in NAMED if one != ReverseKL()),
            # A thread of the kernel has eight adjacent ones, and so no other.
            (ReverseKL(), "student", range(8, 24)),
        ],
        ids=str,
    )
    def test_columns_excluded_by_one_model_give_no_nan(
        self, make_pair, assert_equals_oracle, divergence, side, columns
    ):
        student, teacher = make_pair()
        pair = (excluding(student, columns), teacher) if side == "student" else (student, excluding(teacher, columns))
        assert_equals_oracle(pair, divergence)

    def test_an_infinite_divergence_leaves_other_tokens_alone(self, make_pair):
        student, teacher = make_pair()
        weights = torch.tensor([1.0, 0, 0, 1, 0, 0, 0])
        per_token = streamed_divergence(student, excluding(teacher, [5]), ReverseKL(), weights)
        assert per_token.divergence.tolist() == [torch.inf, 0, 0, torch.inf, 0, 0, 0]

    @every_divergence
    @pytest.mark.parametrize("rich", [False, True], ids=["plain", "capped"])
    def test_logits_of_ten_thousand_give_finite_and_right_results(self, gradients, divergence, rich):
        torch.manual_seed(0)
        logits = torch.randint(-10_000, 10_001, (2, 6, 9)).float()
        eye = OutputHead(torch.eye(9), softcap=9_000.0 if rich else None)
        pair = LazyLogits(logits[0], eye), LazyLogits(logits[1], eye)
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if rich else {"rtol": 1e-5, "atol": 1e-5}
        ours, oracle = (gradients(f, pair, divergence) for f in (streamed_divergence, dense_divergence))
        assert_close(ours[0].divergence, oracle[0].divergence, **tolerance)
        assert_close(ours[1][0], oracle[1][0], **tolerance)

    @pytest.mark.parametrize("temperature", [0.01, 1.0, 1000.0])
    @pytest.mark.parametrize("spread", [0.0, 1e-3])
    def test_equal_teacher_logits_are_told_from_nearly_equal_ones(self, make_pair, temperature, spread):
        """Spread by 1e-3 over 5,000 ids, the entropy is less than 1e-6 nats from that of equal logits."""
        student, teacher = make_pair(vocabulary=5000, rich=True)
        head = replace(teacher.head, weight=teacher.head.weight * spread, bias=torch.full((5000,), 0.3))
        pair = student, replace(teacher, head=head, temperature=temperature)
        for compute in (streamed_divergence, dense_divergence):
            assert compute(*pair, ReverseKL()).teacher_uniform.tolist() == [spread == 0] * 7

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equal_rows_of_heads_give_equal_logits_in_any_precision(self, make_pair, dtype):
        student, teacher = make_pair(vocabulary=5000)
        head = replace(teacher.head, weight=teacher.head.weight[:1].expand(5000, -1).contiguous().to(dtype))
        same = streamed_divergence(student, replace(teacher, hidden=teacher.hidden.to(dtype), head=head), ReverseKL())
        assert same.teacher_uniform.all()


@pytest.mark.parametrize("vocabulary", [None, 1001])
def test_products_have_aligned_strides_for_any_vocabulary_size(gradients, vocabulary):
    class Strides(TorchDispatchMode):
        found: ClassVar[set[int]] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in function.__name__:
                matrices = (one for one in args if isinstance(one, torch.Tensor))
                self.found |= {max(one.stride()) for one in matrices if min(one.shape) > 1}
            return function(*args, **(kwargs or {}))

    def side(width, rows):
        return LazyLogits(torch.randn(9, width), OutputHead(torch.randn(rows, width)))

    rows = (1001, 1001) if vocabulary is None else (1024, 1088)
    with Strides() as strides:
        gradients(streamed_divergence, (side(64, rows[0]), side(128, rows[1])), ForwardKL(), None, 4, vocabulary)
    assert {stride % 64 for stride in strides.found} == {0}
    assert {64, 128, 1024} == strides.found


class TestPrecision:
    @every_divergence
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_is_no_worse_than_the_naive_program(self, make_pair, gradients, divergence, dtype):
        def naive(student, teacher, divergence):
            """Low-precision logits, float32 log-softmax, autograd."""
            logs = [(side.hidden @ side.head.weight.T).float().log_softmax(-1) for side in (student, teacher)]
            entropies = [-(log.exp() * log).sum(-1) for log in logs]
            return losses.PerToken(
                divergence=divergence.value(*logs), student_entropy=entropies[0], teacher_entropy=entropies[1]
            )

        pair = tuple(lower(side, dtype) for side in make_pair(32, 501))
        widened = tuple(lower(side, torch.float64) for side in pair)
        oracle = gradients(dense_divergence, widened, divergence)
        ours, rival = (gradients(f, pair, divergence) for f in (streamed_divergence, naive))
        assert [gradient.dtype for gradient in ours[1]] == [dtype, dtype]

        def errors(result):
            found, truth = ([one.divergence, one.student_entropy, *grads] for one, grads in (result, oracle))
            return [(a.double() - b.double()).norm().item() for a, b in zip(found, truth, strict=True)]

        for error, naive_error in zip(errors(ours), errors(rival), strict=True):
            assert error <= 1.01 * naive_error

    def test_each_gradient_has_the_dtype_of_its_parameter(self, make_pair, gradients):
        student, teacher = make_pair(rich=True)
        student = replace(student, hidden=student.hidden.bfloat16())
        _, grads = gradients(streamed_divergence, (student, teacher), ForwardKL())
        assert [gradient.dtype for gradient in grads] == [torch.bfloat16, torch.float32, torch.float32]

    @every_divergence
    @pytest.mark.parametrize(("upstream", "atol"), [("sum", 2e-5), ("nonlinear", 1e-3)])
    def test_autocast_of_the_forward_only_rounds_the_inputs(
        self, make_pair, gradients, assert_same, divergence, upstream, atol
    ):
        """Also where the gradient of the head is computed again in the backward pass."""

        def autocast(*args):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return streamed_divergence(*args, chunk_tokens=3)

        pair, given = make_pair(), {"upstream": UPSTREAMS[upstream]}
        rounded = tuple(lower(lower(side, torch.bfloat16), torch.float32) for side in pair)
        ours = gradients(autocast, pair, divergence, **given)
        assert_same(ours, gradients(dense_divergence, rounded, divergence, **given), atol=atol)
        assert [gradient.dtype for gradient in ours[1]] == [torch.float32, torch.float32]


class TestPaddedVocabularies:
    """64 ids that both models know, in heads of 64 and 80 rows."""

    @every_divergence
    @each_head
    @pytest.mark.parametrize("sizes", [(64, 80), (80, 64), (72, 80)], ids="student {0[0]}, teacher {0[1]}".format)
    def test_ids_that_only_one_model_knows_equal_removed_ids(
        self, make_pair, gradients, assert_same, divergence, rich, sizes, nan_in_new_memory
    ):
        student, teacher = (cut(side, rows) for side, rows in zip(make_pair(9, 80, rich=rich), sizes, strict=True))
        oracle, (hidden, *head) = gradients(dense_divergence, (cut(student, 64), cut(teacher, 64)), divergence)
        padding = sizes[0] - 64
        expected = [hidden, *(torch.cat([part, part.new_zeros(padding, *part.shape[1:])]) for part in head)]
        for compute in (streamed_divergence, dense_divergence):
            ours = gradients(compute, (student, teacher), divergence, chunk_tokens=4, vocabulary=64)
            assert_same(ours, (oracle, expected), atol=2e-6)


@pytest.mark.parametrize("chunk", [None, 5])
@each_head
@pytest.mark.parametrize("vocabulary", [None, 41])
def test_streamed_entropy_equals_the_dense_one_with_one_product(make_pair, chunk, rich, vocabulary):
    student, teacher = make_pair(TOKENS, VOCABULARY, rich=rich)
    expected = dense_divergence(student, teacher, ForwardKL(), vocabulary=vocabulary).student_entropy
    with counted_flops() as counter:
        found = streamed_entropy(student, chunk, vocabulary)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert counter.get_total_flops() == STUDENT * (vocabulary or VOCABULARY) // VOCABULARY
    assert streamed_entropy(make_pair(0)[0]).shape == (0,)
