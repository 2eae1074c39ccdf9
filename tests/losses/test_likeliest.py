"""How far the likeliest tokens of both models are the same is that of their own rankings, of one in 16."""

from __future__ import annotations

import pytest
import torch
from heads import logits_of
from torch.testing import assert_close

from trl_opsd.losses import ForwardKL, dense_divergence, streamed_divergence
from trl_opsd.losses.elementwise import EVERY, LIKELIEST

pytestmark = pytest.mark.quick


def ranked(lazy, vocabulary):
    """The likeliest tokens of each row, and all probabilities, in float64 and one after the other."""
    probs = logits_of(lazy)[:, :vocabulary].softmax(-1)
    return [set(sorted(range(vocabulary), key=row.__getitem__)[-LIKELIEST:]) for row in probs.tolist()], probs


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 90), (7, 90), (40, 90), (100, 40), (40, 10)])
def test_shares_and_masses_are_those_of_both_rankings(make_pair, tokens, vocabulary, rich):
    pair = make_pair(tokens, 101, rich=rich)
    (own, probs), (theirs, _) = (ranked(side, vocabulary) for side in pair)
    k = min(LIKELIEST, vocabulary)
    shares = torch.tensor([len(one & other) / k for one, other in zip(own, theirs, strict=True)])
    rows = zip(probs, own, theirs, strict=True)
    masses = torch.tensor([sum(row[token] for token in one & other) for row, one, other in rows])
    oracle = dense_divergence(*pair, ForwardKL(), vocabulary=vocabulary)
    assert_close((oracle.top_shared, oracle.top_mass), (shares, masses.float()))
    assert oracle.ranked.tolist() == [1.0] * tokens
    found = {}
    for chunk in (None, 1, 3, 16, 33):
        found[chunk] = streamed_divergence(*pair, ForwardKL(), chunk_tokens=chunk, vocabulary=vocabulary)
        (looked_at,) = found[chunk].ranked.nonzero(as_tuple=True)
        assert looked_at.tolist() == list(range((tokens - 1) % EVERY // 2, tokens, EVERY))
        assert_close(found[chunk].top_shared, shares * found[chunk].ranked)
        assert_close(found[chunk].top_mass, masses.float() * found[chunk].ranked, rtol=1e-5, atol=1e-6)
    if vocabulary > LIKELIEST and tokens > 1:
        assert 0 < shares.mean() < 1


def test_equal_models_share_all_likeliest_tokens(make_pair):
    student, _ = make_pair(40, 300)
    found = streamed_divergence(student, student, ForwardKL())
    assert found.top_shared.sum() == found.ranked.sum() == 3
    assert 0 < found.top_mass.sum() < 3
    assert streamed_divergence(*make_pair(0, 40), ForwardKL()).ranked.tolist() == []
