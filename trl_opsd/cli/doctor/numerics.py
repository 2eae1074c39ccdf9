"""Checks of the teacher's states, and of the loss on the states of this pair against its reference in float64.

N completion tokens · H hidden size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from trl_opsd.cli.doctor.pair import Pair
from trl_opsd.config import OPSDConfig
from trl_opsd.losses import DIVERGENCES, Divergence
from trl_opsd.losses.dense import dense_divergence
from trl_opsd.losses.registry import Settings
from trl_opsd.losses.streamed import streamed_divergence
from trl_opsd.models.backbone import completion_hidden, logits_of
from trl_opsd.models.probes import Doubt
from trl_opsd.rollout import RolloutBackend
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import LazyLogits, OutputHead, PerToken, Rollout

_DIVERGENCES: dict[str, Divergence] = {
    name: DIVERGENCES[name](Settings()) for name in ("forward_kl", "reverse_kl", "jsd")
}
_ALIKE = 1e-5
"""Largest difference between states, relative to the largest value, that float32 rounding explains."""
_ROUNDING = 1e-4
"""Largest difference, relative to the largest value, that the order of float32 sums explains."""
_NOTHING = 0.1
"""Lower bound of the value a difference is relative to: between models that agree all is rounding."""


@torch.no_grad()
def repeats(pair: Pair) -> str:
    """The teacher's logits are the same in a second forward pass."""
    ids_BL = torch.arange(16, device=pair.device).mul(pair.teacher.rows // 16)[None]
    # NaN is a finding of other checks; here it would differ from itself.
    first, again = (pair.teacher.model(input_ids=ids_BL, use_cache=False).logits.float().nan_to_num() for _ in range(2))
    gap = float((first - again).abs().max() / first.abs().max().clamp(min=1e-30))
    if gap > _ALIKE:
        raise ValueError(
            f"The teacher's logits differ by {gap:.1e} of the largest between two readings of the same tokens: it "
            "draws random numbers, or keeps something from the first reading."
        )
    return "Twice the same, bit for bit." if gap == 0 else f"Twice the same, but for {gap:.0e} of the largest."


def depends_on_input(pair: Pair) -> str:
    """The teacher's states depend on what it reads."""
    # Not bit for bit, as the guard of a training compares them: attention rounds the average of equal values.
    states_NH = _lazy(pair, "teacher", pair.read_by("student")).hidden
    spread, largest = (states_NH - states_NH.mean(0)).abs().max(), states_NH.abs().max()
    if spread < _ALIKE * largest:
        raise ValueError(
            f"The teacher has the same hidden state at all {len(states_NH)} tokens, whatever it reads: its weights are "
            "zeroed or were not loaded; load it again."
        )
    return f"States differ by up to {spread / largest:.2g} of the largest value, token by token."


def zero_with_itself(pair: Pair) -> str:
    """A model as its own teacher has divergence and gradient 0."""
    mine = _lazy(pair, "student")
    for name, divergence in _DIVERGENCES.items():
        largest = max(float(one.abs().max()) for one in _compared(streamed_divergence, mine, mine, divergence))
        if not largest < _ROUNDING:
            raise ValueError(f"`{name}` of the student with itself, or its gradient, is {largest:.2g} and not 0.")
    return f"{', '.join(_DIVERGENCES)}: 0, and so are their gradients."


def equals_reference(pair: Pair) -> str:
    """Values and gradients equal those of the reference, for any number of tokens at a time."""
    mine, yours, said = _lazy(pair, "student"), _lazy(pair, "teacher"), []
    for name, divergence in _DIVERGENCES.items():
        expected = _compared(dense_divergence, mine, yours, divergence, None, pair.vocabulary)
        for chunk in (1, 7, None):  # the smallest tile, one that divides nothing, and all tokens
            found = _compared(streamed_divergence, mine, yours, divergence, chunk, pair.vocabulary)
            if (gap := max(map(_gap, found, expected))) > _ROUNDING or gap != gap:
                raise ValueError(
                    f"`{name}` with {chunk or 'all'} tokens at a time differs from its reference by {gap:.2g} of "
                    "the largest value."
                )
        said.append(f"{name} {expected[0].mean():.4g}")
    return f"As in float64, with any `loss_chunk_tokens`: {', '.join(said)} nats."


def same_in_parts(pair: Pair) -> str:
    """The gradient of three rows is the sum of each row's alone, without padding."""
    model, found = pair.student.model, []
    mine, yours = pair.read_by("student"), pair.read_by("teacher")
    for parts in ([[0, 1, 2]], [[0], [1], [2]]):
        model.zero_grad()
        for rows in parts:
            student = _lazy(pair, "student", mine.select(rows).cut(), trained=True)
            teacher = _lazy(pair, "teacher", yours.select(rows).cut())
            value_N = streamed_divergence(student, teacher, _DIVERGENCES["forward_kl"], vocabulary=pair.vocabulary)
            value_N.divergence.sum().backward()
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
    values, firsts = [], []
    for enabled in (False, True):
        with torch.autocast(pair.device.type, torch.bfloat16, enabled=enabled):
            mine, yours = _lazy(pair, "student"), _lazy(pair, "teacher")
            found = streamed_divergence(mine, yours, _DIVERGENCES["forward_kl"], vocabulary=pair.vocabulary)
            firsts.append((mine.hidden.float() @ mine.head.weight.float().T).argmax(-1))
        values.append(float(found.divergence.mean()))
    alike = float((firsts[0] == firsts[1]).float().mean())
    said = f"{values[0]:.4g} nats in float32, {values[1]:.4g} in bfloat16; the same likeliest token at {alike:.0%}."
    if not abs(values[1] - values[0]) <= 0.1 * abs(values[0]) + 1e-3:
        raise Doubt(f"{said} Train in float32, or compare a short run in both.")
    return said


def _lazy(pair: Pair, role: str, rollout: Rollout | None = None, trained: bool = False) -> LazyLogits:
    """The logits of a model after the rows that it reads; with a gradient for its weights if `trained`."""
    probed, rollout = pair.probed[role], rollout or pair.read_by(role)
    head = OutputHead.of(probed.model)
    with torch.set_grad_enabled(trained):
        hidden_NH = completion_hidden(probed.model, rollout, probed.reading)[rollout.counts]
    if not trained:
        bias = None if head.bias is None else head.bias.detach()
        head = replace(head, weight=head.weight.detach(), bias=bias)
    return LazyLogits(hidden_NH, head)


def _compared(
    function: Callable[..., PerToken],
    mine: LazyLogits,
    yours: LazyLogits,
    divergence: Divergence,
    chunk: int | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[N] and [N, H], a divergence and its gradient with respect to the student's states."""
    student = replace(mine, hidden=mine.hidden.clone().requires_grad_())
    value_N = function(student, yours, divergence, chunk_tokens=chunk, vocabulary=vocabulary).divergence
    value_N.sum().backward()
    assert student.hidden.grad is not None
    return value_N.detach(), student.hidden.grad


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=_NOTHING))


