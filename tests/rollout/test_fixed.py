"""Recorded completions are looked up by prompt."""

from __future__ import annotations

import pytest

from trl_opsd.rollout import FixedRollout


def test_an_unrecorded_prompt_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"for 1 of 2 prompts, the first with token ids \[9\]"):
        FixedRollout({(1,): [2]}).complete([[1], [9]], step=0)
