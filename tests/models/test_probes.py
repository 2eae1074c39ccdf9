"""The runner of probes: a start raises the first failure, an examination collects all findings."""

from __future__ import annotations

import pytest
import torch

from trl_opsd.models.probes import Doubt, Probe, explaining, findings, require

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


def test_examination_goes_on_and_skips_what_a_failure_would_repeat():
    needs = [Probe("second", pytest.fail, needs=("wrong",)), Probe("third", pytest.fail, needs=("sound", "second"))]
    begun: list[str] = []
    found = list(findings([SOUND, DOUBTED, WRONG, *needs, SOUND], "four", begun.append))
    assert begun == ["sound", "doubted", "wrong", "second", "third", "sound"]
    assert [(one.verdict, one.said) for one in found] == [
        ("ok", "four has 4."),
        ("warning", "maybe"),
        ("failed", "got 1, expected 2: do"),
        ("skipped", "Needs: wrong."),
        ("skipped", "Needs: second."),
        ("ok", "four has 4."),
    ]


def test_errors_of_the_subject_itself_name_the_remedy():
    with pytest.raises(ValueError, match=r"^The model cannot read, TypeError: no mask\. Use another\.$"):
        require([explained(TypeError("no mask"))], "The model")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyError("other")])
def test_memory_and_unforeseen_errors_are_raised_as_they_are(error):
    with pytest.raises(type(error)) as raised:
        require([explained(error)], "The model")
    assert raised.value is error


def test_error_without_words_is_named_by_its_type():
    (found,) = findings([Probe("silent", raising(RuntimeError()))], "four")
    assert (found.verdict, found.said) == ("failed", "RuntimeError")
