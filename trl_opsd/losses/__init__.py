"""The loss: two models' hidden states and heads in, one divergence per token out; torch only."""

from ..types import LazyLogits, OutputHead, PerToken
from .dense import dense_divergence
from .divergence import Divergence, ForwardKL, GeneralizedJSD, ReverseKL
from .reduce import reduce
from .streamed import streamed_divergence

__all__ = [
    "Divergence",
    "ForwardKL",
    "GeneralizedJSD",
    "LazyLogits",
    "OutputHead",
    "PerToken",
    "ReverseKL",
    "dense_divergence",
    "reduce",
    "streamed_divergence",
]
