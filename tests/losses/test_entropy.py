"""The entropy of one model equals that of the dense program, in one product."""

from __future__ import annotations

import pytest
import torch
from test_cost import STUDENT, TOKENS, VOCABULARY, counted_flops

from trl_opsd.losses import ForwardKL, dense_divergence
from trl_opsd.losses.streamed import streamed_entropy

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
@pytest.mark.parametrize("vocabulary", [None, 41])
def test_streamed_entropy_equals_the_dense_one_with_one_product(make_pair, chunk, rich, vocabulary):
    student, teacher = make_pair(TOKENS, VOCABULARY, rich=rich)
    expected = dense_divergence(student, teacher, ForwardKL(), vocabulary=vocabulary).student_entropy
    with counted_flops() as counter:
        found = streamed_entropy(student, chunk, vocabulary)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    assert counter.get_total_flops() == STUDENT * (vocabulary or VOCABULARY) // VOCABULARY


def test_no_tokens_have_no_entropies(make_pair):
    assert streamed_entropy(make_pair(0)[0]).shape == (0,)
