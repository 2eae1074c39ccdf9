"""The streamed divergence equals the dense one, in values and gradients, for all arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
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
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def assert_same(ours, oracle, **tolerance):
    (per_token, grads), (expected, expected_grads) = ours, oracle
    for name in ("divergence", "student_entropy", "teacher_entropy"):
        assert_close(getattr(per_token, name), getattr(expected, name), msg=lambda m, n=name: f"{n}: {m}", **tolerance)
        assert getattr(per_token, name).dtype == torch.float32
    assert_close(grads, expected_grads, **tolerance)


class TestEqualsTheOracle:
    @every_divergence
    @pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
    @pytest.mark.parametrize(
        ("tokens", "vocabulary", "chunk"),
        [(1, 37, None), (2, 3, 1), (7, 37, 3), (7, 37, 7), (7, 37, 50), (13, 1001, 4)],
    )
    def test_values_entropies_and_gradients_equal_the_oracle(
        self, make_pair, gradients, divergence, rich, tokens, vocabulary, chunk
    ):
        pair = make_pair(tokens, vocabulary, rich=rich)
        ours = gradients(streamed_divergence, pair, divergence, chunk_tokens=chunk)
        assert_same(ours, gradients(dense_divergence, pair, divergence), **CLOSE)

    @every_divergence
    @pytest.mark.parametrize("setting", ["bias", "scale", "softcap", "temperature"])
    @pytest.mark.parametrize("side", ["student", "teacher"])
    def test_each_setting_acts_on_its_own_side_only(self, make_pair, gradients, divergence, setting, side):
        plain, rich = (dict(zip(("student", "teacher"), make_pair(rich=kind), strict=True)) for kind in (False, True))
        if setting == "temperature":
            changed = replace(plain[side], temperature=rich[side].temperature)
        else:
            value = getattr(rich[side].head, setting)
            changed = replace(plain[side], head=replace(plain[side].head, **{setting: value}))
        pair = tuple({**plain, side: changed}.values())
        oracle = gradients(dense_divergence, pair, divergence)
        assert not torch.allclose(
            oracle[0].divergence, dense_divergence(*plain.values(), divergence).divergence, rtol=1e-3
        )
        assert_same(gradients(streamed_divergence, pair, divergence), oracle, **CLOSE)

    @every_divergence
    def test_weights_multiply_values_and_gradients(self, make_pair, gradients, divergence):
        pair, weights = make_pair(rich=True), torch.linspace(-1, 2, 7)
        ours = gradients(streamed_divergence, pair, divergence, weights, 3)
        assert_same(ours, gradients(dense_divergence, pair, divergence, weights), **CLOSE)

    @every_divergence
    def test_chunk_size_changes_nothing(self, make_pair, gradients, divergence):
        pair = make_pair(11, rich=True)
        whole = gradients(streamed_divergence, pair, divergence)
        for chunk in (1, 3, 11, 12):
            assert_same(
                gradients(streamed_divergence, pair, divergence, chunk_tokens=chunk), whole, rtol=1e-5, atol=1e-6
            )

    @every_divergence
    def test_one_vocabulary_row_per_block_changes_nothing(self, make_pair, gradients, divergence, monkeypatch):
        pair = make_pair(11, rich=True)
        whole = gradients(streamed_divergence, pair, divergence, torch.arange(11.0), 4)
        monkeypatch.setattr("trl_opsd.losses.streamed._BLOCK_ELEMENTS", {"cpu": 1})
        assert_same(
            gradients(streamed_divergence, pair, divergence, torch.arange(11.0), 4), whole, rtol=1e-5, atol=1e-6
        )

    @every_divergence
    def test_no_tokens_give_empty_values_and_zero_gradients(self, make_pair, gradients, divergence, nan_in_new_memory):
        per_token, grads = gradients(streamed_divergence, make_pair(0, rich=True), divergence)
        assert [value.shape for value in (per_token.divergence, per_token.student_entropy)] == [(0,), (0,)]
        assert_close(grads, [torch.zeros(0, 5), torch.zeros(37, 5), torch.zeros(37)])

    @every_divergence
    def test_a_token_of_zero_weight_equals_a_token_left_out(self, make_pair, gradients, divergence):
        student, teacher = make_pair(9, rich=True)
        keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 0]).bool()
        masked, (hidden, *head) = gradients(streamed_divergence, (student, teacher), divergence, keep.float(), 4)
        subset = tuple(replace(side, hidden=side.hidden[keep]) for side in (student, teacher))
        picked, (picked_hidden, *picked_head) = gradients(streamed_divergence, subset, divergence)
        assert_close(masked.divergence[keep], picked.divergence)
        assert_close([hidden[keep], *head], [picked_hidden, *picked_head], rtol=1e-5, atol=1e-6)
        assert masked.divergence[~keep].eq(0).all()
        assert hidden[~keep].eq(0).all()


class TestClip:
    """`kl_clip`: no token of the vocabulary adds more than so many nats."""

    @every_entrywise
    @pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
    @pytest.mark.parametrize("clip", [0.005, 0.1, 100.0])
    def test_a_clipped_divergence_equals_the_oracle(self, make_pair, gradients, divergence, rich, clip):
        pair, weights = make_pair(11, rich=rich), torch.linspace(0, 2, 11)
        ours, oracle = (
            gradients(compute, pair, divergence, weights, 4, kl_clip=clip)
            for compute in (streamed_divergence, dense_divergence)
        )
        assert_same(ours, oracle, **CLOSE)
        assert ours[0].clipped.tolist() == oracle[0].clipped.tolist()
        assert ours[0].clipped.sum() > 0 if clip < 0.1 else clip < 100 or ours[0].clipped.sum() == 0

    def test_the_gradients_are_those_of_opsd(self, make_pair):
        """`p_s P - p_t` and `p_s (r - E)` with `r = log(p_s / p_t) + 1`, over the entries that are not clipped."""
        student, teacher = make_pair(5, 37)
        student = replace(student, head=OutputHead(torch.eye(5).repeat(8, 1)[:37]))
        for divergence in (ForwardKL(), ReverseKL()):
            student.hidden.requires_grad_().grad = None
            streamed_divergence(student, teacher, divergence, kl_clip=0.02).divergence.sum().backward()
            log_s, log_t = ((side.hidden @ side.head.weight.T).double().log_softmax(-1) for side in (student, teacher))
            s, t = log_s.exp().detach(), log_t.exp()
            if divergence == ForwardKL():
                kept = t * (log_t - log_s) <= 0.02
                expected = s * (t * kept).sum(-1, keepdim=True) - t * kept
            else:
                kept, ratio = s * (log_s - log_t) <= 0.02, log_s - log_t + 1
                expected = s * (kept * ratio - (kept * s * ratio).sum(-1, keepdim=True))
            assert not kept.all()
            assert_close(student.hidden.grad, (expected @ student.head.weight.double()).float(), **CLOSE)

    def test_a_clipped_kl_may_be_negative(self, make_pair):
        per_token = streamed_divergence(*make_pair(vocabulary=501), ForwardKL(), kl_clip=1e-4)
        assert per_token.divergence.max() < 0

    def test_nothing_is_clipped_where_the_models_agree(self, make_pair, gradients):
        student, _ = make_pair(rich=True)
        for divergence in ENTRYWISE:
            per_token, grads = gradients(streamed_divergence, (student, student), divergence, kl_clip=1e-6)
            assert per_token.divergence.eq(0).all()
            assert per_token.clipped.eq(0).all()
            assert all(gradient.eq(0).all() for gradient in grads)

    @pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
    def test_a_clip_that_is_not_above_0_is_refused(self, make_pair, clip):
        with pytest.raises(ValueError, match=f"kl_clip is {clip}, expected a number above 0"):
            streamed_divergence(*make_pair(), ForwardKL(), kl_clip=clip)

    def test_a_custom_divergence_is_not_clipped(self, make_pair):
        with pytest.raises(ValueError, match=r"with OwnKL\(.*\), which is not a sum over vocabulary entries"):
            streamed_divergence(*make_pair(), OwnKL(0.2), kl_clip=0.05)


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
    def test_gradients_are_right_for_any_upstream_gradient(self, make_pair, gradients, divergence, upstream, weighted):
        pair, weights = make_pair(rich=True), torch.linspace(0.5, 2, 7) if weighted else None
        ours = gradients(streamed_divergence, pair, divergence, weights, 3, upstream=upstream)
        oracle = gradients(dense_divergence, pair, divergence, weights, upstream=upstream)
        assert_same(ours, oracle, rtol=1e-4, atol=1e-4)

    def test_a_second_backward_gives_the_same_gradient_again(self, make_pair):
        student, teacher = make_pair()
        weight = student.head.weight.requires_grad_()
        loss = streamed_divergence(student, teacher, ReverseKL()).divergence.sum() / 7
        first = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
        second = torch.autograd.grad(loss, weight)[0]
        assert_close(first, second)

    def test_gradients_accumulate_over_two_losses_with_one_head(self, make_pair, gradients):
        student, teacher = make_pair()
        weight = student.head.weight.requires_grad_()
        for _ in range(2):
            streamed_divergence(student, teacher, ForwardKL()).divergence.sum().backward()
        _, (_, expected) = gradients(dense_divergence, (student, teacher), ForwardKL())
        assert_close(weight.grad, 2 * expected, **CLOSE)

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
    def test_freezing_a_parameter_changes_no_other_gradient(self, make_pair, gradients, frozen):
        pair = make_pair(rich=True)
        ours = gradients(streamed_divergence, pair, ReverseKL(), frozen=frozen)
        assert_same(ours, gradients(dense_divergence, pair, ReverseKL(), frozen=frozen), **CLOSE)

    def test_an_input_changed_before_backward_is_an_error(self, make_pair):
        student, teacher = make_pair()
        student.head.weight.requires_grad_()
        loss = streamed_divergence(student, teacher, ForwardKL()).divergence.sum()
        student.hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_double_backward_is_refused(self, make_pair):
        student, teacher = make_pair()
        hidden = student.hidden.requires_grad_()
        loss = streamed_divergence(student, teacher, ForwardKL()).divergence.square().sum()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


class TestExtremes:
    @pytest.mark.parametrize("divergence", NAMED, ids=repr)
    def test_identical_models_have_no_divergence_and_no_gradient(self, make_pair, gradients, divergence):
        student, _ = make_pair(rich=True)
        per_token, grads = gradients(streamed_divergence, (student, student), divergence)
        for tensor in (per_token.divergence, *grads):
            assert_close(tensor, torch.zeros_like(tensor), rtol=0, atol=0)
        assert_close(per_token.student_entropy, per_token.teacher_entropy)

    @pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
    def test_jsd_of_nearly_equal_models_is_not_lost_in_rounding(self, make_pair, beta):
        student, _ = make_pair()
        near = replace(student, hidden=student.hidden * (1 + 1e-3))
        ours, oracle = (f(student, near, GeneralizedJSD(beta)) for f in (streamed_divergence, dense_divergence))
        assert (oracle.divergence < 1e-5).all()
        assert_close(ours.divergence, oracle.divergence, rtol=0.02, atol=2e-9)

    @every_divergence
    @pytest.mark.parametrize("softcap", [None, 2.0])
    def test_columns_excluded_in_both_models_equal_removed_columns(self, make_pair, gradients, divergence, softcap):
        sides = []
        for side in make_pair():
            bias = torch.zeros(37)
            bias[30:] = -torch.inf
            sides.append(replace(side, head=replace(side.head, bias=bias)))
        per_token, (hidden, weight, bias) = gradients(streamed_divergence, tuple(sides), divergence)
        cut = tuple(replace(side, head=OutputHead(side.head.weight[:30], side.head.bias[:30])) for side in sides)
        expected, (cut_hidden, cut_weight, cut_bias) = gradients(dense_divergence, cut, divergence)
        assert_same(
            (per_token, [hidden, weight[:30], bias[:30]]), (expected, [cut_hidden, cut_weight, cut_bias]), **CLOSE
        )
        assert weight[30:].eq(0).all()
        assert bias[30:].eq(0).all()

    @pytest.mark.parametrize("divergence", [one for one in NAMED if one != ReverseKL()], ids=repr)
    def test_a_column_excluded_by_the_teacher_alone_gives_no_nan(self, make_pair, gradients, divergence):
        student, teacher = make_pair()
        bias = torch.zeros(37).index_fill(0, torch.tensor([0, 5, 36]), -torch.inf)
        pair = student, replace(teacher, head=replace(teacher.head, bias=bias))
        assert_same(
            gradients(streamed_divergence, pair, divergence), gradients(dense_divergence, pair, divergence), **CLOSE
        )

    def test_adjacent_columns_the_student_alone_excludes_give_no_nan(self, make_pair, gradients):
        """A thread of the kernel has eight of them, and so no other."""
        student, teacher = make_pair()
        bias = torch.zeros(37).index_fill(0, torch.arange(8, 24), -torch.inf)
        pair = replace(student, head=replace(student.head, bias=bias)), teacher
        assert_same(
            gradients(streamed_divergence, pair, ReverseKL()), gradients(dense_divergence, pair, ReverseKL()), **CLOSE
        )

    def test_an_infinite_divergence_leaves_other_tokens_alone(self, make_pair):
        student, teacher = make_pair()
        bias = torch.zeros(37).index_fill(0, torch.tensor([5]), -torch.inf)
        pair = student, replace(teacher, head=replace(teacher.head, bias=bias))
        per_token = streamed_divergence(*pair, ReverseKL(), torch.tensor([1.0, 0, 0, 1, 0, 0, 0]))
        assert per_token.divergence.tolist() == [torch.inf, 0, 0, torch.inf, 0, 0, 0]

    @every_divergence
    @pytest.mark.parametrize("rich", [False, True], ids=["plain", "capped"])
    def test_logits_of_ten_thousand_give_finite_and_right_results(self, make_pair, gradients, divergence, rich):
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


class TestStrides:
    @pytest.mark.parametrize("vocabulary", [None, 1001])
    def test_products_have_aligned_strides_for_any_vocabulary_size(self, gradients, vocabulary):
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
    @staticmethod
    def lower(side, dtype):
        head = side.head
        bias = None if head.bias is None else head.bias.to(dtype)
        return replace(side, hidden=side.hidden.to(dtype), head=replace(head, weight=head.weight.to(dtype), bias=bias))

    @every_divergence
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_is_no_worse_than_the_naive_program(self, make_pair, gradients, divergence, dtype):
        def naive(student, teacher, divergence):
            """Low-precision logits, float32 log-softmax, autograd."""
            logs = [(side.hidden @ side.head.weight.T).float().log_softmax(-1) for side in (student, teacher)]
            entropies = [-(log.exp() * log).sum(-1) for log in logs]
            return type(oracle[0])(
                divergence=divergence.value(*logs), student_entropy=entropies[0], teacher_entropy=entropies[1]
            )

        pair = tuple(self.lower(side, dtype) for side in make_pair(32, 501))
        widened = tuple(self.lower(side, torch.float64) for side in pair)
        oracle = gradients(dense_divergence, widened, divergence)
        ours, rival = (gradients(f, pair, divergence) for f in (streamed_divergence, naive))
        assert [gradient.dtype for gradient in ours[1]] == [dtype, dtype]

        def errors(result):
            per_token, grads = result
            tensors = [per_token.divergence, per_token.student_entropy, *grads]
            truth = [oracle[0].divergence, oracle[0].student_entropy, *oracle[1]]
            return [(a.double() - b.double()).norm().item() for a, b in zip(tensors, truth, strict=True)]

        for error, naive_error in zip(errors(ours), errors(rival), strict=True):
            assert error <= 1.01 * naive_error

    def test_each_gradient_has_the_dtype_of_its_parameter(self, make_pair, gradients):
        student, teacher = make_pair(rich=True)
        student = replace(student, hidden=student.hidden.bfloat16())
        _, grads = gradients(streamed_divergence, (student, teacher), ForwardKL())
        assert [gradient.dtype for gradient in grads] == [torch.bfloat16, torch.float32, torch.float32]

    @every_divergence
    def test_autocast_only_rounds_the_inputs(self, make_pair, gradients, divergence):
        pair = make_pair()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = gradients(streamed_divergence, pair, divergence, chunk_tokens=3)
        rounded = tuple(self.lower(self.lower(side, torch.bfloat16), torch.float32) for side in pair)
        assert_same(ours, gradients(dense_divergence, rounded, divergence), **CLOSE)
        assert [gradient.dtype for gradient in ours[1]] == [torch.float32, torch.float32]

    def test_a_recomputed_head_gradient_uses_the_autocast_of_the_forward(self, make_pair, gradients):
        def squared(divergence):
            return divergence.square().sum()

        def autocast(*args):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return streamed_divergence(*args)

        pair = make_pair()
        rounded = tuple(self.lower(self.lower(side, torch.bfloat16), torch.float32) for side in pair)
        ours = gradients(autocast, pair, ReverseKL(), upstream=squared)
        assert_same(ours, gradients(dense_divergence, rounded, ReverseKL(), upstream=squared), rtol=1e-4, atol=1e-3)


def cut(side, rows):
    head = side.head
    return replace(
        side, head=replace(head, weight=head.weight[:rows], bias=None if head.bias is None else head.bias[:rows])
    )


class TestPaddedVocabularies:
    """64 ids that both models know, in heads of 64 and 80 rows."""

    @every_divergence
    @pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
    @pytest.mark.parametrize("sizes", [(64, 80), (80, 64), (72, 80)], ids="student {0[0]}, teacher {0[1]}".format)
    def test_ids_that_only_one_model_knows_equal_removed_ids(
        self, make_pair, gradients, divergence, rich, sizes, nan_in_new_memory
    ):
        student, teacher = (cut(side, rows) for side, rows in zip(make_pair(9, 80, rich=rich), sizes, strict=True))
        oracle, (hidden, *head) = gradients(dense_divergence, (cut(student, 64), cut(teacher, 64)), divergence)
        padding = sizes[0] - 64
        expected = [hidden, *(torch.cat([part, part.new_zeros(padding, *part.shape[1:])]) for part in head)]
        for compute in (streamed_divergence, dense_divergence):
            ours = gradients(compute, (student, teacher), divergence, chunk_tokens=4, vocabulary=64)
            assert_same(ours, (oracle, expected), rtol=1e-4, atol=2e-6)

    @every_divergence
    def test_gradients_are_right_for_a_different_upstream_gradient_per_token(self, make_pair, gradients, divergence):
        student, teacher = make_pair(9, 80, rich=True)
        pair, upstream = (student, cut(teacher, 64)), UPSTREAMS["different for each token"]
        ours = gradients(streamed_divergence, pair, divergence, upstream=upstream, vocabulary=64)
        assert_same(ours, gradients(dense_divergence, pair, divergence, upstream=upstream, vocabulary=64), **CLOSE)
