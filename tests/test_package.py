"""What a user sees before anything runs: the public names, the version, and a light import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

import trl_opsd

BARE_IMPORT = """
import json, sys, time
before, start = set(sys.modules), time.perf_counter()
import trl_opsd
seconds = time.perf_counter() - start
print(json.dumps({"modules": sorted(set(sys.modules) - before), "seconds": seconds}))
"""

PLAIN_INSTALL = """
import importlib, json, pkgutil, sys
from importlib import metadata
from importlib.machinery import PathFinder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

def add(name, found):
    if name not in found:
        found.add(name)
        for one in map(Requirement, metadata.requires(name) or []):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                add(canonicalize_name(one.name), found)
    return found

installed = add("trl-opsd", set())
by_module = metadata.packages_distributions().items()
hidden = {module for module, names in by_module if not installed & set(map(canonicalize_name, names))}

class Plain(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Plain if one is PathFinder else one for one in sys.meta_path]
import trl_opsd
failed = {}
for module in pkgutil.walk_packages(trl_opsd.__path__, "trl_opsd.", onerror=lambda _: None):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except (ImportError, ValueError) as error:
            failed[module.name] = str(error)
print(json.dumps(failed))
"""
"""Imports every module with the requirements of a plain install alone, whatever else this environment has."""


@pytest.mark.parametrize("name", trl_opsd.__all__)
def test_a_public_name_resolves_to_the_object_of_that_name(name):
    assert getattr(trl_opsd, name).__name__ == name


def test_the_installed_version_is_the_one_in_the_source():
    assert trl_opsd.__version__ == version("trl_opsd")


@pytest.mark.quick
def test_a_bare_import_loads_nothing_but_the_standard_library():
    done = subprocess.run([sys.executable, "-c", BARE_IMPORT], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    print(f"import trl_opsd: {seen['seconds'] * 1e3:.1f} ms, {len(seen['modules'])} modules")
    loaded = {name.partition(".")[0] for name in seen["modules"]}
    assert not loaded & {"trl", "vllm", "deepspeed", "peft", "torch", "transformers"}
    assert loaded - sys.stdlib_module_names == {"trl_opsd"}


@pytest.mark.long
def test_a_plain_install_has_everything_that_the_core_imports():
    done = subprocess.run([sys.executable, "-c", PLAIN_INSTALL], capture_output=True, text=True, check=True)
    failed = json.loads(done.stdout.splitlines()[-1])
    vllm = {name for name, said in failed.items() if 'pip install "vllm' in said}
    server = {name for name, said in failed.items() if "pip install aiohttp" in said}
    triton = {name for name, said in failed.items() if "No module named 'triton'" in said}
    assert failed.keys() == vllm | server | triton, failed
    assert {"trl_opsd.rollout.vllm", "trl_opsd._compat.vllm"} <= vllm
    assert {"trl_opsd.teacher.served", "trl_opsd.rollout.sglang", "trl_opsd.teacher.servers"} <= server
    assert triton <= {"trl_opsd.losses.device", "trl_opsd.losses.fused"}
    optional = r"trl_opsd\.(_compat|rollout|http\.client|teacher\.(answers|checkpoint_head|serve(d|rs)))"
    assert [name for name in vllm | server if not re.match(optional, name)] == []


def test_importing_the_trainer_prints_nothing(tmp_path):
    program = "import sys; from trl_opsd import OPSDConfig, OPSDTrainer; OPSDConfig(output_dir=sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
