"""A task of an agent with a tool: doors that it has to try, of which its teacher knows the right ones."""

from pathlib import Path

STUDENT = str(Path(__file__).resolve().parent / "student")
TEACHER = str(Path(__file__).resolve().parent / "teacher")
GUIDE = str(Path(__file__).resolve().parent / "guide")
"""Folders for `from_pretrained`, written by `make_models.py`."""
