"""Targets that two processes have written are those that each would have got, also where it gets other rows."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from support import forks, tiny

from trl_opsd import OPSDTrainer
from trl_opsd.cli.targets import write_targets
from trl_opsd.teacher.stored import Store

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
