"""Recorded completions are looked up by prompt."""

from __future__ import annotations

import pytest

from trl_opsd.rollout import FixedRollout


def test_an_unrecorded_prompt_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"for 1 of 2 prompts, the first with token ids \[9\]"):
        FixedRollout({(1,): [2]}).complete([[1], [9]], step=0)


@pytest.mark.parametrize(("given", "kind"), [([[1, 2]], "list"), ({"2+2=": "4"}, "str"), ("2+2=", "str"), ([], "list")])
def test_recorded_completions_have_to_be_token_ids_by_prompt(given, kind):
    with pytest.raises(TypeError, match=f"got a {kind} instead of a prompt's token ids"):
        FixedRollout(given)
