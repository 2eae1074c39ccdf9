"""Rejects a training that would change nothing, once its optimizer and schedule are built and its steps are known."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.loop.dealing import of_package
from trl_opsd.models.trainable import check_optimizer
from trl_opsd.run.schedule import check_rates

__all__ = ["SEAMS", "EffectiveStarts"]

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "create_scheduler": ("self", "num_training_steps", "optimizer"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""


class EffectiveStarts(DistillationTrainer):
    """A trainer whose optimizer steps its student, at a rate that is not 0 throughout."""

    args: OPSDConfig

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers', which has made the optimizer by then."""
        given = self.lr_scheduler
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        check_rates(scheduler, num_training_steps)
        # One that was passed has been checked. Some launchers replace the parameters.
        if not of_package(self.create_optimizer) and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            check_optimizer(self.model, self.optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        if given is None and self.args.max_steps <= 0 and warmup > num_training_steps:
            logger.warning(
                f"`warmup_steps={self.args.warmup_steps:g}`, but the training has {num_training_steps} steps: it ends "
                f"before the rate reaches `learning_rate={self.args.learning_rate}`. Set fewer; below 1, it is a share "
                "of all steps."
            )
        return scheduler
