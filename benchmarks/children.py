"""Runs a part of a benchmark in new processes; each reports one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MARK = "reported: "
"""What the line of a process begins with; libraries print others."""


def report(found: dict[str, Any]) -> None:
    """To be called once, in the new process."""
    print(MARK + json.dumps(found), flush=True)


def reports(script: str, *options: str, processes: int = 1, **environment: str) -> list[dict[str, Any]]:
    """What each of `processes` new processes reports (gloo, on the CPU, if there are several).

    Raises:
        subprocess.CalledProcessError: One failed; its traceback has been printed.
    """
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    env = {**os.environ, **environment}
    run = subprocess.run([*command, script, *options], env=env, stdout=subprocess.PIPE, text=True, check=True)
    found = [json.loads(line.partition(MARK)[2]) for line in run.stdout.splitlines() if MARK in line]
    assert len(found) == processes, run.stdout
    return found


def forget_peak() -> None:
    """Lets [`peak_bytes`] begin anew, where the system can."""
    resettable = Path("/proc/self/clear_refs")
    if resettable.exists():
        resettable.write_text("5")


def peak_bytes() -> int:
    """The largest resident size of this process, in bytes; that of its parent does not count, as it may elsewhere."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
