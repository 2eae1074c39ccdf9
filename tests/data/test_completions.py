"""What a completion is, of the tokens that were written."""

from __future__ import annotations

import pytest

from trl_opsd.types.rollout import cut_after_end


@pytest.mark.parametrize(
    ("written", "kept"), [([5, 6], [5, 6]), ([5, 2, 6], [5, 2]), ([5, 3, 2], [5, 3]), ([2], [2]), ([], [])]
)
def test_a_completion_is_cut_after_its_first_end_token(written, kept):
    assert cut_after_end(written, {2, 3}) == kept
