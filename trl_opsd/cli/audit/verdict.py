"""What an audit concludes: the first rule that fits is the verdict."""

from __future__ import annotations

import math
from typing import NamedTuple

from trl_opsd.cli.audit.measure import Audit

_FLOORS = 10
"""Multiple of the noise floor below which a divergence is in part rounding."""
_UNLIKELY = 1e-3
"""Probability of an end token that a teacher would not give where it ends itself."""


class Verdict(NamedTuple):
    """Whether to train with a teacher, why, and what to do."""

    word: str
    """`"helps"`, `"off-policy"`, `"harms"`, `"no better"`, `"nothing"`, `"broken"`, or `"unknown"`."""
    why: str
    remedy: str


def verdict(of: Audit) -> Verdict:
    """The verdict on the teacher of an audit."""
    knows, recovers = of.knows is not None and of.knows.sign > 0, of.recovers
    never_ends = of.clipped is None or (of.clipped > 0.9 and of.student_clipped < 0.5)
    if of.at_ends < _UNLIKELY and never_ends:
        return Verdict(
            "broken",
            f"The teacher gives the student's end token a probability of {of.at_ends:.1g} where the student ends.",
            "Give both the same end token: `generation_kwargs={'eos_token_id': ...}`, or another template.",
        )
    if of.teacher_nats < -math.log(of.vocabulary) and not knows:
        return Verdict(
            "broken",
            f"The student's tokens are less likely to the teacher ({of.teacher_nats:.2g} nats) than if it guessed.",
            "Its tokenizer is probably another one (`teacher_processing_class`, docs/tokenizers.md), or it is not "
            "trained.",
        )
    if of.forward < max(_FLOORS * of.floor, 1e-6):
        return Verdict(
            "nothing",
            f"Both models say the same: {of.forward:.2g} nats apart, of which {of.floor:.1g} are noise.",
            "Give the teacher a context that the student does not have, or take another teacher.",
        )
    if of.context is not None and of.context < _FLOORS * max(of.floor, 1e-7):
        return Verdict(
            "nothing",
            f"The teacher's context changes nothing of what it says ({of.context:.1g} nats).",
            "Look at the template (`teacher_prompt_template`) and at what `privileged_context` says.",
        )
    if of.own is None or of.knows is None:
        return Verdict(
            "unknown",
            f"They differ by {of.loss:.2g} nats; whether the teacher is better was not measured: {of.cannot}.",
            "Pass `Rewards` of what you want, and a teacher that can generate (`teacher_offload='none'` or 'cpu').",
        )
    rewards = f"(reward {of.own.value:.2f}, {of.knows.value:+.2f} ± {of.knows.error:.2f})"
    if knows and (recovers is None or of.after is None):
        why = "there was too little after the student's mistakes to see whether it recovers"
        return Verdict("helps", f"It knows {rewards}; {why}.", "Train on-policy.")
    if knows and recovers is not None and of.after is not None:
        after = f"the student's mistakes ({of.after[0].value:.2f}; the student {of.after[1].value:.2f})"
        if recovers.sign > 0:
            return Verdict("helps", f"It knows {rewards}, and goes on well from {after}.", "Train on-policy.")
        return Verdict(
            "off-policy",
            f"It knows {rewards}, but does not recover from {after}: what it says after one teaches nothing.",
            "Learn from its own completions: `seq_kd=True` with `lmbda=0`, or supervised; or find a teacher that "
            "recovers.",
        )
    if of.knows.sign < 0:
        return Verdict(
            "harms",
            f"The teacher's own completions are worse than the student's {rewards}, and training moves the student to "
            "them.",
            "Do not train with it: take another teacher or context, or look at the template that it was trained with "
            "(`teacher_chat_template_kwargs`, `teacher_prompt_template`).",
        )
    return Verdict(
        "no better",
        f"The teacher's own completions are no better than the student's {rewards}.",
        "Take another teacher or another context, or more rows if the error is large.",
    )
