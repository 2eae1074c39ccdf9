"""The values that flow through one training step: shapes and units only; no loss is computed here."""

from trl_opsd.types.loss import LazyLogits, LossParts, OutputHead, PerToken, ReferenceModel, Sampled
from trl_opsd.types.rollout import Completion, Length, OnHost, Rollout, lengths_of
from trl_opsd.types.targets import RowTargets, TeacherTargets

__all__ = [
    "Completion",
    "LazyLogits",
    "Length",
    "LossParts",
    "OnHost",
    "OutputHead",
    "PerToken",
    "ReferenceModel",
    "Rollout",
    "RowTargets",
    "Sampled",
    "TeacherTargets",
    "lengths_of",
]
