"""Two small random models with every property a head can have, for all tests of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trl_opsd.losses import LazyLogits, OutputHead, PerToken

Pair = tuple[LazyLogits, LazyLogits]


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    return _make_pair


@pytest.fixture
def gradients() -> Callable[..., tuple[PerToken, list[Tensor]]]:
    return _gradients


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
