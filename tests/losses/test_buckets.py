"""A teacher known by some tokens, or compared by its likeliest: the divergence of buckets, in full in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from heads import logits_of, of_logits
from test_streamed import ENTRYWISE
from torch import Tensor
from torch.testing import assert_close

from trl_opsd.losses import (
    DIVERGENCES,
    ForwardKL,
    LazyLogits,
    OutputHead,
    ReferenceModel,
    ReverseKL,
    Sampled,
    TopKTeacher,
    streamed_divergence,
)
from trl_opsd.losses.dense import dense_divergence
from trl_opsd.losses.streamed import streamed_entropy, streamed_likeliest
from trl_opsd.types.known import KnownTokens, TokenHead

N, V, H = 7, 40, 8
CPU = torch.device("cpu")
# Sums of f(p_t / p_s) over tokens, so that a bucket's ratio is that of each of its tokens, or functions of such a sum.
OF_BUCKETS = sorted({*DIVERGENCES} - {"sampled_reverse_kl"})


def student(seed: int = 0, bias: bool = False, cap: float | None = None) -> LazyLogits:
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=made)
    head = OutputHead(weight, torch.randn(V, generator=made) if bias else None, 1.3, cap)
    return LazyLogits(2 * torch.randn(N, H, generator=made), head, 1.0)


def teacher_logs(seed: int = 1) -> Tensor:
    return (3 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed))).double().log_softmax(-1)


def chosen(log_student_NV: Tensor, log_teacher_NV: Tensor, by: str, k: int) -> list[list[int]]:
    """The known ids of each position: of the student's likeliest, the teacher's, or both, each once."""
    logs = {"student": [log_student_NV], "teacher": [log_teacher_NV], "both": [log_student_NV, log_teacher_NV]}[by]
    tops = [log_NV.topk(k).indices.tolist() for log_NV in logs]
    return [list(dict.fromkeys(chain.from_iterable(rows))) for rows in zip(*tops, strict=True)]


def served(log_teacher_NV: Tensor, ids: list[list[int]], more: int = 2) -> LazyLogits:
    """The teacher as its servers tell it, filled up to more than the most known tokens."""
    width = max(map(len, ids)) + more
    padded_NM = torch.tensor([[*row, *[-1] * (width - 1 - len(row))] for row in ids])
    logs_NM = log_teacher_NV.gather(1, padded_NM.clamp(min=0)).float().masked_fill(padded_NM < 0, -math.inf)
    known = KnownTokens.of(padded_NM, logs_NM, width)
    return LazyLogits(known.packed(), TokenHead.sized(V, width, CPU))


def log_probs(model: LazyLogits, hidden_NH: Tensor | None = None) -> Tensor:
    return logits_of(model, hidden_NH).log_softmax(-1)


def buckets(log_V: Tensor, ids: list[int]) -> Tensor:
    """The distribution of one position over its known ids and all others together."""
    rest = [one for one in range(V) if one not in ids]
    return torch.cat([log_V[ids], log_V[rest].logsumexp(0, keepdim=True)]) if rest else log_V[ids]


def told(log_V: Tensor, ids: list[int]) -> Tensor:
    """The same of a teacher, whose servers tell float32 log-probabilities."""
    own = log_V[ids].float().double()
    return torch.cat([own, (1 - own.exp().sum()).log()[None]]) if len(ids) < V else own


@pytest.mark.parametrize("by", ["student", "teacher", "both"])
@pytest.mark.parametrize("name", OF_BUCKETS)
@pytest.mark.parametrize("vocabulary", [40, 300])
def test_equals_the_divergence_of_buckets_with_its_gradient(name, by, vocabulary, monkeypatch):
    monkeypatch.setitem(globals(), "V", vocabulary)
    divergence = DIVERGENCES[name]()
    for k in (1, 5, 20, V) if V == 40 else (8, 20, 64, 128):
        for bias, cap in ((False, None), (True, 6.0)):
            mine, log_teacher_NV = student(bias=bias, cap=cap), teacher_logs()
            hidden_NH = mine.hidden.double().requires_grad_()
            log_student_NV = log_probs(mine, hidden_NH)
            ids = chosen(log_student_NV, log_teacher_NV, by, k)
            expected = [
                divergence.value(buckets(own_V, row)[None], told(their_V, row)[None])[0]
                for own_V, their_V, row in zip(log_student_NV, log_teacher_NV, ids, strict=True)
            ]
            torch.stack(expected).sum().backward()
            teacher, values_N = served(log_teacher_NV, ids), torch.stack(expected).detach()
            for loss, dtype, limit in ((dense_divergence, torch.float64, 1e-6), (streamed_divergence, None, 5e-6)):
                given_NH = mine.hidden.to(dtype or torch.float32).clone().requires_grad_()
                found = loss(LazyLogits(given_NH, mine.head), teacher, divergence, chunk_tokens=3)
                found.divergence.sum().backward()
                for one, other in ((found.divergence, values_N), (given_NH.grad, hidden_NH.grad)):
                    gap, largest = float((one - other).detach().abs().max()), float(other.abs().max())
                    assert gap < limit * max(1.0, largest)


def test_dense_loss_completes_a_teacher_as_the_streamed_one_does():
    mine, log_teacher_NV = student(bias=True), teacher_logs()
    ids = chosen(log_probs(mine), log_teacher_NV, "both", 6)
    ids = [sorted(row, key=lambda one: one >= V - 5) for row in ids]  # what was sampled, the first, is shared
    sampled = Sampled(torch.tensor([row[0] for row in ids]), torch.linspace(-1, 1, N), torch.linspace(-3, -1, N))
    for name in DIVERGENCES:
        given = mine, served(log_teacher_NV, ids), DIVERGENCES[name](), torch.rand(N)
        one, other = (
            loss(*given, sampled=sampled, vocabulary=V - 5) for loss in (streamed_divergence, dense_divergence)
        )
        for value in ("divergence", "teacher_entropy", "same_first", "teacher_first", "importance", "accepted"):
            if (theirs := getattr(other, value)) is not None:
                assert_close(getattr(one, value), theirs.float(), rtol=1e-4, atol=1e-5)


def test_sampled_token_has_the_probability_that_the_server_told():
    mine, log_teacher_NV = student(), teacher_logs()
    log_student_NV = log_probs(mine)
    ids = chosen(log_student_NV, log_teacher_NV, "student", 4)
    drawn_N = torch.tensor([row[2] for row in ids])
    found = streamed_divergence(
        mine, served(log_teacher_NV, ids), DIVERGENCES["sampled_reverse_kl"](), sampled=Sampled(drawn_N)
    )
    gap_N = (log_student_NV - log_teacher_NV).gather(1, drawn_N[:, None])[:, 0]
    assert_close(found.divergence.double(), gap_N, rtol=1e-5, atol=1e-5)


def test_ids_beyond_the_shared_vocabulary_have_no_probability():
    mine, log_teacher_NV = student(), teacher_logs()
    ids = [[0, 1, V - 1, V - 2] for _ in range(N)]
    full = served(log_teacher_NV, ids, more=0)  # else the first token, there again, would hide what others write
    cut = streamed_divergence(mine, full, ReverseKL(), vocabulary=V - 2)
    own, its = (logs_NV[:, : V - 2].log_softmax(-1) for logs_NV in (log_probs(mine), log_teacher_NV))
    both = [torch.cat([logs[:, :2], logs[:, 2:].logsumexp(1, keepdim=True)], 1) for logs in (own, its)]
    assert_close(cut.divergence.double(), ReverseKL().value(*both), rtol=1e-4, atol=1e-5)


def test_entropy_is_that_of_known_tokens_and_a_rest():
    mine, log_teacher_NV = student(), teacher_logs()
    ids = chosen(log_teacher_NV, log_teacher_NV, "teacher", 6)
    teacher = served(log_teacher_NV, ids)
    expected = [-(one.exp() * one).sum() for one in map(buckets, log_teacher_NV, ids)]
    assert_close(streamed_entropy(teacher).double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    log_student_NV = log_probs(mine)
    found_NK = streamed_likeliest(mine, 6, 3).sort(1).values
    assert torch.equal(found_NK, log_student_NV.topk(6).indices.sort(1).values)


@pytest.mark.parametrize(
    ("temperature", "divergence", "given", "named"),
    [
        (2.0, ReverseKL(), {}, "temperature"),
        (1.0, ReverseKL(), {"references": [ReferenceModel(student(3), push=0.5)]}, "move away"),
        (1.0, ReverseKL(), {"kl_clip": 0.1}, r"kl_clip=0\.1"),
        (1.0, TopKTeacher(ReverseKL(), 2), {}, "TopKTeacher"),
    ],
)
def test_what_needs_the_whole_distribution_is_refused(temperature, divergence, given, named):
    teacher = replace(served(teacher_logs(), [[0, 1]] * N), temperature=temperature)
    with pytest.raises(ValueError, match=named):
        streamed_divergence(student(), teacher, divergence, **given)


def test_an_anchor_needs_no_teacher():
    anchored = [ReferenceModel(student(3), anchor=0.5)]
    args = student(), served(teacher_logs(), [[0, 1]] * N), ReverseKL()
    both = [loss(*args, references=anchored) for loss in (streamed_divergence, dense_divergence)]
    assert_close(both[0].divergence, both[1].divergence, rtol=1e-5, atol=1e-5)


# ---- The likeliest tokens of a teacher that is known in full ---------------------------------------------------------

each_entrywise = pytest.mark.parametrize("of", ENTRYWISE, ids=repr)


@each_entrywise
@pytest.mark.parametrize("k", [1, 5, 36, 37, 400])
def test_values_and_gradients_equal_the_oracle(make_pair, assert_equals_oracle, of, k):
    assert_equals_oracle(make_pair(7, 37, rich=True), TopKTeacher(of, k))


@each_entrywise
@pytest.mark.parametrize("apart", [3.0, 1e-3, 0.0])
def test_top_k_divergence_is_between_0_and_the_full_one(of, apart):
    generator = torch.Generator().manual_seed(0)
    own = 3 * torch.randn(50, 41, generator=generator)
    pair = of_logits(own), of_logits(own + apart * torch.randn(50, 41, generator=generator))
    whole = streamed_divergence(*pair, of).divergence
    found = torch.stack([streamed_divergence(*pair, TopKTeacher(of, k)).divergence for k in (1, 4, 16, 40, 41)])
    assert found.min() >= 0
    assert (found.diff(dim=0) >= -1e-5).all()
    assert (found <= whole + 1e-5).all()
    assert_close(found[-1], whole, rtol=0, atol=0)
    assert apart or not found.any()


@each_entrywise
def test_top_k_divergence_needs_only_the_likeliest_tokens(of):
    mine, log_teacher_NV = student(), teacher_logs()
    ids = log_teacher_NV.topk(4).indices.tolist()
    both = [torch.stack(list(map(buckets, logs_NV, ids))) for logs_NV in (log_probs(mine), log_teacher_NV)]
    found = dense_divergence(mine, of_logits(log_teacher_NV), TopKTeacher(of, 4)).divergence
    assert_close(found, of.value(*both).float())


def test_a_teacher_with_one_certain_token_has_no_rest_mass():
    certain = torch.full((2, 9), -200.0).scatter_(1, torch.tensor([[3], [5]]), 200.0)
    for of in (ForwardKL(), ReverseKL()):
        same = streamed_divergence(of_logits(certain), of_logits(certain), TopKTeacher(of, 2)).divergence
        assert same.tolist() == [0.0, 0.0]
    hidden = torch.zeros(2, 9, requires_grad=True)
    found = streamed_divergence(of_logits(hidden), of_logits(certain), TopKTeacher(ForwardKL(), 2))
    assert_close(found.divergence.detach(), torch.full((2,), 9.0).log())
    (gradient,) = torch.autograd.grad(found.divergence.sum(), hidden)
    assert_close(gradient, torch.full((2, 9), 1 / 9) - (certain > 0).float())
