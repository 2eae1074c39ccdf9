"""The notebook runs from top to bottom, and shows curves, completions and the report."""

from __future__ import annotations

import copy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STORED = nbformat.read(EXAMPLES / "opsd_quickstart.ipynb", as_version=4)


@pytest.mark.long
def test_notebook_ends_with_curves_completions_and_a_report(tmp_path):
    """With 20 steps in place of 200, in a folder that holds the task too."""
    (tmp_path / "arithmetic").symlink_to(EXAMPLES / "arithmetic")
    notebook = copy.deepcopy(STORED)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    steps = next(cell for cell in cells if "STEPS = 200" in cell.source)
    steps.source = steps.source.replace("STEPS = 200", "STEPS = 20")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in one.get("data", {}) for one in outputs) == 1
    *_, table, report = (one.data["text/html"] for one in outputs if "text/html" in one.get("data", {}))
    assert all(f"<th>{name}</th>" in table for name in ("prompt", "before", "after", "right"))
    assert table.count("<tr>") == 10
    assert report.startswith("<iframe srcdoc=")
    assert "&lt;!doctype html&gt;" in report.lower()
    assert report.count("eval") > 3, "its completions, token by token"
    printed = "".join(one.text for one in outputs if "text" in one)
    assert "20/20" in printed
    assert "'loss'" not in printed
    assert "IProgress" not in printed
