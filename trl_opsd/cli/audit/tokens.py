"""Exact numbers of each token that student and teacher compare: divergences over the whole vocabulary, in nats.

N tokens of all rows · n tokens of a row · V vocabulary size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_opsd.losses.completed import complete_
from trl_opsd.losses.objective import head_of_reference
from trl_opsd.models.backbone import logits_of
from trl_opsd.types import LazyLogits, OutputHead, Rollout, Sampled, TeacherTargets
from trl_opsd.types.known import KnownTokens, TokenHead
from trl_opsd.types.loss import TENTHS

_CHUNK = 64
"""Tokens whose logits exist at a time."""
_LEAST = 0.2
"""Share of the sampled tokens that a constant advantage pushes down: the least likely ones."""


FEW = 4
"""Rows below which a share of them says nothing."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of some rows."""

    value: float
    error: float
    """Its standard error."""
    rows: int

    @classmethod
    def of(cls, values: np.ndarray) -> Mean:
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(float("nan"), float("nan"), 0)
        spread = float(known.std(ddof=1)) if len(known) > 1 else float("nan")
        return cls(float(known.mean()), spread / len(known) ** 0.5, len(known))

    @property
    def is_positive(self) -> bool:
        """Whether it is above 0 by more than twice its standard error."""
        return self.rows >= FEW and self.value > 2 * self.error

    @property
    def is_negative(self) -> bool:
        """Whether it is below 0 by more than that."""
        return self.rows >= FEW and self.value < -2 * self.error


@dataclass(frozen=True, slots=True)
class Compared:
    """What is compared: hidden states of the same tokens, with the heads that turn them into logits."""

    student: TeacherTargets
    student_head: OutputHead
    teacher: TeacherTargets
    teacher_heads: list[OutputHead]
    origin_head: OutputHead | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Columns of [N], row after row."""

    row: np.ndarray
    place: np.ndarray
    """Index in the completion."""
    tenth: np.ndarray
    """Of the completion, from 0."""
    loss: np.ndarray
    """The run's own divergence."""
    reverse: np.ndarray
    """KL(student‖teacher)."""
    forward: np.ndarray
    """KL(teacher‖student)."""
    entropy: np.ndarray
    """Of the student."""
    student: np.ndarray
    """Log-probability of the token that was sampled."""
    teacher: np.ndarray

    @property
    def advantage(self) -> np.ndarray:
        """[N], what the teacher says of the sampled token: log(p_T / p_S)."""
        return self.teacher - self.student

    def of_rows(self, values: np.ndarray, rows: int) -> np.ndarray:
        """[rows], the mean of a column in each row; NaN in one without tokens."""
        counts = np.bincount(self.row, minlength=rows)
        sums = np.bincount(self.row, values, minlength=rows)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def by(self, groups: np.ndarray, count: int, values: np.ndarray) -> list[float]:
        """The mean of a column in each group."""
        return [float(values[groups == one].mean()) if (groups == one).any() else float("nan") for one in range(count)]

    @property
    def quartile(self) -> np.ndarray:
        """[N], of the student's entropy, from 0."""
        return np.searchsorted(np.quantile(self.entropy, (0.25, 0.5, 0.75)), self.entropy)

    def share_for(self, part: float) -> float:
        """The share of tokens that carries this part of the loss, beginning with the largest."""
        values = np.sort(np.abs(self.loss))[::-1]
        total = values.sum()
        return 1.0 if not total else float((np.searchsorted(values.cumsum(), part * total) + 1) / len(values))

    @property
    def control(self) -> np.ndarray:
        """[N], whether a constant negative advantage of the least likely tokens pushes it down (arXiv 2608.31046)."""
        return self.student <= np.quantile(self.student, _LEAST)

    @property
    def explained(self) -> float:
        """R² of the teacher's advantage on that of this control."""
        return correlation(self.advantage, self.control.astype(float)) ** 2

    @property
    def unexplained(self) -> np.ndarray:
        """[N], the advantage without its mean over the tokens of either kind, which the control explains."""
        values, least = self.advantage.copy(), self.control
        for kind in (least, ~least):
            values[kind] -= values[kind].mean() if kind.any() else 0.0
        return values


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's; 0 where one of both does not vary."""
    if len(one) < 2 or one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def with_rewards(means: np.ndarray, rewards: np.ndarray) -> Mean:
    """The correlation of rows' means with their rewards."""
    known = ~np.isnan(means) & ~np.isnan(rewards)
    value, count = correlation(means[known], rewards[known]), int(known.sum())
    return Mean(value, float(((1 - value**2) / max(count - 2, 1)) ** 0.5), count)


