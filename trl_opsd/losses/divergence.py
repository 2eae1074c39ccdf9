"""Divergences between two next-token distributions, with gradients for the student's logits; knows no hidden states.

R rows (tokens) · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor

from trl_opsd.types import LazyLogits

_SHOWN = 120
"""Longest `repr` of a setting that is shown."""


class Divergence(ABC):
    """A divergence between the student's and the teacher's next-token distribution, one number per token.

    A subclass needs to define only `value`. Checkpoints record its settings: the fields of a dataclass, else all
    attributes whose names do not begin with an underscore.
    """

    def __repr__(self) -> str:  # a dataclass has its own
        return describe(self)

    @abstractmethod
    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        """The definition, [R] in nats: differentiable, in any precision. Log-probabilities must be finite."""

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The value, [R], and its gradient with respect to the student's logits, [R, V]; by autograd if not overridden.

        The four arguments (two log-probabilities, two probabilities) are working storage: they may be overwritten, and
        the gradient may be one of them.
        """
        with torch.enable_grad():
            logits_RV = log_student_RV.detach().requires_grad_()
            value_R = self.value(logits_RV.log_softmax(-1), log_teacher_RV.detach())
            self._check_shape(value_R, len(logits_RV))
            if not value_R.requires_grad:
                raise ValueError(
                    f"`{type(self).__name__}.value` is not a differentiable function of the student's "
                    "log-probabilities, so nothing could be learned: compute it from its first argument, without "
                    "`detach`, `no_grad` or integers."
                )
            (gradient_RV,) = torch.autograd.grad(value_R.sum(), logits_RV)
        return value_R.detach(), gradient_RV

    def value_alone(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> Tensor:
        """The value of `value_and_gradient`, [R], where no gradient is needed; not by autograd."""
        if type(self).value_and_gradient is not Divergence.value_and_gradient:
            return self.value_and_gradient(log_student_RV, log_teacher_RV, student_RV, teacher_RV)[0]
        with torch.no_grad():
            value_R = self.value(log_student_RV, log_teacher_RV)
        self._check_shape(value_R, len(log_student_RV))
        return value_R

    def _check_shape(self, value_R: Any, rows: int) -> None:
        """Refuses a value that would be broadcast over the rows."""
        if not isinstance(value_R, Tensor) or value_R.shape != (rows,):
            got = f"shape {list(value_R.shape)}" if isinstance(value_R, Tensor) else f"a {type(value_R).__name__}"
            raise ValueError(
                f"`{type(self).__name__}.value` returned {got}: expected one divergence for each row, [{rows}]; sum "
                "over the vocabulary, `.sum(-1)`, and over nothing else."
            )


@final
@dataclass(frozen=True, slots=True)
class ForwardKL(Divergence):
    """`KL(p_teacher || p_student)`, mode-covering: penalises tokens that the student underrates (TRL's `beta=0`).

    The gradient with respect to the student's logits is `p_s - p_t`.
    """

    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return _kl(log_teacher_RV, log_student_RV)

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        gap_RV = log_teacher_RV.sub_(log_student_RV)
        return _kl_of_gap(gap_RV, teacher_RV, student_RV, spare_RV=log_student_RV), student_RV.sub_(teacher_RV)


@final
@dataclass(frozen=True, slots=True)
class ReverseKL(Divergence):
    """`KL(p_student || p_teacher)`, mode-seeking: penalises tokens that the teacher finds unlikely (TRL's `beta=1`).

    The gradient with respect to the student's logits is `p_s (log p_s - log p_t - KL)`.
    """

    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return _kl(log_student_RV, log_teacher_RV)

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        gap_RV = log_student_RV.sub_(log_teacher_RV)
        value_R = _kl_of_gap(gap_RV, student_RV, teacher_RV, spare_RV=log_teacher_RV)
        term_RV = gap_RV.mul_(student_RV)
        return value_R, term_RV.addcmul_(student_RV, term_RV.sum(-1, keepdim=True), value=-1)


@final
@dataclass(frozen=True, slots=True)
class GeneralizedJSD(Divergence):
    """`beta KL(p_t || m) + (1 - beta) KL(p_s || m)` with the mixture `m = (1 - beta) p_s + beta p_t`, as in GKD
    (arXiv 2306.13649) and in TRL.

    The gradient with respect to the student's logits is `(1 - beta) p_s (log p_s - log m - KL(p_s || m))`.

    Args:
        beta (`float`):
            Weight of the teacher in the mixture, strictly between 0 and 1. The divergence itself vanishes at both ends.

    Raises:
        ValueError: If `beta` is not strictly between 0 and 1.
    """

    beta: float

    def __post_init__(self) -> None:
        if not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"beta is {self.beta}, expected a number strictly between 0 and 1: "
                "use ForwardKL() for the end at 0 and ReverseKL() for the end at 1."
            )

    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        student_share = torch.tensor(1 - self.beta, dtype=log_student_RV.dtype).log()
        teacher_share = torch.tensor(self.beta, dtype=log_student_RV.dtype).log()
        log_mixture_RV = torch.logaddexp(log_student_RV + student_share, log_teacher_RV + teacher_share)
        return self.beta * _kl(log_teacher_RV, log_mixture_RV) + (1 - self.beta) * _kl(log_student_RV, log_mixture_RV)

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        # log(m / p_s) from the gap d = log p_t - log p_s rather than from m: exactly 0 where the models agree, and
        # accurate near it, where distillation converges. Beyond a gap of 80 nats p_s contributes nothing to m.
        gap_RV = log_teacher_RV.sub_(log_student_RV).clamp_(max=80.0)
        surplus_RV = torch.expm1(gap_RV, out=log_student_RV).mul_(self.beta).log1p_()
        teacher_part_R = gap_RV.sub_(surplus_RV).mul_(teacher_RV).sum(-1).mul_(self.beta)
        scaled_RV = student_RV.mul_(self.beta - 1)
        term_RV = surplus_RV.mul_(scaled_RV)
        student_part_R = term_RV.sum(-1)
        gradient_RV = term_RV.addcmul_(scaled_RV, student_part_R.unsqueeze(-1), value=1 / (1 - self.beta))
        return teacher_part_R.add_(student_part_R), gradient_RV


