"""Checks that an engine generates what the student expects, token by token, in a trainer as a training builds it."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset

from trl_opsd.cli.doctor.pair import Pair
from trl_opsd.config import OPSDConfig
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.models.head import logits_of
from trl_opsd.rollout import RolloutBackend
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import OutputHead, Rollout

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
