"""`kill -9` at every file of a save, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kill_saves
import pytest
from support import forks
from support.witnessed_run import trainer

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def kills(tmp_path_factory) -> list[dict[str, Any]]:
    return forks.results("alone", kill_saves.killed, tmp_path_factory.mktemp("kills"))[0]


def test_no_kill_at_any_file_tears_or_loses_a_checkpoint(kills):
    *killed, undisturbed = kills
    changes = " ".join(undisturbed["changes"])
    for file in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        assert f"_unfinished/checkpoint-2/{file}" in changes
    assert "_unfinished/checkpoint-2/opsd_manifest.json os.rename _unfinished/checkpoint-2" in changes
    assert [kill["killed"] for kill in kills] == [True] * len(killed) + [False]
    assert not [kill for kill in kills if kill["half_written"] or kill["remarks"]]
    goes_on = [kill["goes_on_from"] for kill in kills]
    published = goes_on.index("checkpoint-2")
    assert published > 12
    assert goes_on == ["checkpoint-1"] * published + ["checkpoint-2"] * (len(kills) - published)
    assert len(kills) - published > 3, "the rename, the deletion of the old one, and no kill"


def test_run_resumes_after_kill(kills):
    half = kills[0]
    moved = next(kill for kill in kills if kill["goes_on_from"] == "checkpoint-2")
    for kill, steps in ((half, [2, 3]), (moved, [3])):
        run = trainer(Path(kill["out"]), "full", max_steps=3)
        run.train(resume_from_checkpoint=True)
        assert [entry["step"] for entry in run.state.log_history if "loss" in entry][-len(steps) :] == steps
