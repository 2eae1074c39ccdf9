"""Checkpoints that a trainer writes to its output folder, also on SIGTERM, and resumes from.

Two processes are tested in `checkpoints/test_sharded.py`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import tiny
from support.witnessed_run import trainer as witnessed
from transformers import TrainerState

from trl_opsd import OPSDError, OPSDTrainer, ServerError
from trl_opsd.checkpoints import MANIFEST, UNFINISHED, checkpoint_to_resume, problems
from trl_opsd.loop import checkpoints

EACH_STEP = {"save_strategy": "steps", "save_steps": 1}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"README.md"}


def test_checkpoints_of_a_training_are_complete(make_trainer, tmp_path):
    make_trainer(**EACH_STEP).train()
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        assert problems(folder) == []
        assert set(json.loads((folder / MANIFEST).read_text())["files"]) == names(folder) - {MANIFEST}


@pytest.mark.parametrize("handed_in", [True, False, None])
def test_use_cache_of_given_student_is_saved(trained, tmp_path, handed_in):
    student = tiny.qwen2()
    if handed_in is None:
        vars(student.config).pop("use_cache", None)
    else:
        student.config.use_cache = handed_in
    expected = student.config.to_dict().get("use_cache")
    trainer = trained(model=student, gradient_checkpointing=True, max_steps=1, **EACH_STEP)
    trainer.save_model(tmp_path / "saved")
    for folder in ("saved", "checkpoint-1"):
        assert json.loads((tmp_path / folder / "config.json").read_text()).get("use_cache") is expected


@pytest.mark.refusal
@pytest.mark.quick
def test_damaged_checkpoint_is_refused_by_path_and_skipped_otherwise(make_trainer, trained, tmp_path, caplog):
    whole = trained(**EACH_STEP)
    os.truncate(tmp_path / "checkpoint-3" / "optimizer.pt", 100)
    resumed = make_trainer()
    with pytest.raises(ValueError, match=r"checkpoint-3 is not complete: optimizer.pt has 100 bytes instead of \d+"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.loads == 0
    resumed.train(resume_from_checkpoint=True)
    assert f"Resuming from {tmp_path / 'checkpoint-2'}: {tmp_path / 'checkpoint-3'} is not complete" in caplog.text
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


BEST = {
    **EACH_STEP, "eval_dataset": tiny.rows(), "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True,
    "learning_rate": 1e-2, "greater_is_better": True,
}  # fmt: skip
"""The best is the first."""


@pytest.mark.parametrize(("limit", "left"), [(None, {1, 2, 3}), (2, {1, 3}), (1, {1})])
def test_best_model_is_loaded_at_end(trained, tmp_path, limit, left):
    trainer = trained(**BEST, save_total_limit=limit)
    best = tmp_path / "checkpoint-1"
    assert names(tmp_path) == {f"checkpoint-{step}" for step in left}
    saved = load_file(best / "model.safetensors")
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    for step in left:
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(best), "not the path it was written to"


@pytest.mark.refusal
def test_damaged_best_checkpoint_is_not_loaded_and_others_are_kept(make_trainer, tmp_path):
    class Tear(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 3:
                os.truncate(tmp_path / "checkpoint-1" / "scheduler.pt", 10)

    trainer = make_trainer(**BEST, save_total_limit=2, callbacks=[Tear()])
    with pytest.raises(ValueError, match=r"checkpoint-1 is not complete: scheduler\.pt has 10 bytes"):
        trainer.train()
    assert problems(tmp_path / "checkpoint-3") == []


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS])
def test_failed_write_leaves_earlier_checkpoints_intact(trained, tmp_path, monkeypatch, fault):
    trainer = trained(**EACH_STEP, max_steps=1)
    trainer.state.global_step = 2
    files = ["model.safetensors", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"]
    for file in [*files, "trainer_state.json", MANIFEST]:

        def refusing(real, path_at, file=file):
            def write(*args, **kwargs):
                if Path(args[path_at]).name == file:
                    with open(args[path_at], "wb") as half:
                        half.write(b"half")
                    raise OSError(fault, os.strerror(fault))
                return real(*args, **kwargs)

            return write

        with monkeypatch.context() as patched:
            patched.setattr(torch, "save", refusing(torch.save, 1))
            patched.setattr(transformers.modeling_utils, "safe_save_file", refusing(save_file, 1))
            patched.setattr(transformers.TrainerState, "save_to_json", refusing(TrainerState.save_to_json, 1))
            patched.setattr(Path, "open", refusing(Path.open, 0))
            of_user = (OPSDError, r"The disk of .* is full") if fault == errno.ENOSPC else (OSError, os.strerror(fault))
            with pytest.raises(of_user[0], match=of_user[1]):
                trainer._save_checkpoint(trainer.model, None)
        assert checkpoint_to_resume(True, tmp_path) == (tmp_path / "checkpoint-1", [])
        assert names(tmp_path) == {"checkpoint-1", UNFINISHED}
    trainer._save_checkpoint(trainer.model, None)
    assert checkpoint_to_resume(True, tmp_path) == (tmp_path / "checkpoint-2", []), "once there is room again"
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}


@pytest.mark.parametrize(("steps", "left"), [(1, None), (2, "checkpoint-2"), (4, "")])
def test_error_ends_with_checkpoint_to_resume_from(make_trainer, tmp_path, steps, left):
    class Failing(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == (0 if left is None else 3):
                raise ServerError("gone")

    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / MANIFEST).write_text("{}")  # of a longer run before
    trainer = make_trainer(callbacks=[Failing()], max_steps=5, save_strategy="steps", save_steps=steps)
    with pytest.raises(ServerError, match="gone") as raised:
        trainer.train()
    notes = getattr(raised.value, "__notes__", [])
    if left:
        assert notes[-1].startswith(f"To resume from {tmp_path / left}, the newest checkpoint")
    else:
        assert notes == []


@pytest.mark.parametrize("others", [("checkpoint-1", ""), ("", "checkpoint-2 is not complete")])
def test_all_machines_resume_from_a_checkpoint_that_each_has(trained, tmp_path, monkeypatch, others):
    trainer = trained(**EACH_STEP, max_steps=2)
    folder, refusal = others
    answers = iter([(folder and str(tmp_path / folder), refusal)])
    monkeypatch.setattr(checkpoints, "gather_object", lambda mine: [*mine, *[next(answers, mine[0])]])
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            trainer._checkpoints.whole(True)
    else:
        assert trainer._checkpoints.whole(True) == str(tmp_path / "checkpoint-1")


def test_full_disk_is_named(trained, tmp_path, monkeypatch):
    """torch's own error, of `/dev/full`, is "unexpected pos 640 vs 534"."""
    trainer = trained(**EACH_STEP, max_steps=1)
    torch_save, free = torch.save, SimpleNamespace(free=0)
    monkeypatch.setattr(torch, "save", lambda saved, path, *given, **more: torch_save(saved, "/dev/full"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    trainer.state.global_step = 2
    with pytest.raises(OPSDError, match=f"The disk of {tmp_path} is full, 0 bytes are free"):
        trainer._save_checkpoint(trainer.model, None)
    with pytest.raises(OPSDError, match="final is full, 0 bytes are free"):
        trainer.save_model(str(tmp_path / "final"))
    free.free = 10**9
    with pytest.raises(RuntimeError, match="unexpected pos"):  # with room it was something else
        trainer._save_checkpoint(trainer.model, None)
    assert checkpoint_to_resume(True, tmp_path) == (tmp_path / "checkpoint-1", [])


def test_only_complete_checkpoints_are_uploaded(make_trainer, tmp_path, monkeypatch):
    pushed = []

    def push(self, folder):
        pushed.append((folder, problems(Path(folder))))

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    trainer = make_trainer(**EACH_STEP, max_steps=2)
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda *args, **kwargs: None)
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [(str(tmp_path / "checkpoint-1"), []), (str(tmp_path / "checkpoint-2"), [])]


def test_training_in_a_thread_starts_anew_unless_a_checkpoint_is_asked_for(make_trainer, trained):
    trained(**EACH_STEP, max_steps=1)
    other, stopped = make_trainer(temperature=0.7, max_steps=2), make_trainer(enable_jit_checkpoint=True)
    with ThreadPoolExecutor() as pool:
        pool.submit(other.train, resume_from_checkpoint=False).result()
        with pytest.raises(ValueError, match="main thread"):
            pool.submit(stopped.train).result()
    assert (other.state.global_step, stopped.state.global_step) == (2, 0)


# ---- SIGTERM ---------------------------------------------------------------------------------------------------------


AT = 3


def signal_in(run: OPSDTrainer, phase: str) -> None:
    """Sends the signal in a phase of the step that leads to `AT`, or while `AT` is saved."""
    thing, name, step = {
        "rollout": (run.rollout, "complete", AT - 1),
        "gradient": (run, "_get_grad_norm", AT - 1),
        "save": (run, "_save_optimizer_and_scheduler", AT),
    }[phase]
    method = getattr(thing, name)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if run.state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return method(*args, **kwargs)

    setattr(thing, name, signalled)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = witnessed(tmp_path_factory.mktemp("whole"), "full")
    run.train()
    return run.witness


@pytest.mark.parametrize(("phase", "saving"), [("rollout", "no"), ("gradient", "epoch"), ("save", "steps")])
def test_run_stopped_by_sigterm_is_saved_and_resumes_exactly(whole, tmp_path, phase, saving):
    before = signal.getsignal(signal.SIGTERM)
    run = witnessed(tmp_path, "full", save_strategy=saving, save_steps=AT, enable_jit_checkpoint=True)
    signal_in(run, phase)
    run.train()
    assert run.state.global_step == AT
    assert run.witness.weights == whole.weights[:AT]
    assert names(tmp_path) == {f"checkpoint-{AT}"}
    assert problems(tmp_path / f"checkpoint-{AT}") == []
    evaluated = any("eval_loss" in entry for entry in run.state.log_history)
    assert evaluated == (phase == "save"), "an evaluation would delay the exit"
    assert signal.getsignal(signal.SIGTERM) == before
    assert run.interrupted

    resumed = witnessed(tmp_path, "full")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.witness.weights == whole.weights[AT:]
    assert not resumed.interrupted
