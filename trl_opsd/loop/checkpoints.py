"""Saves checkpoints that are complete or absent, also on SIGTERM, and resumes from complete ones only.

A cluster sends SIGTERM before it reclaims a machine. This replaces the handler of transformers, in which each process
decides for itself at which step to save, and waits three seconds before that; a save may fall between a step and the
random numbers drawn for it, so that a run cannot resume from it exactly; and a folder is named `checkpoint-N` while it
is still empty.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd import checkpoints as disk
from trl_opsd.checkpoints import UNFINISHED

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

__all__ = ["Checkpoints"]

logger = get_logger(__name__)


@final
class Checkpoints:
    """Checkpoints of a trainer; with `stops_on_sigterm` one is also saved when a cluster ends the run."""

    def __init__(self, trainer: OPSDTrainer, stops_on_sigterm: bool) -> None:
        self._trainer = trainer
        self._sigterm = _StopOnSigterm(trainer.accelerator) if stops_on_sigterm else None
        if self._sigterm is not None:
            trainer.add_callback(self._sigterm)
        self._settings: dict[tuple[int, str], Any] = {}
        """Optimizer settings from the options of the latest training."""
        self.interrupted = False
        """Whether a SIGTERM ended the last training."""
        self.is_staging = False
        """Whether one is being written, and not yet published."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Handles SIGTERM during a training; an error names the checkpoint to resume from."""
        try:
            with self._sigterm.listening() if self._sigterm else nullcontext():
                yield
        except Exception as error:
            if advice := disk.remedy(Path(self._trainer.args.output_dir), self._trainer.state.global_step):
                error.add_note(advice)
            raise
        self.interrupted = self._sigterm is not None and self._sigterm.stopping

    # ---- Reading ------------------------------------------------------------------------------------------------

    def are_there(self) -> bool:
        """Whether any machine's disk has a checkpoint, complete or not. Collective."""
        run_dir = Path(self._trainer.args.output_dir)
        if self._trainer.args.should_save:
            disk.recover(run_dir)
        return any(gather_object([bool(disk.numbered(run_dir))]))

    def whole(self, asked: str | bool) -> str:
        """The requested checkpoint, `True` for the newest complete on every machine with its own disk. Collective."""
        found = gather_object([self._found(asked)] if self._trainer.args.should_save else [])
        if refusal := next((refusal for _, refusal in found if refusal), None):
            raise ValueError(refusal)
        folders = {folder for folder, _ in found}
        if len(folders) > 1:  # the newest of each machine; a later one than the oldest of them is not everywhere
            return self.whole(min(folders, key=lambda folder: int(folder.rpartition("-")[2])))
        return str(folders.pop())

    def _found(self, asked: str | bool) -> tuple[str, str]:
        """The requested checkpoint on this machine's disk, and why it cannot be used."""
        try:
            folder, remarks = disk.checkpoint_to_resume(asked, Path(self._trainer.args.output_dir))
            disk.check_launch(folder, self._trainer.is_deepspeed_enabled, self._trainer.is_fsdp_enabled)
        except (ValueError, OSError) as error:
            return "", str(error)
        for remark in remarks:
            logger.warning(remark)
        return str(folder), ""

    def note_settings(self) -> None:
        """Records the optimizer's settings before a checkpoint is loaded into it."""
        self._settings = disk.settings_of(self._trainer.optimizer)

    def after_optimizer_load(self, checkpoint: str) -> None:
        """Sets the rates of this run's schedule, and warns of settings that the checkpoint has overwritten."""
        disk.set_rates(self._trainer.lr_scheduler)
        if changed := disk.not_taken(self._settings, disk.settings_of(self._trainer.optimizer)):
            logger.warning(
                f"The optimizer keeps the settings of {checkpoint}: {changed}. To change them, start a new run from "
                "its model: pass the checkpoint as `model`, and do not resume."
            )

    # ---- Writing ------------------------------------------------------------------------------------------------

    def save(self, run_dir: Path, write: Callable[[], None]) -> Path:
        """Has `write` write a checkpoint, and renames it when every process has; older ones but the best may go."""
        args, state, accelerator = self._trainer.args, self._trainer.state, self._trainer.accelerator
        name = f"checkpoint-{state.global_step}"
        written = run_dir / UNFINISHED / name
        try:
            with disk.on_disk(run_dir):
                if args.should_save:
                    disk.begin(run_dir)
                accelerator.wait_for_everyone()  # not before the main process has cleared the folder
                self.is_staging = True
                write()
                self._point_to_best(run_dir)
                if args.should_save:
                    state.save_to_json(str(written / "trainer_state.json"))  # again, with the best one's final path
                accelerator.wait_for_everyone()
                if args.local_process_index == 0:  # a machine can sync only what was written on it
                    disk.sync_files(written)
                accelerator.wait_for_everyone()
                if args.should_save:
                    disk.publish(written, run_dir)
        finally:
            self.is_staging = False
        if args.should_save:
            best = [] if state.best_model_checkpoint is None else [Path(state.best_model_checkpoint)]
            for remark in disk.rotate(run_dir, args.save_total_limit, [run_dir / name, *best]):
                logger.warning(remark)
        accelerator.wait_for_everyone()
        return run_dir / name

    def _point_to_best(self, run_dir: Path) -> None:
        """Sets the final path of the best checkpoint, which transformers looked for in the staging folder."""
        state = self._trainer.state
        if (step := state.best_global_step) and self._trainer.args.save_strategy != "no":
            best = run_dir / f"checkpoint-{step}"
            if step == state.global_step or best.exists():
                state.best_model_checkpoint = str(best)

    def complete_for_deepspeed(self, folder: str) -> None:
        """Writes a file that DeepSpeed writes on the first machine only, and does not load a checkpoint without."""
        if self._trainer.is_deepspeed_enabled and self._trainer.args.should_save:
            Path(folder, "latest").write_text(f"global_step{self._trainer.state.global_step}")


class _StopOnSigterm(TrainerCallback):
    """Saves after the step in which the first process received a SIGTERM, on all processes, and stops."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._received = False
        self.stopping = False
        """Whether the training ends, or has ended, because of it."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGTERM within the context; raises outside the main thread, where Python cannot handle signals."""
        self._received = self.stopping = False
        before = signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._is_time_to_stop():
            logger.warning(f"SIGTERM: saving at step {state.global_step} and stopping.")
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may not be time for it

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.stopping:  # else saved because of it
            control.should_training_stop |= self._is_time_to_stop()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.stopping:  # saved already
            control.should_save = control.should_evaluate = False

    def _receive(self, *_: Any) -> None:
        # No collective and no logging here: the signal may have interrupted either.
        self._received = True

    def _is_time_to_stop(self) -> bool:
        if self._received:
            self._accelerator.set_trigger()
        # Collective, once per step, so that all processes stop at the same one.
        self.stopping = bool(self._accelerator.check_trigger())
        return self.stopping
