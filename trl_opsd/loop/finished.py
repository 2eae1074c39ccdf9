"""Makes transformers' trainer train no step when it resumes from a checkpoint that has all of them.

transformers and TRL train one step more each time, unless the last step was also the last of an epoch: they compare the
steps with `max_steps` only after a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import Trainer

from trl_opsd.run.checkpoint import newest_complete

__all__ = ["SEAMS", "FinishedRuns"]

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "_init_training_state": (
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "log": ("self", "logs", "start_time"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""


class FinishedRuns(Trainer):
    """A trainer that, resumed from a finished run, loads the checkpoint and returns."""

    _was_finished: bool = False

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """As transformers', but a finished run begins after its last epoch."""
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        left, _ = newest_complete(Path(self.args.output_dir))
        if resume_from_checkpoint is None and left is not None:
            logger.warning(
                f"A new run begins, but {left} is there, of an earlier one: `resume_from_checkpoint=True` goes on from "
                "whichever checkpoint has the highest number. Remove it, or choose another `output_dir`."
            )
        self._was_finished = resume_from_checkpoint is not None and self.state.global_step >= max_steps
        if not self._was_finished:
            return begin
        logger.warning(
            f"No step is left to train: {resume_from_checkpoint} is of step {self.state.global_step} of {max_steps}. "
            "To train on, raise `max_steps` or `num_train_epochs`."
        )
        return num_train_epochs, 0  # no epoch is left for transformers' loop

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As transformers', but without the loss of a training that had no step, which would be 0."""
        if self._was_finished:
            logs.pop("train_loss", None)
        super().log(logs, start_time)
