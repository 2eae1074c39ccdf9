"""Refuses arguments, and divergences of the user's own, from which a loss would silently compute something else.

R rows (tokens) · V vocabulary size
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence, Entrywise
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.types import LazyLogits, ReferenceModel, Sampled
from trl_opsd.types.known import TokenHead


def check_arguments(
    student: LazyLogits,
    teacher: LazyLogits,
    divergence: Divergence,
    weights_N: Tensor | None,
    vocabulary: int | None,
    kl_clip: float | None,
    sampled: Sampled | None,
    references: Sequence[ReferenceModel],
    anchor: Divergence | None,
) -> None:
    """Refuses what would be sliced, broadcast or left out without an error; all else torch refuses itself."""
    others = [(f"beside[{number}]", one.logits) for number, one in enumerate(references)]
    mine, tokens = len(student.head.weight), len(student.hidden)
    yours = min(len(one.head.weight) for _, one in (("", teacher), *others))
    for name, side in (("student", student), ("teacher", teacher), *others):
        if side.hidden.ndim != 2 or len(side.hidden) != tokens:
            raise ValueError(
                f"{name} hidden states have shape {list(side.hidden.shape)}, expected [N, H] with {tokens} tokens, "
                "like the student's: select the same tokens from both first, for example hidden[weights != 0]."
            )
        if not side.temperature > 0:
            raise ValueError(
                f"{name} temperature is {side.temperature}, expected a number above 0: use 1.0 for no temperature."
            )
    heads = {len(one.head.weight) for _, one in (("", student), ("", teacher), *others)}
    if len(heads) > 1 if vocabulary is None else not 1 <= vocabulary <= min(heads):
        raise ValueError(
            f"vocabulary is {vocabulary}, but the student's head has {mine} rows and the teacher's {yours}: pass a "
            f"teacher with the same tokenizer, and the number of shared ids, from 1 to {min(mine, yours)}."
        )
    pushed, by_token = sum(bool(one.push) for one in references), kl_clip is not None or divergence.needs_whole
    if isinstance(teacher.head, TokenHead) and (teacher.temperature != 1 or pushed or by_token):
        raise ValueError(
            "A teacher given by some of its tokens needs temperature 1, no references to move away from, no kl_clip, "
            f"and a divergence that takes all other tokens as one; got temperature {teacher.temperature:g}, {pushed} "
            f"such references, kl_clip={kl_clip} and {divergence!r}: remove these, or use a teacher with hidden states."
        )
    check_clip(kl_clip, divergence)
    if isinstance(anchor or divergence, SampledReverseKL) and any(one.anchor for one in references):
        raise ValueError("SampledReverseKL cannot hold the student near an anchor: pass `anchor=ReverseKL()`.")
    if sampled is None and isinstance(divergence, SampledReverseKL):
        raise ValueError("SampledReverseKL needs sampled tokens: pass `sampled=Sampled(ids)`, or use ReverseKL().")
    per_token = {"weights": weights_N}
    if sampled is not None:
        per_token |= {f"sampled {name}": getattr(sampled, name) for name in ("ids", "nll_weight", "logprobs")}
    for name, one in per_token.items():
        if one is not None and one.shape != (tokens,):
            raise ValueError(f"{name} have shape {list(one.shape)}, expected [{tokens}]: pass one per token.")


def check_clip(clip: float | None, divergence: Divergence) -> None:
    """Refuses a clip that is out of range, or that goes with a divergence whose entries are not known."""
    if clip is not None and not (clip > 0 and isinstance(divergence, Entrywise)):
        raise ValueError(
            f"kl_clip is {clip} with {divergence!r}: expected nats above 0, and a divergence that is a sum over "
            "vocabulary entries, which can be clipped; your own can clip in its `value`."
        )


# ---- Divergences of the user's own: what they compute, compared with their definition on random distributions --------

_Compute: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_APART = (1.0, 0.3, 0.03)
"""Distance of the teacher from the student in each row: a bounded divergence is flat far away, so some are close."""
_TOLERANCE = 1e-3
"""Largest difference, relative to the largest number: rounding in float32 stays far below it."""
_ROUNDING = 1e-6
"""Absolute difference that rounding explains."""
_FLAT = 1e-5
"""Gradient with respect to logits, relative to that with respect to log-probabilities: rounding stays below it."""


def prove_divergence(divergence: Divergence, vocabulary: int, device: torch.device) -> list[str]:
    """Refuses a user's divergence that is not finite, whose gradient is not that of its value, or that mixes tokens.

    Returns a sentence for each thing that is possible but hardly meant.
    """
    kind, name = type(divergence), type(divergence).__name__
    if kind.__module__.rpartition(".")[0] == Divergence.__module__.rpartition(".")[0]:  # ours; no class derived from it
        return []
    logits = 3 * torch.randn(2, len(_APART), vocabulary, generator=torch.Generator().manual_seed(0))
    # Teachers at three distances: far, near, and almost equal.
    logits[1] = logits[0].lerp(logits[1], torch.tensor(_APART)[:, None])
    logs_2RV = logits.to(device).log_softmax(-1)

    def computed(by: _Compute, logs_2rV: Tensor = logs_2RV, seed: int = 0) -> tuple[Tensor, Tensor]:
        # A divergence may draw random numbers; it must draw the same ones each time to be comparable.
        torch.manual_seed(seed)
        random.seed(seed)
        logs_2rV = logs_2rV.clone()
        return by(*logs_2rV, *logs_2rV.exp())

    # The definition is `value` differentiated by autograd, whatever the class overrides.
    defined = partial(Divergence.value_and_gradient, divergence)
    by_autograd, again = computed(defined), computed(defined)
    for what, found in zip(("value", "gradient"), by_autograd, strict=True):
        if not found.isfinite().all():
            raise ValueError(
                f"The {what} of `{name}.value` is NaN or infinite for distributions without zero probabilities: check "
                "its roots, logarithms and quotients, also in the branch that `where` does not select."
            )
    doubts = []
    least, largest = float(by_autograd[0].min()), float(by_autograd[0].abs().max())
    if least < -_TOLERANCE * largest - _ROUNDING:
        doubts.append(
            f"`{name}.value` is negative, {least:.3g} nats for random distributions: minimising it may move the "
            "student away from the teacher."
        )
    if _gap(by_autograd, again):  # its random numbers come from elsewhere: nothing more can be compared
        return doubts
    is_random = _gap(by_autograd, computed(defined, seed=1))  # then each row has its own draws, and may differ alone
    alone, first = computed(defined, logs_2RV[:, :1]), (by_autograd[0][:1], by_autograd[1][:1])
    if not is_random and (gap := _gap(alone, first)):
        raise ValueError(
            f"`{name}.value` of a token depends on other tokens ({gap}). Tokens are compared in tiles, so do not "
            "reduce over the first dimension."
        )
    if gap := _gap(computed(divergence.value_and_gradient), by_autograd):
        # A subclass of a named divergence that overrides `value` alone has the gradient of its parent.
        gradient_of = next(one for one in kind.__mro__ if not {"value_and_gradient", "terms"}.isdisjoint(vars(one)))
        inherited = "" if gradient_of is kind else f", that of `{gradient_of.__name__}`,"
        raise ValueError(
            f"`{name}.value_and_gradient`{inherited} does not match `{name}.value`: {gap}. It must return the value "
            "and its gradient with respect to the logits: derive from `Divergence` without it, and autograd computes "
            "both. For a different gradient, use `detach` in `value`."
        )
    if _is_flat(divergence, logs_2RV, by_autograd[1]):
        doubts.append(
            f"The gradient of `{name}.value` is 0 for random distributions: nothing is learned, and rounding errors, "
            "scaled up by the optimizer, move the student at random. Check `detach`, and bounds (`clamp`), beyond "
            "which the gradient is 0."
        )
    # The same student rows with the teachers permuted: an equal gradient has not used the teacher.
    elif torch.equal(by_autograd[1], computed(defined, torch.stack([logs_2RV[0], logs_2RV[1].roll(1, 0)]))[1]):
        doubts.append(
            f"The gradient of `{name}.value` does not depend on the teacher, so nothing is learned from it: use the "
            "second argument in a term that also depends on the first."
        )
    return doubts


def _is_flat(divergence: Divergence, logs_2RV: Tensor, gradient_RV: Tensor) -> bool:
    """Whether the gradient with respect to the logits is nothing but rounding."""
    with torch.enable_grad():
        log_student_RV = logs_2RV[0].clone().requires_grad_()
        value_R = divergence.value(log_student_RV, logs_2RV[1].clone())
        (of_logs_RV,) = torch.autograd.grad(value_R.sum(), log_student_RV)
    return bool(gradient_RV.abs().max() <= _FLAT * of_logs_RV.abs().max())


def _gap(some: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> str:
    """Describes how far values and gradients are from others; empty if equal up to rounding."""
    for what, one, other in zip(("values", "gradients"), some, others, strict=True):
        if one.shape != other.shape:
            return f"{what} of shape {list(one.shape)} instead of {list(other.shape)}"
        gap, largest = float((one - other).abs().max()), float(other.abs().max())
        if not gap <= _TOLERANCE * largest + _ROUNDING:
            most = (one - other).abs().flatten().argmax() % one.size(-1)
            where = f" at token id {int(most)}" if one.ndim > 1 else ""
            return f"{what} differ by {gap:.2g}{where}, where the largest is {largest:.2g}"
    return ""