@torch.no_grad()
def tokens_of(compared: Compared, rollout: Rollout, objective: Any) -> Tokens:
    """The numbers of every token that counts."""
    columns: dict[str, list[Tensor]] = {name: [] for name in Tokens.__dataclass_fields__}
    lengths = [len(ids) for ids in rollout.completion_lists()]
    for row, weights_C in enumerate(rollout.weights.cpu()):
        places_n = weights_C.nonzero().squeeze(1)
        ids_n = rollout.completion_ids[row].cpu()[places_n]
        columns["row"].append(torch.full_like(places_n, row))
        columns["place"].append(places_n)
        columns["tenth"].append(places_n * TENTHS // max(lengths[row], 1))
        for some in range(0, len(places_n), _CHUNK):
            part = slice(some, some + _CHUNK)
            found = _numbers(compared, rollout, row, places_n[part], ids_n[part], objective)
            for name, values in found.items():
                columns[name].append(values.double().cpu())
    return Tokens(**{name: torch.cat(each).numpy() for name, each in columns.items()})


def _numbers(
    compared: Compared, rollout: Rollout, row: int, places_n: Tensor, ids_n: Tensor, objective: Any
) -> dict[str, Tensor]:
    device = rollout.weights.device
    number = 0 if compared.teacher.teacher is None else int(compared.teacher.teacher[row])
    head, ids_n1 = compared.teacher_heads[number].to(device), ids_n.to(device)[:, None]
    mine_nH = compared.student.of(row, places_n).to(device)
    theirs_nW = compared.teacher.of(row, places_n).to(device)
    student_nV = log_probs(LazyLogits(mine_nH, compared.student_head, objective.temperatures[0]), objective.vocabulary)
    if isinstance(head, TokenHead):  # of the others, their mass, which they share as in the student
        teacher_nV = student_nV.clone()
        complete_(teacher_nV, KnownTokens.unpack(theirs_nW))
    else:
        teacher_nV = log_probs(LazyLogits(theirs_nW, head, objective.temperatures[1]), objective.vocabulary)
    sampled = Sampled(ids_n1[:, 0])
    states, origin = compared.teacher.reference_states_of(row, places_n), compared.origin_head
    reference_states = {
        name: (one_nH.to(device), head_of_reference(name, head, origin)) for name, one_nH in states.items()
    }
    loss_n = objective.of(
        (mine_nH, compared.student_head), (theirs_nW, head), None, sampled, reference_states
    ).divergence
    return {
        "loss": loss_n,
        "reverse": kl(student_nV, teacher_nV),
        "forward": kl(teacher_nV, student_nV),
        "entropy": -(student_nV.exp() * student_nV.clamp(min=-1e4)).sum(1),
        "student": student_nV.gather(1, ids_n1)[:, 0],
        "teacher": teacher_nV.gather(1, ids_n1)[:, 0],
    }


def log_probs(model: LazyLogits, vocabulary: int | None) -> Tensor:
    """[n, V], log-probabilities of the ids that both models have, in float32."""
    return (logits_of(model.hidden, model.head)[:, :vocabulary] / model.temperature).log_softmax(-1)


def kl(one_nV: Tensor, other_nV: Tensor) -> Tensor:
    """[n], KL of two distributions from their logarithms, which a bias may have put far down."""
    return (one_nV.exp() * (one_nV - other_nV).clamp(-1e4, 1e4)).sum(1)


@torch.no_grad()
def apart(
    one: TeacherTargets, other: TeacherTargets, heads: list[OutputHead], rollout: Rollout, objective: Any
) -> float:
    """Nats per token between two computations of a teacher: the mean KL of the first from the second."""
    total, count, device = 0.0, 0, rollout.weights.device
    for row, weights_C in enumerate(rollout.weights.cpu()):
        places_n = weights_C.nonzero().squeeze(1)
        head = heads[0 if one.teacher is None else int(one.teacher[row])].to(device)
        if isinstance(head, TokenHead):
            return float("nan")
        for some_n in places_n.split(_CHUNK):
            both = (
                log_probs(
                    LazyLogits(each.of(row, some_n).to(device, head.weight.dtype), head, objective.temperatures[1]),
                    objective.vocabulary,
                )
                for each in (one, other)
            )
            total += float(kl(*both).sum())
            count += len(some_n)
    return total / max(count, 1)
