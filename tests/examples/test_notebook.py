"""The notebook runs from top to bottom, installs what it needs, shows the report, and is stored without outputs."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STORED = nbformat.read(EXAMPLES / "opsd_quickstart.ipynb", as_version=4)
[SOURCE] = {found for cell in STORED.cells for found in re.findall(r'SOURCE = "([^"]+)"', cell.source)}
"""What the notebook clones."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The notebook, executed with 20 steps in place of 200, in a folder that holds the task too."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "arithmetic").symlink_to(EXAMPLES / "arithmetic")
    notebook = copy.deepcopy(STORED)
    names = next(cell for cell in notebook.cells if "STEPS = 200" in cell.source)
    names.source = names.source.replace("STEPS = 200", "STEPS = 20")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs(notebook, kind: str) -> list[str]:
    found = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.data[kind] for output in found if kind in output.get("data", {})]


@pytest.mark.long
def test_notebook_ends_with_curves_and_a_table_of_completions(run):
    assert len(outputs(run, "image/png")) == 1
    *_, table, report = outputs(run, "text/html")
    assert all(f"<th>{name}</th>" in table for name in ("prompt", "before", "after", "right"))
    assert table.count("<tr>") == 10
    assert report.startswith("<iframe srcdoc=")
    assert "Reverse" not in report
    assert "&lt;!doctype html&gt;" in report.lower()
    assert report.count("eval") > 3, "its completions, token by token"


@pytest.mark.long
def test_notebook_training_prints_rows_and_no_dict(run):
    printed = "".join(
        output.text for cell in run.cells if cell.cell_type == "code" for output in cell.outputs if "text" in output
    )
    assert "20/20" in printed
    assert "20 steps in " in printed
    assert "'loss'" not in printed
    assert "IProgress" not in printed
