"""Two real processes read each row of a dataset once, whatever it is made of, and evaluate what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import row_counts
from processes import SECONDS, run
from row_counts import EPOCHS, KINDS, ROWS, STEPS, Variant

HERE = Path(__file__).parent

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def read(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two processes read, and what one does."""
    folder = tmp_path_factory.mktemp("rows")
    run(HERE / "row_counts.py", folder, seconds=SECONDS)
    alone = {kind: row_counts.counted(folder, Variant(kind), 1) for kind in KINDS}
    return json.loads((folder / "results.json").read_text()), alone


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_two_processes_train_on_twice_or_never(read, kind, accumulation):
    found, alone = read[0]["shared"][Variant(kind, accumulation).name], read[1][kind]
    assert "error" not in found, found
    assert found["train"] == alone["train"], "the rows of each step, in the same order as in one process"
    assert len(found["train"]) == STEPS * EPOCHS
    first, second = row_counts.epochs(found)
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == ROWS - 3
    assert first != second


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_that_counts_a_row_twice_or_never(read, kind, accumulation):
    found, alone = read[0]["shared"][Variant(kind, accumulation).name], read[1][kind]
    assert set(found["eval"]) == {row_counts.row(number)["prompt"] for number in range(ROWS)}
    assert len(found["eval"]) == ROWS + 1, "one row fills the last batch"
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert alone["loss"] == pytest.approx(read[1]["map"]["loss"], rel=1e-6)
