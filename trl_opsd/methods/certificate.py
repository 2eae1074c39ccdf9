"""Measures in evaluations how far the student is from its teacher as both would be served: at temperature 1, greedily.

N tokens
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, final

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.losses import ForwardKL, streamed_divergence
from trl_opsd.losses.streamed import streamed_greedy
from trl_opsd.methods.base import Method
from trl_opsd.monitor.metrics import Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import not_by_bytes
from trl_opsd.options.table import Need, Option, one_of
from trl_opsd.types import LazyLogits

_EVALUATED = Need("there is no `eval_dataset`", lambda now: now.eval_dataset is not None)
_LOGS = Logs("mean over the tokens in the loss of an evaluation, of all processes", "`certificate`", trained=False)


@with_help
@dataclass
class CertificateOptions:
    certificate: Annotated[bool | None, Option(one_of(None, True, False), (_EVALUATED,))] = None
    """Whether evaluations measure KL(teacher‖student) and the share of tokens with the same likeliest token, with an
    evaluation before the first step and one after the last. When `None`, only with `student_quantization` and an
    `eval_dataset`."""


@final
class Certificate(Method, TrainerCallback):
    """Evaluates before the first step, which is what quantising alone costs, and after the last."""

    rules = (not_by_bytes("certificate", True, "which has no tokens in common"),)
    metrics: ClassVar = {
        "certificate/kl": Metric("nats", "KL(teacher‖student) per token at temperature 1.", _LOGS),
        "certificate/agreement": Metric("1", "Share of tokens where both models have the same likeliest one.", _LOGS),
    }

    _begins: bool = False
    """Whether the next evaluation is the one before the first step."""

    @classmethod
    def of(cls, now: Any) -> Certificate | None:
        asked = now.args.certificate
        if asked is None:
            asked = now.args.student_quantization is not None and not now.args.cross_tokenizer
        return cls() if asked and now.eval_dataset is not None else None

    def read(self, student: LazyLogits, teacher: LazyLogits, weights: Tensor) -> None:
        counts = weights != 0  # each token alike, whatever `loss_aggregation`
        if not (total := int(counts.sum())) or not self.host.teachers.are_whole:
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
        self._begins = state.global_step == 0 and not args.eval_on_start
        args.eval_on_start |= self._begins

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        args.eval_on_start &= not self._begins
        self._begins = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # With "epoch" it follows at the end of the last one.
        control.should_evaluate |= state.global_step >= state.max_steps and args.eval_strategy != "epoch"
