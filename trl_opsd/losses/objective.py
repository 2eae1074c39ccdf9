"""How the models of a run are compared: what does not depend on the token.

N tokens in the loss · H hidden size · V vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from torch import Tensor

from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.streamed import streamed_divergence
from trl_opsd.types import LazyLogits, OutputHead, PerToken, ReferenceModel, Sampled


def head_of_reference(name: str, teacher: OutputHead, origin: OutputHead | None) -> OutputHead:
    """The head of states beside a teacher's, by what they are for: a contrast is its own, in another context."""
    return origin if name == "origin" and origin is not None else teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How two models are compared: the arguments of [`streamed_divergence`] that are the same for all tokens."""

    divergence: Divergence
    temperatures: tuple[float, float] = (1.0, 1.0)
    """Of the student and of the teacher."""
    chunk_tokens: int | None = None
    vocabulary: int | None = None
    kl_clip: float | None = None
    contrast: tuple[float, float | None] = (0.0, None)
    """How far the target moves away from the contrast, and the bound of that: [`~types.ReferenceModel.push`]."""
    extrapolation: float = 1.0
    """Factor of the teacher's log-probabilities relative to those of the origin, whose share is the rest."""
    anchor_weight: float = 0.0
    anchor: Divergence | None = None
    """The divergence from the origin, times that weight."""
    selection: Any = None
    """The `TokenSelection` of the tokens that are compared, where that depends on logits; `None` for all."""
    factors: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """[B, C], constants that multiply what each token adds to the loss, but not its weight in the denominator; of the
    log-probabilities of the completion under the student, under the teacher, and where it was sampled (the student's
    where that is not known), [B, C] each, in nats, 0 for tokens that do not count. Needs a product more with each head,
    as the head's gradient cannot be scaled by token afterwards; for a method with `by_token = True`."""

    def of(
        self,
        student: tuple[Tensor, OutputHead],
        teacher: tuple[Tensor, OutputHead],
        weights: Tensor | None,
        sampled: Sampled | None,
        reference_states: Mapping[str, tuple[Tensor, OutputHead]] = MappingProxyType({}),
    ) -> PerToken:
        """The divergence of tokens, of models as hidden states [N, H] and head [V, H]; references by their role."""
        return streamed_divergence(
            LazyLogits(*student, self.temperatures[0]),
            LazyLogits(*teacher, self.temperatures[1]),
            self.divergence,
            weights,
            self.chunk_tokens,
            self.vocabulary,
            self.kl_clip,
            sampled,
            [*chain.from_iterable(self._roles(name, *one) for name, one in reference_states.items())],
            self.anchor,
        )

    def _roles(self, name: str, hidden: Tensor, head: OutputHead) -> list[ReferenceModel]:
        """What a third model is here for: what makes the target is tempered like the teacher, an anchor like the
        student, with which it is compared.
        """
        like_student, like_teacher = (LazyLogits(hidden, head, one) for one in self.temperatures)
        if name == "contrast":
            return [ReferenceModel(like_teacher, *self.contrast)]
        push = self.extrapolation - 1
        if push and self.temperatures[0] == self.temperatures[1]:
            return [ReferenceModel(like_teacher, push, anchor=self.anchor_weight)]
        target = [ReferenceModel(like_teacher, push)] if push else []
        return [*target, ReferenceModel(like_student, anchor=self.anchor_weight)] if self.anchor_weight else target
