"""What a user sees before anything runs: the public names, the version, and a light import."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import trl_opsd

pytestmark = pytest.mark.quick

PUBLIC = [
    "FixedRollout",
    "FrozenTeacher",
    "HFRollout",
    "NonFiniteError",
    "OPSDConfig",
    "OPSDError",
    "OPSDTrainer",
    "RolloutBackend",
    "ServerError",
    "SyncError",
    "Teacher",
]
"""The public surface. A change here is a change for users: it gets a line in the changelog."""

BARE_IMPORT = """
import json, sys, time
before, start = set(sys.modules), time.perf_counter()
import trl_opsd
seconds = time.perf_counter() - start
print(json.dumps({"modules": sorted(set(sys.modules) - before), "seconds": seconds}))
"""


def test_the_public_surface_is_as_listed():
    assert list(trl_opsd.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves_to_the_object_of_that_name(name):
    assert getattr(trl_opsd, name).__name__ == name


def test_public_names_appear_in_tab_completion():
    assert set(PUBLIC) <= set(dir(trl_opsd))


def test_a_misspelt_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="OPSDTrianer"):
        _ = trl_opsd.OPSDTrianer


def test_the_installed_version_is_the_one_in_the_source():
    assert trl_opsd.__version__ == version("trl_opsd")


def test_a_bare_import_loads_nothing_but_the_standard_library():
    done = subprocess.run([sys.executable, "-c", BARE_IMPORT], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    print(f"import trl_opsd: {seen['seconds'] * 1e3:.1f} ms, {len(seen['modules'])} modules")
    loaded = {name.partition(".")[0] for name in seen["modules"]}
    assert not loaded & {"trl", "vllm", "deepspeed", "peft", "torch", "transformers"}
    assert loaded - sys.stdlib_module_names == {"trl_opsd"}


def test_errors_of_this_package_share_a_base_class():
    for name in ("NonFiniteError", "ServerError", "SyncError"):
        assert issubclass(getattr(trl_opsd, name), trl_opsd.OPSDError)
    assert issubclass(trl_opsd.OPSDError, RuntimeError)
    assert issubclass(trl_opsd.NonFiniteError, FloatingPointError), "as it was called before"


def test_libraries_that_are_not_used_say_nothing_when_the_trainer_is_imported(tmp_path):
    program = "import sys; from trl_opsd import OPSDConfig, OPSDTrainer; OPSDConfig(output_dir=sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
