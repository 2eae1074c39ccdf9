"""Measures in evaluations how far the student is from its teacher as both would be served: at temperature 1, greedily.

N tokens
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.losses import ForwardKL, streamed_divergence
from trl_opsd.losses.streamed import streamed_greedy
from trl_opsd.methods.base import Method
from trl_opsd.metrics import Logs, Metric
from trl_opsd.types import LazyLogits

_LOGS = Logs(
    "mean over the tokens in the loss of an evaluation, of all processes", "the method `certificate`", trained=False
)


@final
class Certificate(Method, TrainerCallback):
    """Has evaluations measure KL(teacher‖student) and the share of tokens with the same likeliest token: before the
    first step, which is what quantising alone costs, and after the last, too.
    """

    by_token = needs_whole = True
    whole_rows = False
    metrics: ClassVar = {
        "certificate/kl": Metric("nats", "KL(teacher‖student) per token at temperature 1.", _LOGS),
        "certificate/agreement": Metric("1", "Share of tokens where both models have the same likeliest one.", _LOGS),
    }

    _begins: bool = False
    """Whether the next evaluation is the one before the first step."""

    def read(self, student: LazyLogits, teacher: LazyLogits, weights: Tensor) -> None:
        counts = weights != 0  # each token alike, whatever counts alike in the loss
        if not (total := int(counts.sum())):
            return
        student, teacher = replace(student, temperature=1.0), replace(teacher, temperature=1.0)
        args, vocabulary = self.host.args, self.host.current_objective.vocabulary
        how = {"chunk_tokens": args.loss_chunk_tokens, "vocabulary": vocabulary}
        with torch.no_grad():
            kl_N = streamed_divergence(student, teacher, ForwardKL(), **how).divergence
        same_N = streamed_greedy(student, **how) == streamed_greedy(teacher, **how)
        self.host.record("certificate/kl", float(kl_N[counts].mean()), total)
        self.host.record("certificate/agreement", float(same_N[counts].float().mean()), total)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # transformers reads it once all callbacks have been called, that of the summary too.
        self._begins = state.global_step == 0 and not args.eval_on_start and self.host.eval_dataset is not None
        args.eval_on_start |= self._begins

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        args.eval_on_start &= not self._begins
        self._begins = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # With "epoch" it follows at the end of the last one.
        is_last = state.global_step >= state.max_steps and args.eval_strategy != "epoch"
        control.should_evaluate |= is_last and self.host.eval_dataset is not None
