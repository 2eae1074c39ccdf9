"""The loss: two models' hidden states and heads in, one divergence per token out; torch only."""

from trl_opsd.losses.dense import dense_divergence
from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.entrywise import (
    ForwardKL,
    GeneralizedJSD,
    NegativeLogAcceptance,
    ReverseKL,
    SkewedForwardKL,
    SkewedReverseKL,
    TopKTeacher,
    TotalVariation,
)
from trl_opsd.losses.reduce import reduce
from trl_opsd.losses.registry import DIVERGENCES
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.losses.streamed import streamed_divergence
from trl_opsd.types import LazyLogits, OutputHead, PerToken, ReferenceModel, Sampled

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "ForwardKL",
    "GeneralizedJSD",
    "LazyLogits",
    "NegativeLogAcceptance",
    "OutputHead",
    "PerToken",
    "ReferenceModel",
    "ReverseKL",
    "Sampled",
    "SampledReverseKL",
    "SkewedForwardKL",
    "SkewedReverseKL",
    "TopKTeacher",
    "TotalVariation",
    "dense_divergence",
    "reduce",
    "streamed_divergence",
]
