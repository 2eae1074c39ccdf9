"""A build of DeepSpeed's extensions that was killed is named before anything waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from trl_opsd import OPSDConfig
from trl_opsd._compat.deepspeed import check_builds

BUILD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("building", flush=True)
time.sleep(600)
"""
"""What `torch.utils.cpp_extension.load` does around a build."""


@pytest.fixture(params=["deepspeed_shm_comm", "py311_cpu/cpu_adam"])
def lock(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)  # torch 2.14 has it no more
    folder = tmp_path / request.param
    folder.mkdir(parents=True)
    return folder / "lock"


@pytest.fixture
def build(lock: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", BUILD, lock], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    yield process
    process.kill()
    process.wait()


def test_only_lock_of_killed_build_is_error(lock, build, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    check_builds()
    build.send_signal(signal.SIGKILL)
    build.wait()
    with pytest.raises(RuntimeError, match=rf"{lock}, .* is \d+ seconds old.*delete the file"):
        OPSDConfig(str(tmp_path / "out"))


def test_lock_that_another_node_may_hold_warns_until_old(lock, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    lock.touch()
    with pytest.warns(UserWarning, match=rf"{lock}, .* is 0 seconds old"):
        check_builds()
    os.utime(lock, (0, time.time() - 3600))
    with pytest.raises(RuntimeError, match=rf"{lock}, .* is 360\d seconds old"):
        check_builds()


def test_lock_torch_2_14_leaves_after_builds_is_ignored(lock, monkeypatch):
    lock.touch()
    monkeypatch.delattr(cpp_extension, "FileBaton")
    check_builds()


def test_locks_of_other_extensions_are_ignored(lock, tmp_path):
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "somebody's" / "lock").touch()
    check_builds()
