"""Two processes that write targets, or share prefixes of their own, get what each would have got alone."""

from __future__ import annotations

import random
import time
from unittest import mock

import pytest
import torch
import variants
from support import forks, tiny

from trl_opsd import FrozenTeacher, OPSDTrainer
from trl_opsd.cli.targets import write_targets
from trl_opsd.teacher import Resident
from trl_opsd.teacher.stored import Store
from trl_opsd.types import Rollout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60), pytest.mark.long]
# Of very different lengths, so that processes exchange rows; the last two are for one process.
COMPLETIONS = [f"the {number}th of {'many ' * (number % 8) ** 2}" for number in range(14)]
ROWS = tiny.rows(14).add_column("completion", COMPLETIONS)


def trainer(folder, name, **given):
    options = {"lmbda": 0.0, "max_completion_length": 200, "learning_rate": 1e-2}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    return OPSDTrainer(
        model=str(folder / "student"),
        teacher_model=None if "teacher_targets" in given else str(folder / "teacher"),
        args=tiny.config(folder / name, **options, **sizes, **given),
        train_dataset=ROWS,
        processing_class=tiny.tokenizer(),
    )


def trained(*where, **given):
    one = trainer(*where, **given)
    one.train()
    return tiny.logged(one, "loss"), tiny.weights(one).numpy()


def of_processes(folder, strategy):
    """The losses and weights of a run with the teacher, and of one with what was written of it."""
    offload = {"teacher_offload": "zero3"} if "zero3" in strategy else {}
    lived = trained(folder, "lived", **offload)
    end = Store.end
    with mock.patch.object(Store, "end", lambda store: time.sleep(2) or end(store)):  # no process trains before
        store = write_targets(trainer(folder, "written", **offload), folder / "targets")
    stored = trained(folder, "stored", teacher_targets=str(folder / "targets"))
    return {"lived": lived, "stored": stored, "rows": len(store.rows)}


@pytest.mark.parametrize("strategy", ["ddp", "zero3_cpu"])
def test_two_processes_train_from_targets_bit_for_bit(tmp_path, strategy):
    tiny.save_pair(tmp_path)
    for found in forks.results(strategy, of_processes, tmp_path, strategy).values():
        assert found["rows"] == len(ROWS)
        assert len(found["lived"][0]) == 3
        assert found["lived"][0] == found["stored"][0]
        assert (found["lived"][1] == found["stored"][1]).all()
    # One process reads what two have written.
    _, weights = trained(tmp_path, "one", teacher_targets=str(tmp_path / "targets"))
    assert torch.isfinite(torch.from_numpy(weights)).all()


CPU = torch.device("cpu")
TEACHERS = {
    "sharded": {"teacher_offload": "zero3"},
    "streamed": {"teacher_offload": "stream"},
    "own base": {"teacher_model_kind": "base", "lora": variants.LORA},
}


def rollouts(rank):
    """The rows of a process in each call: other documents, other lengths, and not equally many passes."""
    draw = random.Random(rank)

    def ids(number):
        return [draw.randint(3, tiny.VOCABULARY - 1) for _ in range(number)]

    document, other = ids(130 + 20 * rank), ids(160)
    calls = [[document] * 3, [document] * 2 + [other] * rank, [ids(5)] * (1 + 3 * rank), [other] * 2]
    return [
        Rollout.of([[*one, *ids(4)] for one in call], [ids(draw.randint(1, 6)) for _ in call], CPU) for call in calls
    ]


def read(folder, names):
    """Of each teacher, the largest distance of a call's targets from those of whole rows, relative to their norm."""
    # before there is a DeepSpeed config, which would split them
    whole = {width: FrozenTeacher(Resident(tiny.qwen2(width, seed), CPU)) for width, seed in ((48, 1), (32, 0))}
    found = {}
    for name in names:
        options = {**TEACHERS[name], "teacher_prefix_cache_gb": 0.1, "max_steps": 1}
        trainer = variants.build(folder, options, processes=2)
        trainer.train()
        apart = []
        for rollout in rollouts(trainer.accelerator.process_index):
            expected = whole[32 if name == "own base" else 48].targets(rollout).hidden
            apart.append(float((trainer.teacher.targets(rollout).hidden - expected).norm() / expected.norm()))
        prefix = trainer.teacher.prefix
        found[name] = {"apart": max(apart), "saved": prefix.saved, "kept": len(prefix.kept)}
    return found


@pytest.mark.parametrize(
    ("strategy", "teachers"),
    [("zero3_cpu", [*TEACHERS]), ("fsdp2_cpu", ["streamed", "own base"]), ("ddp", ["streamed", "own base"])],
)
def test_different_prefixes_per_process_equal_whole_rows(tmp_path, strategy, teachers):
    variants.save_models(tmp_path)
    found = forks.results(strategy, read, tmp_path, teachers)
    for name in teachers:
        first, second = (found[rank][name] for rank in (0, 1))
        assert max(first["apart"], second["apart"]) < 2e-6
        assert first["kept"] == second["kept"] == 160
        assert first["saved"] == 2 * 130 + 2 * 130 + 160
        assert second["saved"] == 2 * 150 + 160, "rows of two documents share nothing"
