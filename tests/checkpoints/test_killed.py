"""`kill -9` at every file of a save, in real processes."""

from __future__ import annotations

from typing import Any

import kill_saves
import pytest
from support import forks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def kills(tmp_path_factory) -> list[dict[str, Any]]:
    return forks.results("alone", kill_saves.killed, tmp_path_factory.mktemp("kills"))[0]


def test_saves_are_killed_at_every_file(kills):
    assert [kill["had"] for kill in kills if not kill["killed"]] == [[1], [1, 2]]
    changes = " ".join(next(kill["changes"] for kill in kills if not kill["killed"]))
    for file in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        assert f"_unfinished/checkpoint-2/{file}" in changes
    assert "_unfinished/checkpoint-2/opsd_manifest.json os.rename _unfinished/checkpoint-2" in changes
    assert len([kill for kill in kills if kill["killed"]]) >= 25


def test_no_kill_leaves_partial_checkpoint(kills):
    assert [kill for kill in kills if kill["half_written"]] == []


def test_no_kill_loses_last_complete_checkpoint(kills):
    assert [kill for kill in kills if kill["remarks"]] == []
    first, second = ([kill["goes_on_from"] for kill in kills if kill["had"] == had] for had in ([1], [1, 2]))
    published = first.index("checkpoint-2")
    assert published > 12
    assert set(first[:published]) == {"checkpoint-1"}
    assert set(first[published:]) == {"checkpoint-2"}
    assert set(second) == {"checkpoint-2"}


def test_run_resumes_after_kill(kills, make_trainer):
    half = next(kill for kill in kills if kill["killed"] and kill["goes_on_from"] == "checkpoint-1")
    moved = next(kill for kill in kills if kill["killed"] and kill["goes_on_from"] == "checkpoint-2")
    for kill, steps in ((half, [2, 3]), (moved, [3])):
        trainer = make_trainer(output_dir=kill["out"])
        trainer.train(resume_from_checkpoint=True)
        assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry][-len(steps) :] == steps
        assert trainer.state.global_step == 3