TOKENS = 16
"""Maximum tokens of a completion."""
_TIE = 0.02
"""Nats by which a generated token may be less likely than the likeliest: other kernels round differently."""


def reproduces(pair: Pair, rollout: RolloutBackend | None = None, **options: Any) -> str:
    """Generates the likeliest token at each place, and checks that the student agrees; `options` are a training's."""
    tokenizer, (asked, _) = pair.student.tokenizer, pair.texts
    with TemporaryDirectory() as folder:
        config = OPSDConfig(
            output_dir=folder, max_completion_length=TOKENS, top_k=1, report_to="none", bf16=False, max_steps=1,
            per_device_train_batch_size=len(asked), use_cpu=pair.device.type == "cpu", **options,
        )  # fmt: skip
        trainer = _Noting(
            model=pair.student.model,
            teacher_model=pair.teacher.model,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(asked)}),
            processing_class=tokenizer,
            rollout=rollout,
        )
        try:
            with trainer.rollout.session():
                answered = trainer.rollout.complete([*asked], 0)
        finally:
            trainer.rollout.close()
    gap = max(_shortfall(pair, *row) for row in zip(asked, answered, strict=True))
    if not gap < _TIE:  # not `>=`: NaN has to fail, too
        raise ValueError(
            f"{trainer.rollout} has written a token that is {gap:.3g} nats less likely than the likeliest one by the "
            "student's own logits, although it was to write the likeliest: it has other weights than the student, or "
            "computes something else."
        )
    said = f"{sum(map(len, answered))} tokens, each the student's likeliest ({max(gap, 0.0):.1g} nats short at most)"
    told = trainer.noted.get("rollout/logprob_gap")
    return f"{said}." if told is None else f"{said}; its log-probabilities are the student's, {told:.1g} nats apart."


class _Noting(OPSDTrainer):
    """Keeps the last value of each recorded number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.noted: dict[str, float] = {}
        super().__init__(*args, **kwargs)

    def record(self, name: str, value: float) -> None:
        self.noted[name] = float(value)
        super().record(name, value)


@torch.no_grad()
def _shortfall(pair: Pair, prompt: list[int], completion: list[int]) -> float:
    """The largest gap, in nats, between a token of a completion and the likeliest one in its place."""
    if not completion:
        return 0.0
    # Log-probabilities by a forward pass over prompt and completion, not by the cache of a decoding loop.
    model, row = pair.student.model, Rollout.of([prompt], [completion], pair.device)
    log_CV = logits_of(completion_hidden(model, row)[0], OutputHead.of(model)).log_softmax(-1)
    return float((log_CV.amax(-1) - log_CV.gather(-1, row.completion_ids[0, :, None]).squeeze(-1)).max())
