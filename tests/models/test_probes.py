"""Errors of a model that is probed say what it cannot do, and what to do then."""

from __future__ import annotations

import pytest
import torch

from trl_opsd.models.probes import explaining

pytestmark = pytest.mark.quick


def explained(error: Exception) -> None:
    with explaining("The model", "read", "Use another.", (TypeError, RuntimeError)):
        raise error


def test_errors_of_the_subject_itself_name_the_remedy():
    with pytest.raises(ValueError, match=r"^The model cannot read, TypeError: no mask\. Use another\.$"):
        explained(TypeError("no mask"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyError("other")])
def test_memory_and_unforeseen_errors_are_raised_as_they_are(error):
    with pytest.raises(type(error)) as raised:
        explained(error)
    assert raised.value is error
