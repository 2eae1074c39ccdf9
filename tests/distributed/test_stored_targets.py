"""Targets that two processes have written are those that each would have got, also where it gets other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from support import forks, tiny

from trl_opsd import OPSDTrainer
from trl_opsd.cli.targets import write_targets

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60), pytest.mark.long]
# Of very different lengths, so that processes exchange rows.
ROWS = tiny.rows().add_column("completion", [f"the {number}th of {'many ' * number**2}" for number in range(8)])


def of_processes(folder: Path, strategy: str) -> dict[str, Any]:
    """The losses and weights of a run with the teacher, and of one with what was written of it."""

    def trainer(name: str, **given: Any) -> OPSDTrainer:
        args = tiny.config(
            folder / name,
            **{"lmbda": 0.0, "max_completion_length": 200, "learning_rate": 1e-2, "max_steps": 3, **given},
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            logging_steps=1,
        )
        student, teacher = (str(folder / one) for one in ("student", "teacher"))
        given = {} if args.teacher_targets else {"teacher_model": teacher}
        return OPSDTrainer(model=student, args=args, train_dataset=ROWS, processing_class=tiny.tokenizer(), **given)

    def trained(name: str, **given: Any) -> tuple[list[float], Any]:
        one = trainer(name, **given)
        one.train()
        losses = [log["loss"] for log in one.state.log_history if "loss" in log]
        return losses, tiny.weights(one).numpy()

    offload = {"teacher_offload": "zero3"} if strategy == "zero3" else {}
    lived = trained("lived", **offload)
    store = write_targets(trainer("written", **offload), folder / "targets")
    stored = trained("stored", teacher_targets=str(folder / "targets"))
    return {"lived": lived, "stored": stored, "rows": len(store.rows), "process": PartialState().process_index}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_two_processes_train_from_targets_bit_for_bit(tmp_path, strategy):
    tiny.save_pair(tmp_path)
    for found in forks.results(
        {"zero3": "zero3_cpu"}.get(strategy, strategy), of_processes, tmp_path, strategy
    ).values():
        assert found["rows"] == len(ROWS)
        assert len(found["lived"][0]) == 3
        assert found["lived"][0] == found["stored"][0]
        assert (found["lived"][1] == found["stored"][1]).all()
    # One process reads what two have written.
    one = OPSDTrainer(
        model=str(tmp_path / "student"),
        args=tiny.config(
            tmp_path / "one", lmbda=0.0, max_completion_length=200, teacher_targets=str(tmp_path / "targets")
        ),
        train_dataset=ROWS,
        processing_class=tiny.tokenizer(),
    )
    one.train()
    assert torch.isfinite(tiny.weights(one)).all()