def describe(divergence: Divergence) -> str:
    """A divergence with its settings, in one line that is the same in every process; of large ones, a digest."""
    names = (
        [field.name for field in fields(divergence)]
        if is_dataclass(divergence)
        else [name for name in vars(divergence) if not name.startswith("_")]
    )
    settings = ", ".join(f"{name}={_setting(getattr(divergence, name))}" for name in names)
    return f"{type(divergence).__name__}({settings})"


def _setting(value: Any) -> str:
    """A value in words: an array by shape and digest, anything else by its `repr` without an address."""
    if hasattr(value, "__array__"):
        array = torch.as_tensor(value).detach().cpu()
        content = array.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"{array.dtype} {list(array.shape)}, sha256 {hashlib.sha256(content).hexdigest()[:16]}"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    if len(text) <= _SHOWN:
        return text
    return f"{type(value).__name__}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _kl(log_p_RV: Tensor, log_q_RV: Tensor) -> Tensor:
    return (log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1)


def _kl_of_gap(gap_RV: Tensor, p_RV: Tensor, q_RV: Tensor, spare_RV: Tensor) -> Tensor:
    """`KL(p || q)` from the gap `log p - log q`, as the sum of `p gap + q - p`, none of which is below 0.

    Near agreement the rounding of a normaliser, which shifts a row of gaps alike, is larger than the divergence. The
    sum of `q - p` is 0, and as `p expm1(-gap)` it contains the same shift, which cancels.
    """
    surplus_RV = torch.neg(gap_RV, out=spare_RV).expm1_().mul_(p_RV)
    surplus_RV = torch.where(gap_RV > -80.0, surplus_RV, q_RV)  # below, p contributes nothing, and the exponential ends
    return surplus_RV.addcmul_(gap_RV, p_RV).sum(-1)


def check_comparable(
    student: LazyLogits,
    teacher: LazyLogits,
    weights_N: Tensor | None,
    chunk_tokens: int | None,
    vocabulary: int | None,
) -> None:
    """Refuses arguments that cannot be compared, before any product is computed.

    Raises:
        ValueError: If shapes, devices or settings are incompatible.
    """
    for name, side in (("student", student), ("teacher", teacher)):
        hidden_NH, weight_VH, bias_V = side.hidden, side.head.weight, side.head.bias
        if hidden_NH.ndim != 2:
            raise ValueError(
                f"{name} hidden states have shape {list(hidden_NH.shape)}, expected [N, H]: "
                "select the tokens in the loss first, for example hidden[weights != 0]."
            )
        if weight_VH.ndim != 2 or weight_VH.size(1) != hidden_NH.size(1):
            raise ValueError(
                f"{name} head weight has shape {list(weight_VH.shape)}, expected [V, {hidden_NH.size(1)}] for hidden "
                f"states of width {hidden_NH.size(1)}: pass hidden states and head of the same model."
            )
        if bias_V is not None and bias_V.shape != weight_VH.shape[:1]:
            raise ValueError(
                f"{name} head bias has shape {list(bias_V.shape)}, expected [{weight_VH.size(0)}]: "
                "pass weight and bias of the same head."
            )
        if not side.temperature > 0:
            raise ValueError(f"{name} temperature is {side.temperature}, expected a number above 0: use 1.0 for none.")
    if student.hidden.size(0) != teacher.hidden.size(0):
        raise ValueError(
            f"student has {student.hidden.size(0)} tokens, teacher {teacher.hidden.size(0)}: "
            "select the same tokens from both."
        )
    mine, yours = student.head.weight.size(0), teacher.head.weight.size(0)
    if vocabulary is None and mine != yours:
        raise ValueError(
            f"student vocabulary is {mine}, teacher vocabulary {yours}: pass a teacher with the same tokenizer, and "
            "set `vocabulary` to the number of ids they share."
        )
    if vocabulary is not None and not 1 <= vocabulary <= min(mine, yours):
        raise ValueError(
            f"vocabulary is {vocabulary}, but the student's head has {mine} rows and the teacher's {yours}: expected "
            f"a number from 1 to {min(mine, yours)}, the ids that both models know."
        )
    tensors = (student.hidden, student.head.weight, teacher.hidden, teacher.head.weight)
    if len(devices := {str(tensor.device) for tensor in tensors}) > 1:
        raise ValueError(
            f"tensors are on {sorted(devices)}, expected one device: move heads and hidden states together."
        )
    if weights_N is not None and weights_N.shape != student.hidden.shape[:1]:
        raise ValueError(
            f"weights have shape {list(weights_N.shape)}, expected [{student.hidden.size(0)}]: pass one per token."
        )
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}, expected an int of at least 1: pass None for the default.")
