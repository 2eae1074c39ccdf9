"""docs/reference.md is what its tool writes, and docstrings say of options and arguments what the code says."""

from __future__ import annotations

import dataclasses
import inspect
from ast import literal_eval
from pathlib import Path

import pytest

from trl_opsd import OPSDConfig, OPSDTrainer

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import reference

    return reference


def test_the_page_is_what_the_code_says(reference):
    assert reference.PAGE.read_text(encoding="utf-8") == reference.document(), "run `python tools/reference.py`"


def test_docstring_and_fields_of_the_config_are_the_same_with_the_same_defaults(reference):
    described = reference.described_in(OPSDConfig, "Parameters")
    assert list(described) == [one.name for one in reference.new_fields()]
    defaults = {name: kind.partition("defaults to `")[2].removesuffix("`") for name, (kind, _) in described.items()}
    said = {name: literal_eval(text) if text else None for name, text in defaults.items()}
    assert said == {one.name: one.default for one in reference.new_fields()}
    assert [ours.name for _, ours in reference.changed_fields()] == ["vllm_server_host"], "else the docstring is wrong"


def test_docstring_and_signature_of_the_trainer_have_the_same_arguments(reference):
    described = reference.described_in(OPSDTrainer, "Args")
    assert set(described) == set(inspect.signature(OPSDTrainer).parameters)


def test_what_an_option_takes_is_asked_of_its_check(reference):
    assert reference.expected("teacher_update_rate") == "a number in (0, 1]"
    assert reference.expected("teacher_trust_remote_code") == ""
    unchecked = {one.name for one in reference.new_fields() if not reference.expected(one.name)}
    assert unchecked == {"teacher_trust_remote_code"}


def test_a_call_that_is_answered_with_nothing_is_no_line_of_the_page(reference):
    with pytest.raises(AssertionError, match="expected an error or exactly one warning"):
        reference._told(lambda: None)


def test_every_option_has_its_help_on_the_command_line():
    ours = OPSDConfig.__annotations__.keys()
    assert [one.name for one in dataclasses.fields(OPSDConfig) if one.name in ours and not one.metadata["help"]] == []
