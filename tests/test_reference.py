"""docs/reference.md is up to date, and docstrings list the options, arguments and defaults of the code."""

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


def test_the_reference_page_is_up_to_date(reference):
    assert reference.PAGE.read_text(encoding="utf-8") == reference.document(), "run `python tools/reference.py`"


def test_the_config_docstring_lists_every_field_with_its_default(reference):
    described = reference.described_in(OPSDConfig, "Parameters")
    assert list(described) == [one.name for one in reference.new_fields()]
    defaults = {name: kind.partition("defaults to `")[2].removesuffix("`") for name, (kind, _) in described.items()}
    said = {name: literal_eval(text) if text else None for name, text in defaults.items()}
    assert said == {one.name: one.default for one in reference.new_fields()}
    assert [ours.name for _, ours in reference.changed_fields()] == ["vllm_server_host"], "else the docstring is wrong"


def test_the_trainer_docstring_lists_every_argument(reference):
    described = reference.described_in(OPSDTrainer, "Args")
    assert set(described) == set(inspect.signature(OPSDTrainer).parameters)


def test_expected_values_are_taken_from_the_check_of_an_option(reference):
    assert reference.expected("teacher_update_rate") == "a number in (0, 1]"
    assert reference.expected("teacher_trust_remote_code") == ""
    unchecked = {one.name for one in reference.new_fields() if not reference.expected(one.name)}
    assert unchecked == {"deterministic", "padding_free", "teacher_trust_remote_code"}


def test_a_call_with_neither_error_nor_warning_is_not_documented(reference):
    with pytest.raises(AssertionError, match="expected an error or exactly one warning"):
        reference._told(lambda: None)


def test_every_option_has_a_help_text():
    ours = OPSDConfig.__annotations__.keys()
    assert [one.name for one in dataclasses.fields(OPSDConfig) if one.name in ours and not one.metadata["help"]] == []
