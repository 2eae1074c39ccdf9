"""Benchmarks, and the examples that they use, can be imported here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[2] / room) for room in ("benchmarks", "examples")]
