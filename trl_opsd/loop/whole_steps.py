"""Ends an epoch or a training that a callback ends within an optimizer step, when that step is done.

transformers leaves such a step at once: what it has added to the gradient is stepped along in the next one, whose first
calls TRL gives the micro-batches that are left of it.
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
    """Takes back what others ask for within a step, and asks for it at its end. Has to be called last."""

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
    """A trainer that takes each optimizer step that it has begun."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ends = _EndsWithStep()
        self.add_callback(self._ends)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As transformers'."""
        callbacks = self.callback_handler.callbacks
        if callbacks[-1] is not self._ends:  # others were added since
            callbacks[:] = [*(one for one in callbacks if one is not self._ends), self._ends]
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss
