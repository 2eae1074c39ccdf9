"""Makes transformers' trainer save to a staging folder first, and resume from complete checkpoints only.

This file knows when a checkpoint is written and read; `checkpoints/` knows which are complete,
`checkpoints/sigterm.py` when to stop.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from transformers import ProcessorMixin, Trainer, TrainingArguments

from trl_opsd.checkpoints.atomic_save import UNFINISHED, begin, publish, rotate, sync_files
from trl_opsd.checkpoints.resume import (
    Settings,
    check_launch,
    checkpoint_to_resume,
    not_taken,
    remedy,
    set_rates,
    settings_of,
)
from trl_opsd.checkpoints.sigterm import StopOnSigterm

__all__ = ["SEAMS", "SafeCheckpoints"]

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "create_accelerator_and_postprocess": ("self",),
    "_save_checkpoint": ("self", "model", "trial"),
    "_get_output_dir": ("self", "trial"),
    "_save": ("self", "output_dir", "state_dict"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "create_scheduler": ("self", "num_training_steps", "optimizer"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_best_model": ("self",),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""


class SafeCheckpoints(Trainer):
    """A trainer whose checkpoints are complete or absent, and that checks one before it resumes from it."""

    loads: int = 0
    """How often the weights of a checkpoint were loaded."""
    processor: ProcessorMixin | None = None
    """A multimodal processor, saved with the weights, so that the folder loads as the original model does."""
    _writes_to_staging: bool = False
    _settings: Settings
    """Optimizer settings from the options of the latest training."""

    def __init__(self, *, args: TrainingArguments, **kwargs: Any) -> None:
        # Here transformers would install a SIGTERM handler, and remove it only when training ends without an error.
        enable_jit_checkpoint, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
        try:
            super().__init__(args=args, **kwargs)
        finally:
            args.enable_jit_checkpoint = enable_jit_checkpoint
        if not args.use_cache:  # which transformers has set in the config, and would save with the student
            vars(self.model.config).pop("use_cache", None)
            vars(self.model.config).update(self._use_cache)
        self._stop_on_sigterm = StopOnSigterm(self.accelerator) if enable_jit_checkpoint else None
        if self._stop_on_sigterm is not None:
            self.add_callback(self._stop_on_sigterm)

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers', and records `use_cache` of the student's config before transformers changes it."""
        self._use_cache = {name: value for name, value in vars(self.model.config).items() if name == "use_cache"}
        super().create_accelerator_and_postprocess()

    # ---- What a subclass may implement --------------------------------------------------------------------------

    def check_state(self, folder: str) -> None:
        """Raises for a checkpoint that this run cannot continue. Every process calls it."""

    def save_own_state(self, folder: str) -> None:
        """Writes what a checkpoint needs besides model, optimizer and scheduler. Every process calls it."""

    def load_own_state(self, folder: str) -> None:
        """The inverse of [`save_own_state`], when training resumes."""

    def kept(self, run_dir: Path) -> Collection[Path]:
        """Checkpoints in this folder that `save_total_limit` does not delete, besides the newest."""
        best = self.state.best_model_checkpoint
        return [Path(best)] if best else []

    # ---- Reading ------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers', but checks a checkpoint before loading it, and an error names the one to resume from."""
        if resume_from_checkpoint:
            resume_from_checkpoint = self._whole_checkpoint(resume_from_checkpoint)
            self.check_state(resume_from_checkpoint)
        listening = self._stop_on_sigterm.listening() if self._stop_on_sigterm else nullcontext()
        try:
            with listening:
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        except Exception as error:
            if said := remedy(Path(self.args.output_dir), self.state.global_step):
                error.add_note(said)
            raise

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.loads += 1

    def _load_best_model(self) -> None:
        # After this, transformers may delete the others.
        self._whole_checkpoint(str(self.state.best_model_checkpoint))
        super()._load_best_model()
        self.loads += 1

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers', which loads a checkpoint after this."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._settings = settings_of(self.optimizer)
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            set_rates(self.lr_scheduler)
            if changed := not_taken(self._settings, settings_of(self.optimizer)):
                logger.warning(
                    f"The optimizer goes on as in {checkpoint}: {changed}. For other settings begin a new run with its "
                    "model: pass that to a trainer, and do not resume."
                )
            self.loads += self.is_deepspeed_enabled  # whose engine loads the weights, not `_load_from_checkpoint`
            self.load_own_state(checkpoint)

    def _whole_checkpoint(self, asked: str | bool) -> str:
        """The requested checkpoint, `True` for the newest complete on every machine with its own disk. Collective."""
        found = gather_object([self._found(asked)] if self.args.should_save else [])
        if refusal := next((refusal for _, refusal in found if refusal), None):
            raise ValueError(refusal)
        folders = {folder for folder, _ in found}
        if len(folders) > 1:  # the newest of each machine; a later one than the oldest of them is not everywhere
            return self._whole_checkpoint(min(folders, key=lambda folder: int(folder.rpartition("-")[2])))
        return folders.pop()

    def _found(self, asked: str | bool) -> tuple[str, str]:
        """The requested checkpoint on this machine's disk, and why it cannot be used."""
        try:
            folder, remarks = checkpoint_to_resume(asked, Path(self.args.output_dir))
            check_launch(folder, self.is_deepspeed_enabled, self.is_fsdp_enabled)
        except (ValueError, OSError) as error:
            return "", str(error)
        for remark in remarks:
            logger.warning(remark)
        return str(folder), ""

    # ---- Writing ------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.processor is not None:
            self.processor.save_pretrained(output_dir or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As transformers', but to a staging folder, which is renamed when every process has written."""
        run_dir, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        try:
            if self.args.should_save:
                begin(run_dir)
            self.accelerator.wait_for_everyone()
            # Not before the main process has cleared the folder.
            self._writes_to_staging = True
            written = Path(self._get_output_dir(trial)) / name
            super()._save_checkpoint(model, trial)
            self._point_to_best(run_dir)
            if self.args.should_save:
                # Again, with the best checkpoint's final path.
                self.state.save_to_json(str(written / "trainer_state.json"))
            self.accelerator.wait_for_everyone()
            if self.args.local_process_index == 0:  # a machine can sync only what was written on it
                sync_files(written)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                publish(written, run_dir)
        except Exception as error:
            error.add_note(f"{run_dir / name} was not finished; earlier checkpoints are unchanged.")
            raise
        finally:
            self._writes_to_staging = False
        if self.args.should_save:
            keep = [run_dir / name, *self.kept(run_dir)]
            for remark in rotate(run_dir, self.args.save_total_limit, keep):
                logger.warning(remark)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))

    def _point_to_best(self, run_dir: Path) -> None:
        """Sets the final path of the best checkpoint, which transformers looked for in the staging folder."""
        step = self.state.best_global_step
        if step and self.args.save_strategy != "no":
            best = run_dir / f"checkpoint-{step}"
            if step == self.state.global_step or best.exists():
                self.state.best_model_checkpoint = str(best)

    def _get_output_dir(self, trial: Any) -> str:
        run_dir: str = super()._get_output_dir(trial)
        return str(Path(run_dir) / UNFINISHED) if self._writes_to_staging else run_dir

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # An upload runs in the background, so it starts when the files are in place.
        if not self._writes_to_staging:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.is_deepspeed_enabled and self.args.should_save:
            # DeepSpeed writes it on the first machine only, and does not load a checkpoint without it.
            Path(output_dir, "latest").write_text(f"global_step{self.state.global_step}")
        self.save_own_state(output_dir)
