"""Checks of the loss on the states of this pair, against its reference in float64.

N completion tokens
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_opsd.cli.doctor.models import reading_of, states, written
from trl_opsd.cli.doctor.pair import Pair, Side
from trl_opsd.cli.doctor.tokens import vocabulary_of
from trl_opsd.cli.doctor.verdicts import Doubt
from trl_opsd.losses import DIVERGENCES, Divergence
from trl_opsd.losses.dense import dense_divergence
from trl_opsd.losses.registry import Settings
from trl_opsd.losses.streamed import streamed_divergence
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.types import LazyLogits, OutputHead, PerToken, Rollout

_NAMES = ("forward_kl", "reverse_kl", "jsd")
_ROUNDING = 1e-4
"""Largest difference, relative to the largest value, that the order of float32 sums explains."""
_NOTHING = 0.1
"""Lower bound of the value a difference is relative to: between models that agree all is rounding."""


def zero_with_itself(pair: Pair) -> str:
    """A model as its own teacher has divergence and gradient 0."""
    mine = _lazy(pair.student, written(pair), "student")
    for name, divergence in _divergences().items():
        student = _leaf(mine)
        value_N = streamed_divergence(student, mine, divergence).divergence
        value_N.sum().backward()
        largest = max(float(value_N.detach().abs().max()), float(student.hidden.grad.abs().max()))  # type: ignore[union-attr]
        if not largest < _ROUNDING:
            raise ValueError(f"`{name}` of the student with itself, or its gradient, is {largest:.2g} and not 0.")
    return f"{', '.join(_NAMES)}: 0, and so are their gradients."


def equals_reference(pair: Pair) -> str:
    """Values and gradients equal those of the reference, for any number of tokens at a time."""
    vocabulary = vocabulary_of(pair)
    mine, yours = _lazy(pair.student, written(pair), "student"), _lazy(pair.teacher, _taught(pair), "teacher")
    said = []
    for name, divergence in _divergences().items():
        expected = _value_and_gradient(dense_divergence, mine, yours, divergence, None, vocabulary)
        for chunk in (1, 7, None):  # the smallest tile, one that divides nothing, and all tokens
            found = _value_and_gradient(streamed_divergence, mine, yours, divergence, chunk, vocabulary)
            if (gap := max(map(_gap, found, expected))) > _ROUNDING or gap != gap:
                raise ValueError(
                    f"`{name}` with {chunk or 'all'} tokens at a time differs from its reference by {gap:.2g} of "
                    "the largest value."
                )
        said.append(f"{name} {expected[0].mean():.4g}")
    return f"As in float64, with any `loss_chunk_tokens`: {', '.join(said)} nats."


def same_in_parts(pair: Pair) -> str:
    """The gradient of three rows is the sum of each row's alone, without padding."""
    vocabulary, model, found = vocabulary_of(pair), pair.student.model, []
    rollouts = written(pair), _taught(pair)
    alone = [tuple(_alone(one, row) for one in rollouts) for row in range(len(rollouts[0].prompt_ids))]
    for batches in ([rollouts], alone):
        model.zero_grad()
        for mine, yours in batches:
            student = _lazy(pair.student, mine, "student", trained=True)
            teacher = _lazy(pair.teacher, yours, "teacher")
            forward_kl = _divergences()["forward_kl"]
            streamed_divergence(student, teacher, forward_kl, vocabulary=vocabulary).divergence.sum().backward()
        found.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    model.zero_grad()
    together, added_up = found
    norm = max(sum(float(one.square().sum()) for one in together.values()) ** 0.5, _ROUNDING)
    gap = sum(float((together[name] - added_up[name]).square().sum()) for name in together) ** 0.5 / norm
    if not gap < 10 * _ROUNDING:
        raise ValueError(f"The gradient of a batch and that of its rows, added up, differ by {gap:.2g} of its norm.")
    return f"The gradient of 3 rows is that of each alone, added up; {gap:.0e} apart."


def half_precision(pair: Pair) -> str:
    """What computing in bfloat16 changes."""
    vocabulary, device = vocabulary_of(pair), pair.device.type
    rollouts = written(pair), _taught(pair)
    values, firsts = [], []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            mine, yours = _lazy(pair.student, rollouts[0], "student"), _lazy(pair.teacher, rollouts[1], "teacher")
            found = streamed_divergence(mine, yours, _divergences()["forward_kl"], vocabulary=vocabulary)
            firsts.append((mine.hidden.float() @ mine.head.weight.float().T).argmax(-1))
        values.append(float(found.divergence.mean()))
    alike = float((firsts[0] == firsts[1]).float().mean())
    said = f"{values[0]:.4g} nats in float32, {values[1]:.4g} in bfloat16; the same likeliest token at {alike:.0%}."
    if not abs(values[1] - values[0]) <= 0.1 * abs(values[0]) + 1e-3:
        raise Doubt(f"{said} Train in float32, or compare a short run in both.")
    return said


def _divergences() -> dict[str, Divergence]:
    return {name: DIVERGENCES[name](Settings()) for name in _NAMES}


def _taught(pair: Pair) -> Rollout:
    """The rows as the teacher reads them; with longer prompts if it is the student, as the divergence would be 0."""
    return written(pair, prompts_twice=pair.student.source == pair.teacher.source)


def _lazy(side: Side, rollout: Rollout, role: str, trained: bool = False) -> LazyLogits:
    reading, head = reading_of(side, role), OutputHead.of(side.model)
    if trained:
        return LazyLogits(completion_hidden(side.model, rollout, reading)[rollout.counts], head)
    return LazyLogits(states(side, rollout, reading)[rollout.counts], _detached(head))


def _detached(head: OutputHead) -> OutputHead:
    return OutputHead(head.weight.detach(), None if head.bias is None else head.bias.detach(), head.scale, head.softcap)


def _leaf(lazy: LazyLogits) -> LazyLogits:
    return LazyLogits(lazy.hidden.clone().requires_grad_(), lazy.head)


def _value_and_gradient(
    function: Callable[..., PerToken],
    mine: LazyLogits,
    yours: LazyLogits,
    divergence: Divergence,
    chunk: int | None,
    vocabulary: int | None,
) -> tuple[Tensor, Tensor]:
    student = _leaf(mine)
    value_N = function(student, yours, divergence, chunk_tokens=chunk, vocabulary=vocabulary).divergence
    value_N.sum().backward()
    assert student.hidden.grad is not None
    return value_N.detach(), student.hidden.grad


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=_NOTHING))


def _alone(rollout: Rollout, row: int) -> Rollout:
    """A row without its padding."""
    prompt, completion = rollout.prompt_mask[row] != 0, rollout.completion_mask[row] != 0
    return Rollout(
        prompt_ids=rollout.prompt_ids[row, prompt][None],
        prompt_mask=rollout.prompt_mask[row, prompt][None],
        completion_ids=rollout.completion_ids[row, completion][None],
        completion_mask=rollout.completion_mask[row, completion][None],
        weights=rollout.weights[row, completion][None],
    )
