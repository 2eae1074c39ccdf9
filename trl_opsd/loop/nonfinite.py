"""Checks loss and gradient for NaN and infinity before the optimizer steps; `monitor/nonfinite.py` judges a finding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from trl_opsd._compat.deepspeed import settings_without_gradient_check
from trl_opsd._compat.versions import set_known
from trl_opsd.host import TrainerHost
from trl_opsd.losses.proof import is_ours
from trl_opsd.monitor.nonfinite import Finding, GradientProbe, StepGuard, nonfinite_side
from trl_opsd.parallel.agreement import nothing_learned
from trl_opsd.parallel.failure import one_traceback
from trl_opsd.types import LossParts

__all__ = ["NonfiniteGuard"]

logger = get_logger(__name__)


@final
class NonfiniteGuard:
    """Skips or refuses optimizer steps whose loss or gradient is not finite."""

    def __init__(self, trainer: TrainerHost) -> None:
        self._trainer = trainer
        self._probe = GradientProbe()
        self._steps = self._new_steps()
        self._first_sums: Counter[str] | None = None
        self._broken_loss: Tensor | None = None
        self._check_launch()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Watches a training, whose processes end together when one fails: only the first prints its traceback."""
        self._steps = self._new_steps()
        self._first_sums = Counter()
        groups = getattr(self._trainer.optimizer, "param_groups", ())
        if any(group.get("maximize") for group in groups):
            logger.warning(
                "The optimizer has `maximize=True`: it moves the student away from its teacher. Leave it out, unless "
                "the divergence is negative."
            )
        with one_traceback():
            try:
                yield
            finally:
                self._probe.detach()

    @property
    def skipped(self) -> int | None:
        """Number of skipped steps of the training; `None` where it is not logged."""
        return self._steps.skipped if self._steps.counts else None

    # ---- The loss -----------------------------------------------------------------------------------------------

    def watch(self, student: Any) -> None:
        """Watches the gradient of a student, from its first forward pass in a training on."""
        self._probe.attach(student)

    def is_finite(self, named: dict[str, float], rows: Tensor) -> bool:
        """Whether a loss is finite in all processes, by sums over them; raises with `nonfinite='raise'`."""
        evaluating = not self._trainer.model.training
        if self._first_sums is not None and not evaluating:
            self._first_sums.update(named)
        side = nonfinite_side(named)
        if side is None:
            return True
        # `rows` are sums of each row of this process, [B, columns]: which processes broke is gathered only now.
        mine = dict(zip(LossParts.ROW_NAMES, rows.sum(0).tolist(), strict=False))  # columns of teachers may follow
        each = tuple(gather_object([mine]))
        divergence = self._trainer.divergence
        self._steps.report(
            Finding(
                step=self._trainer.state.global_step + (not evaluating),
                side=side,
                ranks=tuple(rank for rank, sums in enumerate(each) if nonfinite_side(sums) is not None),
                sums=each,
                evaluating=evaluating,
                temperature=min(self._trainer.temperatures),
                own_divergence=None if is_ours(divergence) else type(divergence).__name__,
            )
        )
        return False

    def note_loss(self, loss: Tensor) -> Tensor:
        """Records whether a loss of the step was not finite, without waiting for the device; returns the loss."""
        broken = ~loss.isfinite()
        self._broken_loss = broken if self._broken_loss is None else self._broken_loss | broken
        return loss

    # ---- The gradient -------------------------------------------------------------------------------------------

    def before_step(self, model: Any, norm: Any) -> None:
        """Skips the step if its loss or the norm of its gradient is not finite; DeepSpeed has done so by itself."""
        number = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm or 0.0)
        broken = not (math.isfinite(number) and number >= 0)  # DeepSpeed reports a norm of -1 for NaN
        if self._is_deepspeed:
            broken = broken or self._trainer.accelerator.optimizer_step_was_skipped
        if self._steps.will_skip or broken:
            if not (self._steps.will_skip or self._scales_loss):
                in_loss = self._broken_loss is not None and bool(self._broken_loss)
                # Collective, but only after the norm, which all processes share, was not finite.
                each = gather_object([{"loss": in_loss, "gradient": self._probe.broken()}])
                side = "loss" if any(one["loss"] for one in each) else "gradient"
                ranks = tuple(rank for rank, one in enumerate(each) if one[side])
                self._steps.report(Finding(step=self._trainer.state.global_step + 1, side=side, ranks=ranks))
            self._steps.step_skipped()
            if not (self._is_deepspeed or self._scales_loss):
                model.zero_grad()  # to None: an optimizer skips parameters without a gradient, weight decay included
            self._mark_skipped(True)
        else:
            self._steps.step_taken()
            self._mark_skipped(False)
            if self._first_sums and norm is not None and (why := nothing_learned(self._first_sums, number)):
                logger.warning(f"Nothing was learned from the first step: {why}.")
        self._first_sums = self._broken_loss = None
        self._probe.forget()

    def _mark_skipped(self, skipped: bool) -> None:
        """Tells accelerate, as its loss scaler would, so that the learning rate does not advance after a skip."""
        if not (self._is_deepspeed or self._scales_loss):
            set_known(self._trainer.optimizer, _is_overflow=skipped)

    @property
    def _is_deepspeed(self) -> bool:
        return bool(self._trainer.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def _scales_loss(self) -> bool:
        return bool(self._trainer.accelerator.mixed_precision == "fp16")

    # ---- Construction -------------------------------------------------------------------------------------------

    def _new_steps(self) -> StepGuard:
        args = self._trainer.args
        folder = Path(args.output_dir) if args.should_save else None
        return StepGuard(args.nonfinite, args.nonfinite_skip_limit, folder)

    def _check_launch(self) -> None:
        """Under DeepSpeed only the engine can check gradients before it steps, and some settings disable that."""
        if not self._is_deepspeed:
            return
        blind = settings_without_gradient_check(self._trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config)
        if not blind:
            return
        settings = ", ".join(map(repr, blind))
        if self._steps.policy == "skip":
            raise ValueError(
                f"`nonfinite='skip'` needs DeepSpeed to check gradients, and the value of {settings} disables that: "
                "leave it at its default, with a ZeRO stage of at least 1, or set `nonfinite='raise'`, which then "
                "checks the loss only."
            )
        logger.warning(
            f"DeepSpeed does not check gradients with this value of {settings}, so only the loss is checked before a "
            "step."
        )
