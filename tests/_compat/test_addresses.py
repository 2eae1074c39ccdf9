"""Which addresses are those of this machine, and what is sent as a token."""

from __future__ import annotations

import pytest

from trl_opsd._compat.urls import ROLLOUT_TOKEN, is_this_machine, token_header

pytestmark = pytest.mark.quick


def test_a_client_of_an_unspecified_address_stays_on_this_machine():
    assert all(map(is_this_machine, ("localhost", "127.0.0.1", "127.1.2.3", "::1", "0.0.0.0", "::")))
    assert not any(map(is_this_machine, (None, "", "10.0.0.1", "gpu", "localhost.evil.example", "2130706433")))


def test_a_token_is_sent_as_it_is_or_refused(monkeypatch):
    monkeypatch.delenv(ROLLOUT_TOKEN, raising=False)
    assert token_header(ROLLOUT_TOKEN) == {}
    monkeypatch.setenv(ROLLOUT_TOKEN, "s3cret")
    assert token_header(ROLLOUT_TOKEN) == {"Authorization": "Bearer s3cret"}
    for wrong in ("two words", "line\n", "schlüssel"):
        monkeypatch.setenv(ROLLOUT_TOKEN, wrong)
        with pytest.raises(ValueError, match=f"{ROLLOUT_TOKEN} contains spaces, line breaks") as error:
            token_header(ROLLOUT_TOKEN)
        assert wrong not in str(error.value)
