"""Benchmarks as modules."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def load(monkeypatch):
    """Imports a benchmark by its name."""
    folder = Path(__file__).resolve().parents[2]
    for name in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(folder / name)
    return importlib.import_module
