"""The values that flow through one training step: shapes and units only; no loss is computed here."""

from trl_opsd.types.loss import Beside, LazyLogits, LossParts, OutputHead, PerToken, Sampled
from trl_opsd.types.rollout import Completion, Length, OnHost, Rollout, lengths_of
from trl_opsd.types.targets import RowTargets, TeacherTargets

__all__ = [
    "Beside",
    "Completion",
    "LazyLogits",
    "Length",
    "LossParts",
    "OnHost",
    "OutputHead",
    "PerToken",
    "Rollout",
    "RowTargets",
    "Sampled",
    "TeacherTargets",
    "lengths_of",
]
