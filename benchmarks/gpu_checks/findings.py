"""What a check measures and what it is held to, written line by line, so that nothing is lost if its process ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PASS, FAIL, SKIP, NOTE = "PASS", "FAIL", "SKIP", "-"
DONE = {"done": True}
"""The last line of a check that came to its end."""


def finding(what: str, verdict: str, measured: Any, limit: str = "", unit: str = "") -> dict[str, Any]:
    """What is known of one measurement."""
    return {"what": what, "verdict": verdict, "measured": measured, "limit": limit, "unit": unit}


class Findings:
    """Writes findings as lines of JSON: `what`, `verdict`, `measured`, `limit`.

    Args:
        path (`Path`):
            The file.
        device (`str`):
            `"cuda:0"`, or `"cpu"`.
        toy (`bool`, *optional*):
            Toy sizes, as always on a CPU, where limits on speed do not hold.
    """

    def __init__(self, path: Path, device: str, toy: bool = False) -> None:
        self._path, self.device = path, device
        self.full = not toy and self.on_gpu
        """Whether sizes and limits are those of a GPU."""

    @property
    def on_gpu(self) -> bool:
        """Whether there is an accelerator, of any size."""
        return self.device != "cpu"

    def at_most(self, what: str, measured: float, limit: float, unit: str = "", only_gpu: bool = False) -> None:
        """A number that may not exceed a limit; with `only_gpu`, a limit that means nothing on a CPU."""
        self._limited(what, measured, measured <= limit, f"at most {limit:g}", unit, only_gpu)

    def at_least(self, what: str, measured: float, limit: float, unit: str = "", only_gpu: bool = False) -> None:
        """A number that may not be below a limit; `only_gpu` as in [`at_most`]."""
        self._limited(what, measured, measured >= limit, f"at least {limit:g}", unit, only_gpu)

    def equal(self, what: str, measured: Any, expected: Any) -> None:
        self._write(what, PASS if measured == expected else FAIL, measured, f"equal to {expected}")

    def note(self, what: str, measured: Any, unit: str = "") -> None:
        """A number that is held to nothing."""
        self._write(what, NOTE, measured, "", unit)

    def skip(self, what: str, why: str) -> None:
        self._write(what, SKIP, why)

    def done(self) -> None:
        self._append(DONE)

    def _limited(self, what: str, measured: float, holds: bool, limit: str, unit: str, only_gpu: bool) -> None:
        if only_gpu and not self.full:
            self._write(what, NOTE, measured, f"{limit} on a GPU", unit)
        else:
            self._write(what, PASS if holds else FAIL, measured, limit, unit)

    def _write(self, what: str, verdict: str, measured: Any, limit: str = "", unit: str = "") -> None:
        if isinstance(measured, float) and not math.isfinite(measured):
            measured = str(measured)  # JSON has no NaN
        self._append(finding(what, verdict, measured, limit, unit))

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as lines:
            lines.write(json.dumps(line, default=str) + "\n")


def read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The findings in a file, and whether the check came to its end. A line that is no finding is one that fails."""
    found, done = [], False
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            one = None
        if one == DONE:
            done = True
        elif isinstance(one, dict) and one.get("verdict") in (PASS, FAIL, SKIP, NOTE):
            found.append({**finding("unnamed", FAIL, None), **one})
        else:
            found.append(finding("unreadable", FAIL, line[:80]))
    return found, done
