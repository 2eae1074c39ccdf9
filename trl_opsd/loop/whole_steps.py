"""Defers the end of an epoch or a training that a callback requests within an optimizer step to the end of the step.

transformers leaves such a step at once: its gradient so far is added to the next one, whose first calls TRL gives the
remaining micro-batches.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["SEAMS", "WholeSteps"]

SEAMS: dict[str, tuple[str, ...]] = {
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""


@final
class _EndsWithStep(TrainerCallback):
    """Defers stop requests to the end of the step. Has to be called last."""

    def __init__(self) -> None:
        self._epoch = self._training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._epoch = self._training = False

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._epoch |= control.should_epoch_stop
        self._training |= control.should_training_stop
        control.should_epoch_stop = control.should_training_stop = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_epoch_stop |= self._epoch
        control.should_training_stop |= self._training
        self._epoch = self._training = False


class WholeSteps(Trainer):
    """A trainer that completes each optimizer step it has begun."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ends = _EndsWithStep()
        self.add_callback(self._ends)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As transformers', after moving our callback to the end."""
        callbacks = self.callback_handler.callbacks
        if callbacks[-1] is not self._ends:  # others were added since
            # Last, or a later callback could still end the step early.
            callbacks[:] = [*(one for one in callbacks if one is not self._ends), self._ends]
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss
