"""SIGTERM in one process; two processes are tested in `test_sharded.py`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.witnessed_run import trainer
from transformers import TrainerCallback

from trl_opsd import OPSDTrainer
from trl_opsd.checkpoints import problems

AT = 3


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Signalled(TrainerCallback):
    """Sends the signal in one phase of the step that leads to `AT`, or while `AT` is saved."""

    def __init__(self, run: OPSDTrainer, phase: str) -> None:
        self.run, self.phase = run, phase
        if phase == "rollout":
            self._signal_in(run.rollout, "complete", AT - 1)
        if phase == "save":
            self._signal_in(run, "_save_optimizer_and_scheduler", AT)

    def _signal_in(self, thing: Any, name: str, step: int) -> None:
        method = getattr(thing, name)

        def signalled(*args: Any) -> Any:
            if self.run.state.global_step == step:
                send_sigterm()
            return method(*args)

        setattr(thing, name, signalled)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.phase == "gradient" and state.global_step == AT - 1:
            send_sigterm()


def saved_steps(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"README.md"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = trainer(tmp_path_factory.mktemp("whole"), "full")
    run.train()
    return run.witness


@pytest.mark.parametrize(
    ("phase", "saving"),
    [("rollout", "no"), ("gradient", "epoch"), ("save", "steps")],
)
def test_run_stopped_by_sigterm_is_saved_and_resumes_exactly(whole, tmp_path, phase, saving):
    before = signal.getsignal(signal.SIGTERM)
    run = trainer(tmp_path, "full", save_strategy=saving, save_steps=AT, enable_jit_checkpoint=True)
    run.add_callback(Signalled(run, phase))
    run.train()
    assert run.state.global_step == AT
    assert run.witness.weights == whole.weights[:AT]
    assert saved_steps(tmp_path) == {f"checkpoint-{AT}"}
    assert problems(tmp_path / f"checkpoint-{AT}") == []
    evaluated = any("eval_loss" in entry for entry in run.state.log_history)
    assert evaluated == (phase == "save"), "an evaluation would delay the exit"
    assert signal.getsignal(signal.SIGTERM) == before
    assert run.interrupted

    resumed = trainer(tmp_path, "full")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.witness.weights == whole.weights[AT:]
    assert not resumed.interrupted


def test_signal_handler_is_restored_after_failure(make_trainer):
    class Failing(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise RuntimeError("enough")

    before = signal.getsignal(signal.SIGTERM)
    run = make_trainer(enable_jit_checkpoint=True, callbacks=[Failing()])
    assert signal.getsignal(signal.SIGTERM) == before, "before it trains there is nothing to save"
    with pytest.raises(RuntimeError, match="enough"):
        run.train()
    assert signal.getsignal(signal.SIGTERM) == before
