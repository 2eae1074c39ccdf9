"""Two processes, one student: runs resume bit for bit, stop at the same step, and lose no checkpoint to a kill."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sharded import PARTS, STOPPED_FROM, Resumes, kill, tried
from support import forks
from support.witnessed_run import saved_models, trainer

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2 * forks.SECONDS)]

SOME: Resumes = {"full": (3,), "lora": (4,)}
ALL: Resumes = {"full": (3, 4), "lora": (3, 4)}
RUNS: dict[str, tuple[str, Resumes, tuple[str, ...]]] = {
    "ddp": ("ddp", SOME, ("stopped",)),
    "zero3": ("zero3_cpu", SOME, ("late",)),
    **{
        f"{strategy}, everything": (strategy, ALL, tuple(PARTS))
        for strategy in ("ddp", "zero2_cpu", "zero3_cpu", "fsdp2_cpu")
    },
}
"""Strategy, the steps to resume at, and what else is tried; each is one launch."""


def each_run(part: str | None = None) -> Any:
    names = [name for name, (_, _, parts) in RUNS.items() if part is None or part in parts]
    marked = [pytest.param(name, marks=[pytest.mark.long] * ("everything" in name)) for name in names]
    return pytest.mark.parametrize("run", marked, indirect=True)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return partial(trainer, models=saved_models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def run(request, make, tmp_path_factory) -> SimpleNamespace:
    """One launch: its strategy, where it saved, and what each rank found."""
    strategy, resumes, parts = RUNS[request.param]
    folder = tmp_path_factory.mktemp("sharded")
    ranks = forks.results(strategy, tried, make, folder, resumes, parts)
    return SimpleNamespace(strategy=strategy, resumes=resumes, folder=folder, ranks=ranks)


@each_run()
@pytest.mark.parametrize("variant", ["full", "lora"])
def test_resumed_run_of_two_processes_equals_uninterrupted_one(run, variant):
    types = {"ddp": "MULTI_CPU", "fsdp2_cpu": "FSDP"}
    expected = [f"DistributedType.{types.get(run.strategy, 'DEEPSPEED')}", 2]
    assert [found["strategy"] for found in run.ranks.values()] == [expected] * 2
    wholes = {rank: found[variant]["whole"] for rank, found in run.ranks.items()}
    assert wholes[0]["written"] != wholes[1]["written"]
    has_shards = run.strategy in ("zero3_cpu", "fsdp2_cpu")
    assert (wholes[0]["weights"] == wholes[1]["weights"]) != has_shards
    assert len(set(wholes[0]["weights"])) == 6
    for rank, whole in wholes.items():
        for step in run.resumes[variant]:
            resumed = run.ranks[rank][variant]["resumed"][step]
            assert resumed["written"] == whole["written"][step:]
            assert resumed["losses"] == whole["losses"][2 * step :]
            assert resumed["weights"] == whole["weights"][step:]


@each_run("stopped")
def test_signal_to_one_process_stops_both_at_same_saved_step(run):
    for found in run.ranks.values():
        whole = found["full"]["whole"]
        in_rollout, in_save = found["stopped"]
        assert (in_rollout["step"], in_save["step"]) == (3, 4)
        assert in_rollout["weights"] == whole["weights"][2:3]
        assert in_save["weights"] == whole["weights"][3:4]
    saved = (run.folder / "stopped").glob("checkpoint-*")
    assert sorted(path.name for path in saved) == ["checkpoint-3", "checkpoint-4"]


@each_run("late")
def test_checkpoint_gets_its_name_after_last_process_has_written(run):
    assert run.ranks[1]["late"] == []
    assert (run.folder / "late" / "checkpoint-3").is_dir()


@pytest.mark.parametrize("run", ["zero3"], indirect=True)
def test_kill_under_zero3_loses_no_checkpoint_and_new_processes_resume(run, make, tmp_path):
    kills = kill(make, tmp_path, run.folder / "full" / f"checkpoint-{STOPPED_FROM}")
    assert [one["left"] for one in kills] == ["checkpoint-2", "checkpoint-3"], "the second has all files"
    for one in kills:
        assert one["killed"] == [one["rank"]]
        assert one["half_written"] == []
        step = int(one["newest"].partition("-")[2])
        for rank, note in enumerate(one["went_on"]):
            whole = run.ranks[rank]["full"]["whole"]
            assert note == {"from": step, "losses": whole["losses"][2 * step : 2 * step + 2]}


@each_run()
def test_checkpoint_of_two_processes_is_refused_by_one(run, tmp_path):
    alone = trainer(tmp_path, "full")
    with pytest.raises(ValueError, match=r"world_size: 2 in the checkpoint, 1 now|has no optimizer state of"):
        alone.train(resume_from_checkpoint=str(run.folder / "full" / "checkpoint-3"))
    assert alone.loads == 0
