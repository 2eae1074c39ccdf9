"""Two processes, one student: runs resume bit for bit, stop at the same step, and lose no checkpoint to a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import run
from watched import trainer

HERE = Path(__file__).parent
SECONDS = 400
STRATEGIES = {"ddp": "MULTI_CPU", "zero3_cpu": "DEEPSPEED"}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(SECONDS + 20)]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder) -> dict[str, Any]:
    """The results of `sharded.py` by strategy and rank, and its kills."""
    run(HERE / "sharded.py", folder, *STRATEGIES, "--kill", "some", seconds=SECONDS)
    return json.loads((folder / "results.json").read_text())


@each_strategy
@pytest.mark.parametrize("variant", ["full", "lora"])
def test_a_resumed_run_of_two_processes_equals_an_uninterrupted_one(results, strategy, variant):
    ranks = results[strategy]
    assert all(ranks[rank]["strategy"] == [f"DistributedType.{STRATEGIES[strategy]}", 2] for rank in ("0", "1"))
    wholes = [ranks[rank][variant]["whole"] for rank in ("0", "1")]
    assert wholes[0]["written"] != wholes[1]["written"]
    assert (wholes[0]["weights"] == wholes[1]["weights"]) == (strategy == "ddp"), "else each has its own shards"
    assert len(set(wholes[0]["weights"])) == 6
    for rank, whole in enumerate(wholes):
        for step in (3, 4):
            resumed = ranks[str(rank)][variant]["resumed"][str(step)]
            assert resumed["written"] == whole["written"][step:]
            assert resumed["losses"] == whole["losses"][2 * step :]
            assert resumed["weights"] == whole["weights"][step:]


@each_strategy
def test_each_process_hashes_the_files_that_it_wrote(results, strategy):
    hashed = [results[strategy][rank]["hashed"] for rank in ("0", "1")]
    shards = [f"global_step4/zero_pp_rank_1_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
    assert hashed[1] == [*(shards if strategy == "zero3_cpu" else []), "rng_state_1.pth"]
    assert {"model.safetensors", "trainer_state.json", "rng_state_0.pth"} <= set(hashed[0])


@each_strategy
def test_two_processes_train_no_step_of_a_finished_run(results, strategy):
    for rank in ("0", "1"):
        assert results[strategy][rank]["finished"] == {"step": 3, "written": [], "losses": [], "weights": []}


@each_strategy
def test_a_row_that_one_process_changed_is_read_again_by_both(results, strategy):
    changed = [results[strategy][rank]["changed"] for rank in ("0", "1")]
    assert changed[0] == changed[1]
    assert changed[0]["taught"] == 2, "the generation batch, and the micro-batch with that row"
    assert changed[0]["loss"] > 0


@each_strategy
def test_a_signal_to_one_process_stops_both_at_the_same_saved_step(results, folder, strategy):
    for rank in ("0", "1"):
        whole = results[strategy][rank]["full"]["whole"]
        in_rollout, in_save = results[strategy][rank]["stopped"]
        assert (in_rollout["step"], in_save["step"]) == (3, 4)
        assert in_rollout["weights"] == whole["weights"][2:3]
        assert in_save["weights"] == whole["weights"][3:4]
    stopped = folder / strategy / "stopped"
    assert sorted(path.name for path in stopped.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


@each_strategy
def test_a_checkpoint_gets_its_name_after_the_last_process_has_written(results, folder, strategy):
    assert results[strategy]["1"]["late"] == []
    assert (folder / strategy / "late" / "checkpoint-3").is_dir()


def test_a_kill_under_zero3_neither_damages_nor_loses_a_checkpoint(results):
    kills = results["kills"]
    assert [kill["killed"] for kill in kills] == [[kill["rank"]] for kill in kills]
    assert [kill["half_written"] for kill in kills] == [[]] * len(kills)
    assert {kill["newest"] for kill in kills} == {"checkpoint-2"}
    assert [kill["left"] for kill in kills] == ["checkpoint-2", "checkpoint-2", "checkpoint-3"], (
        "the last has all files"
    )


def test_a_fresh_pair_of_processes_resumes_exactly_after_a_kill(results):
    for kill in results["kills"]:
        step = int(kill["newest"].partition("-")[2])
        for rank, note in enumerate(kill["went_on"]):
            whole = results["zero3_cpu"][str(rank)]["full"]["whole"]
            assert note == {"from": step, "losses": whole["losses"][2 * step : 2 * step + 2]}


@each_strategy
def test_a_checkpoint_of_two_processes_is_refused_by_one(results, folder, tmp_path, strategy):
    alone = trainer(tmp_path, "full")
    with pytest.raises(
        ValueError, match=r"world_size: 2 in the checkpoint, 1 now|was written under DeepSpeed, and this launch"
    ):
        alone.train(resume_from_checkpoint=str(folder / strategy / "full" / "checkpoint-3"))
    assert alone.loads == 0
