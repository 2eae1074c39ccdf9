"""docs/reference.md is up to date, and docstrings list the options, arguments and defaults of the code."""

from __future__ import annotations

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
