"""Checks for `benchmarks/gpu.py` that go wrong, each in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from gpu_checks.findings import Findings


def passes(found: Findings) -> None:
    print("noise before", flush=True)
    found.at_most("a number", 1.0, 2.0, "ms")
    found.at_most("a number without a limit on this device", 3.0, 2.0, only_gpu=True)


def fails(found: Findings) -> None:
    found.at_least("too small", 1.0, 2.0)
    found.at_most("not a number", float("nan"), 2.0)
    found.equal("a list", [1], [1])


def raises(found: Findings) -> None:
    found.at_most("before", 1.0, 2.0)
    raise RuntimeError("it broke")


def hangs(found: Findings) -> None:
    found.at_most("before", 1.0, 2.0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    found.note("child", child.pid)
    time.sleep(600)


def is_killed(found: Findings) -> None:
    found.at_most("before", 1.0, 2.0)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_early(found: Findings) -> None:
    found.at_most("before", 1.0, 2.0)
    os._exit(0)


def writes_garbage(found: Findings) -> None:
    sys.stdout.buffer.write(b'{"what": "\xff\x00 not a finding\n' * 3)
    with found._path.open("ab") as lines:
        lines.write(b"\xff{garbage\n[1]\n")
    found.at_most("after", 1.0, 2.0)
