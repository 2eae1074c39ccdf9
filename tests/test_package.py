"""What a user sees before anything runs: the public names, the version, and a light import."""

from __future__ import annotations

import json
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


def test_importing_the_trainer_prints_nothing(tmp_path):
    program = "import sys; from trl_opsd import OPSDConfig, OPSDTrainer; OPSDConfig(output_dir=sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
