"""Makes transformers' trainer save into a folder aside and resume only from what is whole.

It knows when a checkpoint is written and read; `checkpoint.py` knows what a whole one is, `sigterm.py` when to stop.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers import ProcessorMixin, Trainer, TrainingArguments

from trl_opsd.loop.leftovers import nothing_left
from trl_opsd.run import checkpoint
from trl_opsd.run.sigterm import StopOnSigterm

__all__ = ["SEAMS", "SafeCheckpoints"]

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "_save_checkpoint": ("self", "model", "trial"),
    "_get_output_dir": ("self", "trial"),
    "_save": ("self", "output_dir", "state_dict"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_best_model": ("self",),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}
"""Methods of transformers' trainer that are overridden here, with their parameters; a test holds them against it."""


class SafeCheckpoints(Trainer):
    """A trainer whose checkpoints are whole or not there, and that looks at one before it goes on from it.

    Attributes:
        loads (`int`): how often the weights were replaced by those of a checkpoint.
        processor ([`~transformers.ProcessorMixin`], *optional*): of images and more, saved beside the weights, so that
            the folder can be loaded as what it came from.
    """

    loads: int = 0
    processor: ProcessorMixin | None = None
    _writes_aside: bool = False

    def __init__(self, *, args: TrainingArguments, **kwargs: Any) -> None:
        # Here transformers would begin to listen for a SIGTERM, until its training has ended without an error.
        enable_jit_checkpoint, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
        try:
            super().__init__(args=args, **kwargs)
        finally:
            args.enable_jit_checkpoint = enable_jit_checkpoint
        self._stop_on_sigterm = StopOnSigterm(self.accelerator) if enable_jit_checkpoint else None
        if self._stop_on_sigterm is not None:
            self.add_callback(self._stop_on_sigterm)

    # ---- What a subclass may fill in ----------------------------------------------------------------------------

    def check_state(self, folder: str) -> None:
        """Refuses a checkpoint that this run would not continue. Every process calls it."""

    def save_own_state(self, folder: str) -> None:
        """Writes what a checkpoint needs besides model, optimizer and scheduler. Every process calls it."""

    def load_own_state(self, folder: str) -> None:
        """The inverse of [`save_own_state`], when training resumes."""

    # ---- Reading ------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers', but a checkpoint is checked before anything of it is loaded."""
        if resume_from_checkpoint:
            resume_from_checkpoint = self._whole_checkpoint(resume_from_checkpoint)
            self.check_state(resume_from_checkpoint)
        listening = self._stop_on_sigterm.listening() if self._stop_on_sigterm else nullcontext()
        with listening, nothing_left(self):
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.loads += 1

    def _load_best_model(self) -> None:
        # After this, transformers may delete the others.
        self._whole_checkpoint(str(self.state.best_model_checkpoint))
        super()._load_best_model()
        self.loads += 1

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.loads += self.is_deepspeed_enabled  # whose engine loads the weights, not `_load_from_checkpoint`
            self.load_own_state(checkpoint)

    def _whole_checkpoint(self, asked: str | bool) -> str:
        """The checkpoint asked for, `True` for the newest; the main process looks, so that all take the same."""
        found: list[str | None] = [None, None]
        if self.accelerator.is_main_process:
            try:
                folder, remarks = checkpoint.checkpoint_to_resume(asked, Path(self.args.output_dir))
                found = [str(folder), None]
                for remark in remarks:
                    logger.warning(remark)
            except (ValueError, OSError) as error:
                found = [None, str(error)]
        folder_of_all, refusal = broadcast_object_list(found)
        if refusal is not None:
            raise ValueError(refusal)
        return str(folder_of_all)

    # ---- Writing ------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.processor is not None:
            self.processor.save_pretrained(output_dir or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As transformers', but in a folder aside, which is given its name when every process has written."""
        run_dir, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        try:
            if self.args.should_save:
                checkpoint.begin(run_dir)
            self.accelerator.wait_for_everyone()
            self._writes_aside = True
            written = Path(self._get_output_dir(trial)) / name
            super()._save_checkpoint(model, trial)
            self._name_the_best(run_dir)
            if self.args.should_save:
                self.state.save_to_json(str(written / "trainer_state.json"))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoint.publish(written, run_dir)
        except Exception as error:
            error.add_note(f"{run_dir / name} was not finished; the checkpoints before it are as they were.")
            raise
        finally:
            self._writes_aside = False
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            keep = [run_dir / name, *([Path(best)] if best else [])]
            for remark in checkpoint.rotate(run_dir, self.args.save_total_limit, keep):
                logger.warning(remark)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))

    def _name_the_best(self, run_dir: Path) -> None:
        """Writes down where the best checkpoint will be; it was looked for where this one is being written."""
        step = self.state.best_global_step
        if step and self.args.save_strategy != "no":
            best = run_dir / f"checkpoint-{step}"
            if step == self.state.global_step or best.exists():
                self.state.best_model_checkpoint = str(best)

    def _get_output_dir(self, trial: Any) -> str:
        run_dir: str = super()._get_output_dir(trial)
        return str(Path(run_dir) / checkpoint.UNFINISHED) if self._writes_aside else run_dir

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # An upload goes on in the background, so it begins when the files have come to rest.
        if not self._writes_aside:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.save_own_state(output_dir)
