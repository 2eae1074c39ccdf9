"""Has transformers' trainer wrap its model for training, also where it evaluated or trained before.

It wraps a model once. What an evaluation prepares first stays: several processes would then train without averaging
their gradients, each a model of its own, DeepSpeed would have no optimizer, and FSDP2 cannot be prepared for it at all.
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
"""Methods of transformers' trainer that are overridden here, with their parameters; a test holds them against it."""


class WrappedToTrain(Trainer):
    """A trainer that may evaluate before it trains, and train again, with whatever it is launched."""

    model: Any
    model_wrapped: Any
    deepspeed: Any
    optimizer: Any
    is_deepspeed_enabled: bool
    _untouched: dict[str, Any] | None = None
    """DeepSpeed's config before an engine was made, which fills it in for its own number of steps."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers'. Under DeepSpeed each training has an engine, and so an optimizer, of its own."""
        if self.is_deepspeed_enabled:
            self._config_untouched()
            set_known(self, model_wrapped=self.model, deepspeed=None)  # accelerate ends the engine there was
        reshard(self.model)  # else accelerate cannot tell which parameters the optimizer has
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; what it prepares does not keep training from wrapping the model."""
        with self._ready_to_read():
            return super().evaluation_loop(*args, **kwargs)

    def _ready_to_read(self) -> Any:
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
            self._config_untouched()
            if self.accelerator.state.deepspeed_plugin.zero_stage == 3:
                return nullcontext()  # an engine for reading, until training makes one
        return self._bare()

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Nothing is prepared: every process has the whole model."""
        self._move_model_to_device(self.model, self.args.device)
        is_deepspeed_enabled, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
        self.accelerator._models.append(self.model)
        try:
            yield
        finally:
            self.accelerator._models.remove(self.model)
            self.is_deepspeed_enabled = is_deepspeed_enabled

    def _config_untouched(self) -> None:
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        if self._untouched is None:
            self._untouched = deepcopy(config)
        config.clear()
        config.update(deepcopy(self._untouched))
