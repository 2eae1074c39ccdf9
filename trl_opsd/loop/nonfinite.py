"""Checks loss and gradient for NaN, infinity and 0 before the optimizer steps, and skips the step, warns or raises.

A step without a token that counts is skipped, too: momentum and weight decay would move the student.

Knows the sums of a loss over all processes, by the names in [`LossParts.ROW_NAMES`], and no models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import Tensor

from trl_opsd._compat.deepspeed import settings_without_gradient_check
from trl_opsd._compat.sharding import whole_shape
from trl_opsd._compat.versions import set_known
from trl_opsd.errors import NonFiniteError
from trl_opsd.parallel.failure import first_failure_first

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

_SAME = 1e-6
"""Nats per token: rounding error of the divergence between a float32 model and its copy."""
_ALIKE = 0.02
"""Nats per token: maximum difference of entropies where a KL is that small (Pinsker, Fannes), for any vocabulary."""

logger = get_logger(__name__)


@final
class NonfiniteGuard:
    """Refuses or skips optimizer steps whose loss or gradient is not finite, by `nonfinite`, and limits skips in a row.

    A non-finite gradient of a scaled loss is no error, because that is how the float16 loss scale is found. The loss
    scaler skips such steps under both policies; here they are counted and limited.
    """

    def __init__(self, trainer: OPSDTrainer) -> None:
        self._trainer = trainer
        self._is_deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
        self._hook: Any = None
        """On the gradient of the parameter that is watched."""
        self._may_be_same = True
        """Whether the first divergence has not been compared with 0 yet."""
        self._begin()
        self._check_launch()

    def _begin(self) -> None:
        self._skipped = self._skipped_in_a_row = 0
        self._will_skip = False
        """Whether the step in progress will be skipped, because of a loss in it."""
        self.was_empty = False
        """Whether no token counted in the last step."""
        self._weight: float | None = None
        """Sum of the weights of the step in progress, over all processes, as far as it is known."""

    @property
    def is_empty(self) -> bool:
        """Whether no token counts in the step in progress."""
        return self._weight == 0

    @contextmanager
    def training(self) -> Iterator[None]:
        """Watches a training, whose processes end together when one fails."""
        self._begin()
        with first_failure_first():
            try:
                yield
            finally:
                if self._hook is not None:
                    self._hook.remove()
                self._hook = None

    @property
    def skipped(self) -> int | None:
        """Number of skipped steps of the training; `None` where it is not logged."""
        return self._skipped if self._skipped or self._trainer.args.nonfinite == "skip" else None

    # ---- The loss ---------------------------------------------------------------------------------------------------

    def watch(self, student: Any) -> None:
        """Has the gradient of one small parameter tell launchers to skip a step without tokens; once in a training."""
        if self._hook is None:
            trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
            small = (one for one in trained if len(whole_shape(one)) == 1)  # a bias or norm
            self._hook = next(small, trained[0]).register_hook(self._watched)

    def _watched(self, gradient: Tensor) -> Tensor | None:
        # DeepSpeed and a loss scaler skip a step by its gradient alone.
        checks = self._is_deepspeed and not self._is_blind
        skips = self.is_empty and (checks or self._trainer.accelerator.mixed_precision == "fp16")
        return torch.full_like(gradient, math.nan) if skips else None

    def is_finite(self, named: dict[str, float]) -> bool:
        """Whether a loss is finite in all processes, by sums over them; raises with `nonfinite='raise'`, and at a
        teacher that says nothing.
        """
        evaluating = not self._trainer.model.training
        if not evaluating:
            self._weight = (self._weight or 0.0) + named["weight"]
        side = nonfinite_side(named)
        if side is None:
            self._check_teacher(named)
            return True
        self._report(side, evaluating)
        return False

    def _check_teacher(self, sums: Mapping[str, float]) -> None:
        """Rejects a teacher whose logits are equal at every token, and warns once of one that is the student.

        A high entropy alone is no reason: logits that differ little, as those of a tiny random model, are an opinion.
        """
        vocabulary = self._trainer.teaching.readers.student_limits.vocabulary
        if sums["tokens"] and vocabulary > 1 and sums["teacher_uniform"] >= sums["tokens"]:
            raise ValueError(
                f"The teacher gives all {vocabulary} tokens the same logit: its head is zeroed or was not loaded."
            )
        if self._may_be_same and not self._trainer.methods.any("adds_nll") and (weight := sums["weight"]):
            # A surrogate of the user's own may be 0 where the models differ; then their entropies do.
            apart = abs(sums["student_entropy"] - sums["teacher_entropy"])
            if abs(sums["divergence"]) < _SAME * weight and apart < _ALIKE * weight:
                logger.warning("The first divergence is 0: teacher and student are identical, so nothing is learned.")
        self._may_be_same = False

    def _report(self, side: str, evaluating: bool = False) -> None:
        """Marks the step as one to skip, with a warning once a step, or raises."""
        if self._will_skip:
            return
        args, step = self._trainer.args, self._trainer.state.global_step
        when = f"an evaluation after step {step}" if evaluating else f"step {step + 1}"
        found = f"{_WHAT[side]} NaN or infinite in {when}"
        if args.nonfinite == "raise":
            raise NonFiniteError(f"{found}: the student's weights are unchanged by it (docs/troubleshooting.md).")
        logger.warning(f"Skipped: {found}.")
        self._will_skip = not evaluating  # an evaluation has no step to skip

    # ---- The gradient -----------------------------------------------------------------------------------------------

    def before_step(self, model: Any, norm: Any) -> None:
        """Skips the step if its loss or the norm of its gradient is not finite; DeepSpeed has done so by itself."""
        accelerator = self._trainer.accelerator
        scales_loss = accelerator.mixed_precision == "fp16"
        number = float(norm.full_tensor() if hasattr(norm, "full_tensor") else 0.0 if norm is None else norm)
        broken = not (math.isfinite(number) and number >= 0)  # DeepSpeed reports a norm of -1 for NaN
        if self._is_deepspeed:
            broken = broken or accelerator.optimizer_step_was_skipped
        if broken and not (self._will_skip or scales_loss or self.is_empty):
            self._report("gradient")
        skips = broken or self._will_skip or self.is_empty
        if skips and not self.is_empty:
            self._count_skipped()
        else:
            self._skipped_in_a_row = 0
        self.was_empty, self._will_skip, self._weight = self.is_empty, False, None
        if not (self._is_deepspeed or scales_loss):
            if skips:
                model.zero_grad()  # to None: an optimizer skips parameters without a gradient, weight decay included
            # As a loss scaler would, so that accelerate does not advance the learning rate after a skip.
            set_known(self._trainer.optimizer, _is_overflow=skips)

    def _count_skipped(self) -> None:
        self._skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > (limit := self._trainer.args.nonfinite_skip_limit):
            raise NonFiniteError(
                f"{self._skipped_in_a_row} consecutive optimizer steps with NaN or infinity "
                f"(`nonfinite_skip_limit={limit}`): the student's weights are unchanged since then."
            )

    def _check_launch(self) -> None:
        """Under DeepSpeed only the engine can check gradients before it steps, and some settings disable that."""
        config = self._trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config if self._is_deepspeed else None
        blind = ", ".join(settings_without_gradient_check(config)) if config is not None else ""
        self._is_blind = bool(blind)
        if blind and self._trainer.args.nonfinite == "skip":
            raise ValueError(
                f"`nonfinite='skip'` needs DeepSpeed's check of gradients: use ZeRO, and the default of {blind}."
            )
        if blind:
            logger.warning(f"DeepSpeed does not check gradients with this value of {blind}: only losses are checked.")


_WHAT = {
    "weights": "The weights of tokens are",
    "teacher": "The teacher's logits are",
    "student": "The student's logits are",
    "divergence": "The logits of both models are finite, but the divergence is",
    "gradient": "The sums of the loss (`LossParts.rows`) are finite, but the loss or the student's gradient is",
}
"""What is not finite by its side."""


def nonfinite_side(sums: Mapping[str, float]) -> str | None:
    """Where the first NaN or infinity of these sums arose; `"divergence"` if both models are finite."""
    # NaN weights make every sum NaN, and NaN logits of either model the divergence: the cause comes first.
    names = {
        "weights": "weight",
        "teacher": "teacher_entropy",
        "student": "student_entropy",
        "divergence": "divergence",
    }
    return next((side for side, name in names.items() if not math.isfinite(sums[name])), None)
