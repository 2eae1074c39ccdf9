"""A task small enough for a CPU: integer arithmetic, worked out column by column, with verifiable answers."""

from pathlib import Path

import trl_opsd  # noqa: F401  # before transformers, whose imports it keeps from logging

TEACHER = str(Path(__file__).resolve().parent / "teacher")
STUDENT = str(Path(__file__).resolve().parent / "student")
READER = str(Path(__file__).resolve().parent / "reader")
ADDER = str(Path(__file__).resolve().parent / "adder")
SUBTRACTER = str(Path(__file__).resolve().parent / "subtracter")
"""Folders for `from_pretrained`, written by `make_models.py`."""
