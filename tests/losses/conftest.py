"""Two small random models with every property a head can have, for all tests of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trl_opsd.losses import LazyLogits, OutputHead, PerToken, dense_divergence, streamed_divergence

Pair = tuple[LazyLogits, LazyLogits]
OF_SOME = {"ranked", "top_shared", "top_mass", "accepted"}
"""What the streamed divergence knows of one token in 16, or where the weight is not 0."""


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    return _make_pair


@pytest.fixture
def gradients() -> Callable[..., tuple[PerToken, list[Tensor]]]:
    return _gradients


@pytest.fixture
def assert_same() -> Callable[..., None]:
    return _assert_same


@pytest.fixture
def assert_equals_oracle() -> Callable[..., tuple[PerToken, list[Tensor]]]:
    return _assert_equals_oracle


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Fills new memory with NaN, so that a read before the first write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _make_pair(tokens: int = 7, vocabulary: int = 37, *, rich: bool = False, spread: float = 1.0) -> Pair:
    """A student of width 5 and a teacher of width 8; `rich` adds a bias, a scale, a cap and a temperature each."""
    generator = torch.Generator().manual_seed(tokens + 1000 * vocabulary)

    def random(*shape: int) -> Tensor:
        return spread * torch.randn(shape, generator=generator)

    student = LazyLogits(random(tokens, 5), OutputHead(random(vocabulary, 5)))
    teacher = LazyLogits(random(tokens, 8), OutputHead(random(vocabulary, 8)))
    if rich:
        student = LazyLogits(
            student.hidden, replace(student.head, bias=random(vocabulary), scale=0.7, softcap=3.0), temperature=1.3
        )
        teacher = LazyLogits(
            teacher.hidden, replace(teacher.head, bias=random(vocabulary), scale=1.2, softcap=4.0), temperature=0.8
        )
    return student, teacher


def _gradients(
    compute: Callable[..., PerToken],
    pair: Pair,
    *args: object,
    upstream: Callable[[Tensor], Tensor] = Tensor.sum,
    frozen: tuple[str, ...] = (),
    **kwargs: object,
) -> tuple[PerToken, list[Tensor]]:
    """The result of `compute`, and the gradients of the student's hidden states, weight and bias, unless `frozen`."""
    student, teacher = pair
    leaves = {"hidden": student.hidden, "weight": student.head.weight}
    if student.head.bias is not None:
        leaves["bias"] = student.head.bias
    leaves = {name: leaf.detach().clone().requires_grad_(name not in frozen) for name, leaf in leaves.items()}
    head = replace(student.head, weight=leaves["weight"], bias=leaves.get("bias"))
    per_token = compute(replace(student, hidden=leaves["hidden"], head=head), teacher, *args, **kwargs)
    wanted = [leaf for name, leaf in leaves.items() if name not in frozen]
    return per_token, list(torch.autograd.grad(upstream(per_token.divergence), wanted))


def _assert_same(
    ours: tuple[PerToken, list[Tensor]],
    oracle: tuple[PerToken, list[Tensor]],
    rtol: float = 1e-4,
    atol: float = 2e-5,
) -> None:
    """All statistics that the oracle has, and gradients."""
    (found, grads), (expected, right) = ours, oracle
    for name in (one.name for one in fields(PerToken) if one.name not in OF_SOME):
        if (value := getattr(expected, name)) is not None:
            own = getattr(found, name).float()
            assert_close(own, value.float(), rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    assert {found.divergence.dtype, found.student_entropy.dtype, found.teacher_entropy.dtype} == {torch.float32}
    assert_close(grads, right, rtol=rtol, atol=atol)


def _assert_equals_oracle(
    pair: Pair, *args: object, rtol: float = 1e-4, atol: float = 2e-5, **given: object
) -> tuple[PerToken, list[Tensor]]:
    """The streamed divergence has the statistics and gradients of the dense one; returns them."""
    ours, oracle = (_gradients(one, pair, *args, **given) for one in (streamed_divergence, dense_divergence))
    _assert_same(ours, oracle, rtol, atol)
    return ours
