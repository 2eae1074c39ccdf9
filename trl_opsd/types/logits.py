"""What logits are made of: hidden states and a head; and the sampled tokens that a loss may read beside them.

N tokens in the loss · V vocabulary size · H hidden size
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutputHead:
    """How one model turns hidden states into logits: `softcap * tanh(scale * (h @ weight.T + bias) / softcap)`.

    There is no cap when `softcap` is `None`.
    """

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    """[V], or `None`."""
    scale: float = 1.0
    """Multiplier of the product, before the cap."""
    softcap: float | None = None
    """Bound on the absolute value of the logits."""

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """Reads the head of a causal language model of `transformers`, bare or wrapped by `peft`.

        The only place that knows the config names of logit post-processing; [`~models.probes.HEAD`] verifies the
        result on the model itself.
        """
        layer = model.get_output_embeddings()
        if layer is None:
            raise ValueError(
                f"{type(model).__name__} has no output embeddings, so it predicts no tokens: pass a causal language "
                "model, for instance one loaded with `AutoModelForCausalLM`."
            )
        config = model.config.get_text_config()
        return cls(
            weight=layer.weight,
            bias=getattr(layer, "bias", None),
            scale=_logit_scale(config),
            softcap=_softcap(config),
        )


def _logit_scale(config: Any) -> float:
    """Configs have three names for a multiplier of the logits, and one for a divisor (a multiplier in HyperCLOVA X)."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (scale := getattr(config, name, None)) is not None:
            return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)
    return 1.0


def _softcap(config: Any) -> float | None:
    """Configs have three names for the cap of the logits."""
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if (bound := getattr(config, name, None)) is not None:
            return float(bound)
    return None


@dataclass(frozen=True, slots=True)
class LazyLogits:
    """Logits that are not materialised yet: `head(hidden) / temperature`. A loss takes two of these."""

    hidden: Tensor
    """[N, H], the last hidden states of only the tokens in the loss."""
    head: OutputHead
    temperature: float = 1.0
    """Softmax temperature, applied after the head's own scale and cap."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The completion tokens at the positions of a loss, and how they were sampled; all constants."""

    ids: Tensor
    """[N], int64, the token that follows at each position."""
    pull: Tensor | None = None
    """[N], float32: adds `pull * -log p_s(ids)` to the value of each token, with the gradient `pull * (p_s - 1[ids])`
    with respect to the student's logits; `None` adds nothing."""
    logprobs: Tensor | None = None
    """[N], float32, nats: log-probability of each token in the distribution that it was drawn from; where `None`, that
    is the student's own."""

    def rows(self, rows: slice) -> Sampled:
        """Those of some positions."""
        return Sampled(*(None if one is None else one[rows] for one in self._values()))

    def to(self, device: torch.device) -> Sampled:
        """The same on another device."""
        return Sampled(*(None if one is None else one.to(device, non_blocking=True) for one in self._values()))

    def _values(self) -> list[Tensor]:
        return [getattr(self, one.name) for one in fields(self)]
