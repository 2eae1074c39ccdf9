"""What a loss takes, hidden states with a head, and what it gives, per token and summed over a micro-batch.

B rows · N tokens in the loss · V vocabulary size · H hidden size
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_opsd.types.rollout import Author, Rollout


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

        The only place that knows the config names of logit post-processing; [`~models.probes.check_head`] verifies the
        result on the model itself.
        """
        layer = model.get_output_embeddings()
        if layer is None:
            raise ValueError(
                f"{type(model).__name__} has no output embeddings, so it cannot predict tokens: pass a causal language "
                "model, for instance one loaded with `AutoModelForCausalLM`."
            )
        config = model.config.get_text_config()
        return cls(
            weight=layer.weight,
            bias=getattr(layer, "bias", None),
            scale=_logit_scale(config),
            softcap=_first(config, "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
        )

    def to(self, device: torch.device) -> OutputHead:
        """The same on a device."""
        bias = None if self.bias is None else self.bias.to(device, non_blocking=True)
        return replace(self, weight=self.weight.to(device, non_blocking=True), bias=bias)


def _logit_scale(config: Any) -> float:
    # Configs have three names for a multiplier of the logits, and one for a divisor (a multiplier in HyperCLOVA X).
    if (scale := _first(config, "logit_scale", "output_multiplier", "lm_head_multiplier")) is not None:
        return scale
    scaling = _first(config, "logits_scaling")
    return 1.0 if scaling is None else scaling if config.model_type == "hyperclovax" else 1.0 / scaling


def _first(config: Any, *names: str) -> float | None:
    stated = (getattr(config, name, None) for name in names)
    return next((float(one) for one in stated if one is not None), None)


@dataclass(frozen=True, slots=True)
class LazyLogits:
    """Logits that are not materialised yet: `head(hidden) / temperature`. A loss takes two of these."""

    hidden: Tensor
    """[N, H], the last hidden states of only the tokens in the loss."""
    head: OutputHead
    temperature: float = 1.0
    """Softmax temperature, applied after the head's own scale and cap."""


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A third model beside student and teacher: the target moves away from it, or it is an anchor of the student."""

    logits: LazyLogits
    """Hidden states [N, H] and head [V, H], without a gradient."""
    push: float = 0.0
    """Adds so many times the teacher's log-probabilities minus its own to those of the target, which is renormalised;
    at -1, it takes the teacher's place."""
    bound: float | None = None
    """Soft bound of that difference in nats, `bound * tanh(difference / bound)`. Without one, it is at most 80 nats
    where a head has a bias, which may exclude a token."""
    anchor: float = 0.0
    """Weight of the student's divergence from it, beside that from the target."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The completion tokens at the positions of a loss, and how they were sampled; all constants."""

    ids: Tensor
    """[N], int64, the token that follows at each position."""
    nll_weight: Tensor | None = None
    """[N], float32: adds `nll_weight * -log p_s(ids)` to the value of each token, with the gradient
    `nll_weight * (p_s - 1[ids])`
    with respect to the student's logits; `None` adds nothing."""
    logprobs: Tensor | None = None
    """[N], float32, nats: log-probability of each token in the distribution that it was drawn from, NaN where it is not
    known; where `None`, that is the student's own."""

    def rows(self, rows: slice) -> Sampled:
        """Those of some positions."""
        nll_weight, logprobs = (None if one is None else one[rows] for one in (self.nll_weight, self.logprobs))
        return Sampled(self.ids[rows], nll_weight, logprobs)


TENTHS = 10
"""Equal parts of a completion whose losses are summed separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """One value per token in the loss, in nats and float32."""

    divergence: Tensor
    """[N], multiplied by the weights if given; carries the gradient to the student."""
    student_entropy: Tensor
    """[N], no gradient."""
    teacher_entropy: Tensor
    """[N], no gradient."""
    teacher_uniform: Tensor | None = None
    """[N], whether the teacher's logits are all equal, which leaves nothing to learn; `None` where it is not known."""
    clipped: Tensor | None = None
    """[N], float32, 1 where an entry of the vocabulary was clipped; `None` where not known."""
    nll: Tensor | None = None
    """[N], no gradient: weighted part of `divergence` that `Sampled.nll_weight` added; `None` where there was none."""
    anchored: Tensor | None = None
    """[N], no gradient: weighted part of `divergence` that anchors added; `None` where there are none."""
    same_first: Tensor | None = None
    """[N], float32, 1 where the same token is the likeliest of both models; `None` where not known."""
    teacher_first: Tensor | None = None
    """[N], float32, 1 where the sampled token is the teacher's likeliest; `None` where not known."""
    importance: Tensor | None = None
    """[N], float32, importance weight of the sampled token, 1 where it has none; `None` where not known."""
    gated: Tensor | None = None
    """[N], float32, 1 where that weight is 0; `None` where not known."""
    sampler_kl: Tensor | None = None
    """[N], float32, estimate of `KL(sampler || student)` from the sampled token; 0 where the sampler is not known."""
    sampler_known: Tensor | None = None
    """[N], float32, 1 where it is known; `None` where it is for no token, like the above."""
    ranked: Tensor | None = None
    """[N], float32, 1 where both models' likeliest tokens were ranked; `None` where not known, like the next two."""
    top_shared: Tensor | None = None
    """[N], float32, share of one model's 16 likeliest tokens that are among the other's; 0 where not ranked."""
    top_mass: Tensor | None = None
    """[N], float32, the student's probability of these shared tokens; 0 where not ranked."""
    accepted: Tensor | None = None
    """[N], float32, probability that speculative decoding keeps a token of the student, NaN where the weight is 0;
    `None` where the divergence does not tell."""
    outcomes: Tensor | None = None
    """[N], float32, distributions of each token, where that is not one; `None` where models are compared by tokens."""
    compared: Tensor | None = None
    """[N], float32, how many of them were compared; `None` where models are compared by tokens."""
    escaped: Tensor | None = None
    """[N], float32, the share of a distribution that may be missing, summed over those compared; `None` as above."""
    lost: Tensor | None = None
    """[N], float32, how many the teacher's tokenizer does not have, or its context has no room for; `None` as above."""


UNWEIGHTED = tuple(one.name for one in fields(PerToken) if one.default is None)
"""Optional fields of [`PerToken`]: the sum of each over a row is a statistic of the same name, without weights."""


OF_AUTHORS = tuple(tuple(f"{name}_{one.word}" for name in ("weight", "divergence", "tokens")) for one in Author)
"""Statistics of the tokens of each [`~types.rollout.Author`]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One process's contribution to a loss: local sums, for the caller to reduce across processes."""

    ROW_NAMES: ClassVar[tuple[str, ...]] = (
        "weight",
        "divergence",
        "student_entropy",
        "teacher_entropy",
        "tokens",
        *UNWEIGHTED,
        *chain.from_iterable(OF_AUTHORS),
        *(f"weight_{tenth}" for tenth in range(TENTHS)),
        *(f"divergence_{tenth}" for tenth in range(TENTHS)),
    )
    """Names of the columns of `rows`."""

    loss: Tensor
    """Scalar, divided by the denominator of the whole optimizer step; carries the gradient."""
    rows: Tensor
    """[B, 55], float32, sums over the tokens of each row, in the order of `ROW_NAMES`: weights; divergences, entropies
    and `nll` in nats times weight; the others without weights, as [`PerToken`] has them; weights, divergences and
    tokens by [`~types.rollout.Author`]. From `weight_0` on all are 0 where the row is only a part of a completion."""

    def __add__(self, other: LossParts) -> LossParts:
        """Adds the parts of two groups of tokens of the same rows; both must have the same denominator."""
        return LossParts(loss=self.loss + other.loss, rows=self.rows + other.rows)


def columns(rows: Tensor, *names: str) -> Tensor:
    """[B, len(names)], these statistics of [`LossParts.rows`]."""
    return torch.stack([rows[:, LossParts.ROW_NAMES.index(name)] for name in names], dim=1)


def check_parts(parts: Any, rollout: Rollout, where: str, training: bool) -> None:
    """Rejects parts of a loss that do not fit the rollout's rows, or that in training have no graph."""
    shapes = {"loss": (), "rows": (len(rollout.completion_ids), len(LossParts.ROW_NAMES))}
    # Dtype and shape are known on the host; values are not.
    given = [(getattr(parts, name, None), shape) for name, shape in shapes.items()]
    if not all(isinstance(one, Tensor) and one.shape == shape and one.is_floating_point() for one, shape in given):
        raise ValueError(
            f"`{where}` returned {type(parts).__name__}: expected `LossParts(loss=..., rows=...)` with a float loss of "
            f"shape [], divided by `num_items`, and float rows of shape {list(shapes['rows'])}: for each row the sums "
            f"{', '.join(LossParts.ROW_NAMES)}."
        )
    if training and torch.is_grad_enabled() and not parts.loss.requires_grad:
        raise ValueError(f"`{where}` returned a loss without a graph, so no gradient: compute it from the student.")
