"""What an audit concludes of a candidate: a table of rules; the first that fits is the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from trl_opsd.cli.audit.measure import Audit, Measured

_FLOORS = 10
"""Multiple of the noise floor below which a divergence is in part rounding."""
_UNLIKELY = 1e-3
"""Probability of an end token that a teacher would not give where it ends itself."""
_AT_START = 10
"""How often the mean divergence that of the first three tokens is where a template is wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to train with a candidate, why, and what to do."""

    word: str
    """`"helps"`, `"off-policy"`, `"harms"`, `"no better"`, `"nothing"`, `"broken"`, or `"unknown"`."""
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class _Rule:
    word: str
    fits: Callable[[Measured, Audit], bool]
    why: str
    """A format of what was measured."""
    remedy: str


def _is_better(one: Measured) -> bool:
    return one.knows is not None and one.knows.is_positive


def _ends_elsewhere(one: Measured, of: Audit) -> bool:
    never_ends = one.clipped is None or (one.clipped > 0.9 and of.student_clipped < 0.5)
    return one.at_ends < _UNLIKELY and never_ends


RULES = (
    _Rule(
        "broken",
        _ends_elsewhere,
        "The teacher gives the student's end token a probability of {0.at_ends:.1g} where the student ends.",
        "Give both the same end token: `generation_kwargs={{'eos_token_id': ...}}`, or another template.",
    ),
    _Rule(
        "broken",
        lambda one, _: one.teacher_nats < -math.log(one.vocabulary) and not _is_better(one),
        "The student's tokens are less likely to the teacher ({0.teacher_nats:.2g} nats) than if it guessed.",
        "Its tokenizer is probably another one (`teacher_processing_class`, docs/tokenizers.md), or it is not trained.",
    ),
    _Rule(
        "nothing",
        lambda one, _: one.forward < _FLOORS * one.floor or one.forward < 1e-6,
        "Both models say the same: {0.forward:.2g} nats apart, of which {0.floor:.1g} are noise.",
        "Give the teacher a context that the student does not have, or take another teacher.",
    ),
    _Rule(
        "nothing",
        lambda one, _: 0 <= one.apart_from.get("none", math.nan) < _FLOORS * max(one.floor, 1e-7),
        "The teacher's context changes nothing of what it says ({0.apart_from[none]:.1g} nats).",
        "Look at the template (`teacher_prompt_template`) and at what `privileged_context` says.",
    ),
    _Rule(
        "helps",
        lambda one, _: _is_better(one) and one.recovers is not None and one.recovers.is_positive,
        "It knows (reward {0.own.value:.2f}, {0.knows.value:+.2f} ± {0.knows.error:.2f}), and goes on well from the "
        "student's mistakes ({0.after[0].value:.2f}; the student {0.after[1].value:.2f}).",
        "Train on-policy.",
    ),
    _Rule(
        "off-policy",
        lambda one, _: _is_better(one) and one.recovers is not None,
        "It knows (reward {0.own.value:.2f}, {0.knows.value:+.2f} ± {0.knows.error:.2f}), but does not recover from "
        "the student's mistakes ({0.after[0].value:.2f}; the student {0.after[1].value:.2f}): what it says after one "
        "teaches nothing.",
        "Learn from its own completions: `seq_kd=True` with `lmbda=0`, or supervised; or find a teacher that recovers.",
    ),
    _Rule(
        "helps",
        lambda one, _: _is_better(one),
        "It knows (reward {0.own.value:.2f}, {0.knows.value:+.2f} ± {0.knows.error:.2f}); there was too little after "
        "the student's mistakes to see whether it recovers.",
        "Train on-policy.",
    ),
    _Rule(
        "harms",
        lambda one, _: one.knows is not None and one.knows.is_negative,
        "The teacher's own completions are worse than the student's (reward {0.own.value:.2f}, {0.knows.value:+.2f} ± "
        "{0.knows.error:.2f}), and training moves the student to them.",
        "Do not train with it: take another teacher or another context, or look at the template that it was trained "
        "with (`teacher_chat_template_kwargs`, `teacher_prompt_template`).",
    ),
    _Rule(
        "no better",
        lambda one, of: one.knows is not None and one.first_three > _AT_START * one.loss,
        "The teacher's own completions are no better (reward {0.own.value:.2f}, {0.knows.value:+.2f} ± "
        "{0.knows.error:.2f}), and it disagrees from the first tokens on ({0.first_three:.2g} nats of {0.loss:.2g}).",
        "Look at the template that it was trained with: `teacher_chat_template_kwargs`, `teacher_prompt_template`.",
    ),
    _Rule(
        "no better",
        lambda one, _: one.knows is not None,
        "The teacher's own completions are no better than the student's (reward {0.own.value:.2f}, "
        "{0.knows.value:+.2f} ± {0.knows.error:.2f}).",
        "Take another teacher or another context, or more rows if the error is large.",
    ),
    _Rule(
        "unknown",
        lambda *_: True,
        "They differ by {0.loss:.2g} nats per token; whether the teacher is better was not measured: {0.cannot}.",
        "Pass `Rewards` of what you want, and a teacher that can generate (`teacher_offload='none'` or 'cpu').",
    ),
)


def verdict(one: Measured, of: Audit) -> Verdict:
    """The verdict on a candidate."""
    rule = next(rule for rule in RULES if rule.fits(one, of))
    return Verdict(rule.word, rule.why.format(one), rule.remedy.format(one))
