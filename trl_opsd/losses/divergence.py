"""The interface of a divergence between two next-token distributions; knows no hidden states.

R rows (tokens) · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

_SHOWN = 120
"""Characters of the longest `repr` that is shown; of a longer one, a digest."""


class Divergence(ABC):
    """A divergence between the student's and the teacher's next-token distribution, one number per token.

    A subclass needs to define only `value`. Checkpoints record its settings: the fields of a dataclass, else all
    attributes whose names do not begin with an underscore.
    """

    needs_whole: ClassVar[bool] = False
    """Whether it reads more of a teacher than the probabilities of some tokens and of all others together."""

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
                    f"`{type(self).__name__}.value` is not differentiable in the student's log-probabilities, so "
                    "nothing could be learned: compute it from its first argument, without `detach`, `no_grad` or "
                    "integers."
                )
            (gradient_RV,) = torch.autograd.grad(value_R.sum(), logits_RV)
        return value_R.detach(), gradient_RV

    def value_alone(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> Tensor:
        """The value of `value_and_gradient`, [R], where no gradient is needed; not by autograd."""
        # One that overrides the pair may compute its value more cheaply or exactly there.
        if type(self).value_and_gradient is not Divergence.value_and_gradient:
            return self.value_and_gradient(log_student_RV, log_teacher_RV, student_RV, teacher_RV)[0]
        with torch.no_grad():
            value_R = self.value(log_student_RV, log_teacher_RV)
        self._check_shape(value_R, len(log_student_RV))
        return value_R

    def accepted(self, value_R: Tensor) -> Tensor | None:
        """The probability that speculative decoding keeps the student's token, [R], from values; `None` if they do not
        tell.
        """
        return None

    def _check_shape(self, value_R: Any, rows: int) -> None:
        """Refuses a value that would be broadcast over the rows."""
        if not isinstance(value_R, Tensor) or value_R.shape != (rows,):
            got = f"shape {list(value_R.shape)}" if isinstance(value_R, Tensor) else f"a {type(value_R).__name__}"
            raise ValueError(
                f"`{type(self).__name__}.value` returned {got}: expected one divergence per row, [{rows}]; sum only "
                "over the vocabulary, `.sum(-1)`."
            )


class Terms(NamedTuple):
    """What each entry of the vocabulary adds to a divergence, in a form that stays accurate near agreement.

    A term is an entry of the divergence plus `drift * (p_s - p_t)`, whose sum over the vocabulary is 0. With it no term
    is below 0, and the rounding of a normaliser, which shifts a row of log-probabilities alike, cancels.
    """

    values: Tensor
    """[R, V], nats."""
    slopes: Tensor
    """[R, V], derivatives of the terms with respect to the student's log-probabilities."""
    drift: float = 0.0


class Entrywise(Divergence):
    """A divergence that is a sum over the vocabulary, whose entries can be clipped one by one."""

    @abstractmethod
    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        """The definition, [R, V] in nats: what each token of the vocabulary adds. Differentiable, in any precision."""

    @abstractmethod
    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        """The entries and their slopes; overwrites both log-probabilities, and neither probability."""

    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return self.entries(log_student_RV, log_teacher_RV).sum(-1)

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        values_RV, slopes_RV, _ = self.terms(log_student_RV, log_teacher_RV, student_RV, teacher_RV)
        return values_RV.sum(-1), of_logits_(slopes_RV, student_RV)

    def clipped_(
        self, clip: float, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The clipped value [R], its gradient for the student's logits [R, V], and whether an entry was clipped [R]."""
        # Overwrites the log-probabilities. The value may be negative: entries below 0 are left as they are.
        terms_RV, slopes_RV, drift = self.terms(log_student_RV, log_teacher_RV, student_RV, teacher_RV)
        # The clip applies to entries, not to terms, which contain the drift as well.
        shift_RV = (student_RV - teacher_RV).mul_(drift)
        cut_RV = terms_RV - shift_RV > clip
        # A clipped entry becomes the constant `clip`, so only the drift that makes it a term keeps a slope. The sum of
        # slopes that the softmax subtracts is therefore that of the unclipped entries alone.
        terms_RV = torch.where(cut_RV, shift_RV.add_(clip), terms_RV)
        slopes_RV = torch.where(cut_RV, student_RV * drift, slopes_RV)
        return terms_RV.sum(-1), of_logits_(slopes_RV, student_RV), cut_RV.any(-1)


def of_logits_(slopes_RV: Tensor, student_RV: Tensor) -> Tensor:
    """Turns a gradient with respect to log-probabilities into that with respect to logits, in place."""
    return slopes_RV.addcmul_(student_RV, slopes_RV.sum(-1, keepdim=True), value=-1)


def describe(divergence: Any) -> str:
    """A divergence or a method with its settings, in one line, the same in every process; of large values, digests."""
    # A setting of ours that is off, as it is by default, is left out: checkpoints from before it do not have it.
    ours = type(divergence).__module__.startswith("trl_opsd.")
    names = (
        [one.name for one in fields(divergence) if not (ours and one.default is None is getattr(divergence, one.name))]
        if is_dataclass(divergence)
        else [name for name in vars(divergence) if not name.startswith("_")]
    )
    settings = ", ".join(f"{name}={_setting(getattr(divergence, name))}" for name in names)
    return f"{type(divergence).__name__}({settings})"


def _setting(value: Any) -> str:
    """A value as text that is the same in every process: an array by digest, else its `repr` without addresses."""
    if hasattr(value, "__array__"):
        array = torch.as_tensor(value).detach().cpu()
        content = array.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"{array.dtype} {list(array.shape)}, sha256 {hashlib.sha256(content).hexdigest()[:16]}"
    # An address differs between processes and runs, which compare this text.
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    if len(text) <= _SHOWN:
        return text
    return f"{type(value).__name__}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
