"""Names that our source borrows from TRL and its neighbours are in one table, and mean there what they mean here."""

from __future__ import annotations

import pytest
from breaches import INSTALLED, breach, unlisted, unused

ROWS = [pytest.param(owner, name, id=f"{owner.title}.{name}") for owner in INSTALLED for name in owner.names]


@pytest.mark.parametrize(("owner", "name"), ROWS)
def test_their_source_does_with_a_name_what_ours_relies_on(owner, name):
    said = breach(owner, name)
    assert said is None, said


def test_every_name_of_theirs_in_our_source_is_in_the_table():
    assert list(unlisted()) == []


def test_every_name_in_the_table_is_used_by_our_source():
    assert list(unused()) == []
