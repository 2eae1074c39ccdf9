"""Makes transformers' trainer wrap its model for training even if it has evaluated or trained before.

transformers wraps a model once, and keeps what an evaluation has prepared: several processes would then each train a
model of their own without averaging gradients, DeepSpeed would have no optimizer, and FSDP2 cannot be prepared for an
evaluation at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

from accelerate.utils import DistributedType
from transformers import Trainer

from trl_opsd._compat.sharding import reshard
from trl_opsd.run.known import set_known

__all__ = ["SEAMS", "WrappedToTrain"]

SEAMS: dict[str, tuple[str, ...]] = {
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""


class WrappedToTrain(Trainer):
    """A trainer that can evaluate before it trains, and train more than once, under any launcher."""

    model: Any
    model_wrapped: Any
    deepspeed: Any
    optimizer: Any
    is_deepspeed_enabled: bool
    _original_config: dict[str, Any] | None = None
    """DeepSpeed's config before an engine was built; an engine fills in values for its own number of steps."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers'. Under DeepSpeed each training builds an engine, and so an optimizer, of its own."""
        if self.is_deepspeed_enabled:
            self._restore_config()
            set_known(self, model_wrapped=self.model, deepspeed=None)  # accelerate destroys the previous engine
        reshard(self.model)  # else accelerate cannot tell which parameters the optimizer has
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but a later training still wraps the model."""
        with self._prepared_for_evaluation():
            return super().evaluation_loop(*args, **kwargs)

    def _prepared_for_evaluation(self) -> Any:
        if self.accelerator._models or self.model_wrapped is not self.model:
            return nullcontext()
        if self.accelerator.distributed_type == DistributedType.NO:
            return nullcontext()  # one process wraps nothing
        if self.is_fsdp_enabled:
            self.create_optimizer()  # holds no states before its first step
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
            return nullcontext()
        if self.is_deepspeed_enabled:
            self._restore_config()
            if self.accelerator.state.deepspeed_plugin.zero_stage == 3:
                return nullcontext()  # an inference engine, until training builds its own
        return self._unwrapped()

    @contextmanager
    def _unwrapped(self) -> Iterator[None]:
        """Prepares nothing: every process has the whole model."""
        self._move_model_to_device(self.model, self.args.device)
        is_deepspeed_enabled, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
        # transformers takes a model that accelerate knows as it is, and prepares nothing.
        self.accelerator._models.append(self.model)
        try:
            yield
        finally:
            self.accelerator._models.remove(self.model)
            self.is_deepspeed_enabled = is_deepspeed_enabled

    def _restore_config(self) -> None:
        # transformers leaves it at 1; accelerate would set it to this, and warn of a mismatch.
        self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        if self._original_config is None:
            self._original_config = deepcopy(config)
        config.clear()
        config.update(deepcopy(self._original_config))
