"""The runner of probes: a start raises the first failure."""

from __future__ import annotations

import pytest
import torch

from trl_opsd.models.probes import Doubt, Probe, explaining, require

pytestmark = pytest.mark.quick


def raising(error: Exception):
    def run(subject):
        raise error

    return run


def explained(error: Exception) -> Probe[str]:
    def run(subject):
        with explaining(subject, "read", "Use another.", (TypeError, RuntimeError)):
            raise error

    return Probe("reads", run)


SOUND = Probe("sound", lambda subject: f"{subject} has {len(subject)}.")
DOUBTED = Probe("doubted", raising(Doubt("maybe")))
WRONG = Probe("wrong", raising(ValueError("got 1,\n expected 2: do")))


def test_start_raises_the_first_failure_and_no_doubt():
    require([SOUND, DOUBTED], "four")
    with pytest.raises(ValueError, match="expected 2"):
        require([DOUBTED, WRONG, Probe("never run", pytest.fail)], "four")


def test_errors_of_the_subject_itself_name_the_remedy():
    with pytest.raises(ValueError, match=r"^The model cannot read, TypeError: no mask\. Use another\.$"):
        require([explained(TypeError("no mask"))], "The model")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyError("other")])
def test_memory_and_unforeseen_errors_are_raised_as_they_are(error):
    with pytest.raises(type(error)) as raised:
        require([explained(error)], "The model")
    assert raised.value is error
