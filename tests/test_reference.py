"""docs/reference.md is up to date, and docstrings list the options, arguments and defaults of the code."""

from __future__ import annotations

import dataclasses
import inspect
from ast import literal_eval
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.options.normalize import with_help

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


def test_the_help_of_an_option_is_its_description(reference):
    described = reference.described_in(OPSDConfig, "Parameters")
    helps = {one.name: one.metadata.get("help") for one in dataclasses.fields(OPSDConfig)}
    assert {name: helps[name] for name in described} == {name: meaning for name, (_, meaning) in described.items()}
    assert all(helps[name] for name in OPSDConfig.__annotations__ if name in helps)


def test_percent_sign_in_a_description_reaches_the_help():
    @with_help
    @dataclasses.dataclass
    class Options:
        """Some."""

        share: float = 0.5
        """Of rows, as in 50%,
        for instance."""
        own: int = dataclasses.field(default=1, metadata={"help": "Its own."})
        other: int = 1

    assert [one.metadata.get("help") for one in dataclasses.fields(Options)] == [
        "Of rows, as in 50%%, for instance.",
        "Its own.",
        None,
    ]
    assert "50%, for" in " ".join(HfArgumentParser(Options).format_help().split())
