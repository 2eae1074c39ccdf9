"""A task of an agent with a tool: doors that it has to try; its teacher knows the right ones."""

from pathlib import Path

DOORS = Path(__file__).resolve().parent
"""Folder of the folders "student", "teacher" and "guide", which `benchmarks/agents.py` made."""
