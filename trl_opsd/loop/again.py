"""Makes a trainer reusable after another config, another training or new objects in its process.

Every `TrainingArguments` resets the launch's state, which all trainers of a process share; and transformers keeps the
optimizer of an earlier training, and never looks at a model or an optimizer that was assigned.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState
from transformers import Trainer

from trl_opsd.models.trainable import check_trainable
from trl_opsd.options.table import OF_THE_OPTIMIZER

__all__ = ["UsedAgain"]


class UsedAgain(Trainer):
    """A trainer that restores its launch state before it trains or evaluates, and rejects vain assignments."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    _launch: dict[str, Any] | None = None
    """The launch's state when the trainer was built."""
    _trained: Any = None
    """The model at construction, or of the last training."""
    _stepped: Any = None
    """The optimizer that was passed, or of the last training."""
    _made_for: tuple[Any, ...] | None = None
    """Values of `OF_THE_OPTIMIZER` when a training made the optimizer; `None` for an optimizer of the user's."""

    def remember_launch(self) -> None:
        """Records the launch's state and the model; to be called when the trainer is complete."""
        self._launch = dict(AcceleratorState._shared_state)
        self._trained, self._stepped = self.model, self.optimizer

    def restore_launch(self) -> None:
        """Restores this trainer's launch state, which another config or trainer may have replaced."""
        if self._launch is not None:
            # Cleared, not replaced: every instance has this dict as its `__dict__`.
            AcceleratorState._shared_state.clear()
            AcceleratorState._shared_state.update(self._launch)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', after rejecting what it ignores: another model, or options that a kept optimizer lacks."""
        self.restore_launch()
        if self._trained is not None and self.model is not self._trained:
            raise ValueError(
                "`trainer.model` was assigned after the trainer was built, but optimizer, rollout and checks have the "
                "model it was built with: build another trainer."
            )
        scheduler = None if self._created_lr_scheduler else self.lr_scheduler  # else it is made anew
        if self.optimizer is not None and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            # Those two step other tensors than the model's. What is trained may have changed since the last training.
            check_trainable(self.model, (self.optimizer, scheduler))
        if scheduler is not None and not any(scheduler.get_last_lr()) and scheduler.state_dict().get("last_epoch"):
            raise ValueError(
                "The scheduler has ended, and its rate is 0, so that no weight would change: set `trainer.optimizer = "
                "trainer.lr_scheduler = None` for new ones, or assign a new scheduler."
            )
        if self.optimizer is not None and self.optimizer is not self._stepped:
            self._made_for = None
        # Options of a passed optimizer are its own: the config's are not compared with them.
        own = self.optimizer is None or self._made_for is not None
        options = tuple(getattr(self.args, name) for name in OF_THE_OPTIMIZER)
        if self.optimizer is None or self.is_deepspeed_enabled:  # one is made now
            self._made_for = options if own else None
        elif self._made_for is not None and options != self._made_for:
            changed = [
                name for name, then, now in zip(OF_THE_OPTIMIZER, self._made_for, options, strict=True) if then != now
            ]
            raise ValueError(
                f"`args.{changed[0]}` was changed, but the optimizer of the earlier training is kept, which does not "
                "read it: set `trainer.optimizer = trainer.lr_scheduler = None` for a new one."
            )
        try:
            return super().train(*args, **kwargs)
        finally:
            self._trained, self._stepped = self.model, self.optimizer

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'."""
        self.restore_launch()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'."""
        self.restore_launch()
        return super().predict(*args, **kwargs)
