"""Makes transformers' trainer check loss and gradient for NaN and infinity before the optimizer steps.

This file knows where a step can still be skipped; `monitor/nonfinite.py` decides what follows from a finding.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from transformers import Trainer

from trl_opsd._compat.deepspeed import settings_without_gradient_check
from trl_opsd._compat.versions import set_known
from trl_opsd.losses import Divergence
from trl_opsd.losses.proof import is_ours
from trl_opsd.monitor.nonfinite import Finding, GradientProbe, StepGuard, nonfinite_side
from trl_opsd.parallel.agreement import nothing_learned
from trl_opsd.parallel.failure import one_traceback
from trl_opsd.types import LossParts

__all__ = ["SEAMS", "GuardedSteps"]

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""


class GuardedSteps(Trainer):
    """A trainer that skips or refuses non-finite steps, and whose processes end together when one fails."""

    divergence: Divergence

    @property
    def temperatures(self) -> tuple[float, float]:
        """Softmax temperatures of the student and of the teacher in the loss."""
        raise NotImplementedError

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._probe = GradientProbe()
        self._guard = self._new_guard()
        self._first_sums: Counter[str] | None = None
        self._broken_loss: Tensor | None = None
        self._check_launch()

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers', but only the process that failed first prints its traceback."""
        self._guard = self._new_guard()
        self._first_sums = Counter()
        groups = getattr(self.optimizer, "param_groups", ())
        if any(group.get("maximize") for group in groups):
            logger.warning(
                "The optimizer has `maximize=True`: it moves the student away from its teacher. Leave it out, unless "
                "the divergence is negative."
            )
        with one_traceback():
            try:
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            finally:
                self._probe.detach()

    # ---- The loss -----------------------------------------------------------------------------------------------

    def is_finite_loss(self, named: dict[str, float], rows: Tensor) -> bool:
        """Whether a loss is finite in all processes, by sums over them; raises with `nonfinite='raise'`."""
        if self._first_sums is not None and self.model.training:
            self._first_sums.update(named)
        side = nonfinite_side(named)
        if side is None:
            return True
        # `rows` are sums of each row of this process, [B, columns]: which processes broke is gathered only now.
        mine = dict(zip(LossParts.ROW_NAMES, rows.sum(0).tolist(), strict=False))  # columns of teachers may follow
        each = tuple(gather_object([mine]))
        ranks = tuple(rank for rank, sums in enumerate(each) if nonfinite_side(sums) is not None)
        evaluating = not self.model.training
        step = self.state.global_step + (not evaluating)
        self._guard.report(
            Finding(
                step=step,
                side=side,
                ranks=ranks,
                sums=each,
                evaluating=evaluating,
                temperature=min(self.temperatures),
                own_divergence=None if is_ours(self.divergence) else type(self.divergence).__name__,
            )
        )
        return False

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As transformers', but records whether a loss of the step was not finite, without waiting for the device."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        broken = ~loss.isfinite()
        self._broken_loss = broken if self._broken_loss is None else self._broken_loss | broken
        return loss

    def with_nan_gradient(self, loss: Tensor) -> Tensor:
        """A loss whose gradient is NaN in every process, so that every optimizer's own check skips the step."""
        return loss * math.nan

    # ---- The gradient -------------------------------------------------------------------------------------------

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As transformers', which is called before each step; DeepSpeed has by then taken or skipped the step."""
        norm = super()._get_grad_norm(model, grad_norm)
        number = _number(norm)
        broken = not (math.isfinite(number) and number >= 0)  # DeepSpeed reports a norm of -1 for NaN
        if self._is_deepspeed:
            broken = broken or self.accelerator.optimizer_step_was_skipped
        if self._guard.will_skip or broken:
            if not (self._guard.will_skip or self._scales_loss):
                in_loss = self._broken_loss is not None and bool(self._broken_loss)
                # Collective, but only after the norm, which all processes share, was not finite.
                each = gather_object([{"loss": in_loss, "gradient": self._probe.broken()}])
                side = "loss" if any(one["loss"] for one in each) else "gradient"
                ranks = tuple(rank for rank, one in enumerate(each) if one[side])
                self._guard.report(Finding(step=self.state.global_step + 1, side=side, ranks=ranks))
            self._guard.step_skipped()
            self._skip_step(model)
        else:
            self._guard.step_taken()
            self._mark_skipped(False)
            if self._first_sums and norm is not None and (why := nothing_learned(self._first_sums, number)):
                logger.warning(f"Nothing was learned from the first step: {why}.")
        self._first_sums = self._broken_loss = None
        self._probe.forget()
        return norm

    def _skip_step(self, model: Any) -> None:
        if not (self._is_deepspeed or self._scales_loss):
            model.zero_grad()  # to None: an optimizer skips parameters without a gradient, weight decay included
            self._mark_skipped(True)

    def _mark_skipped(self, skipped: bool) -> None:
        """Tells accelerate, as its loss scaler would, so that the learning rate does not advance after a skip."""
        if not (self._is_deepspeed or self._scales_loss):
            set_known(self.optimizer, _is_overflow=skipped)

    @property
    def _is_deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def _scales_loss(self) -> bool:
        return bool(self.accelerator.mixed_precision == "fp16")

    # ---- Construction -------------------------------------------------------------------------------------------

    def _new_guard(self) -> StepGuard:
        folder = Path(self.args.output_dir) if self.args.should_save else None
        return StepGuard(self.args.nonfinite, self.args.nonfinite_skip_limit, folder)

    def _check_launch(self) -> None:
        """Under DeepSpeed only the engine can check gradients before it steps, and some settings disable that."""
        if not self._is_deepspeed:
            return
        blind = settings_without_gradient_check(self.accelerator.state.deepspeed_plugin.hf_ds_config.config)
        if not blind:
            return
        settings = ", ".join(map(repr, blind))
        if self._guard.policy == "skip":
            raise ValueError(
                f"`nonfinite='skip'` needs DeepSpeed to check gradients, and the value of {settings} disables that: "
                "leave it at its default, with a ZeRO stage of at least 1, or set `nonfinite='raise'`, which then "
                "checks the loss only."
            )
        logger.warning(
            f"DeepSpeed does not check gradients with this value of {settings}, so only the loss is checked before a "
            "step."
        )


def _number(norm: Any) -> float:
    """A gradient's norm; 0 where none was computed."""
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm or 0.0)
