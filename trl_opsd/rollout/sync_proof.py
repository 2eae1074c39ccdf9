"""Proves that an engine speaks for the student: both give the same log-probabilities to tokens the engine wrote.

L probe tokens · T written tokens · V vocabulary
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

WRITTEN = 8
"""Tokens the engine writes after the probe."""

RELATIVE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""By how much two implementations may differ in a log-probability, as a share of the largest logit."""


class SyncError(RuntimeError):
    """The engine does not write as the student does, although the student's weights were sent to it."""


class SyncProof:
    """Compares engine and student on a fixed prompt and on what the engine writes after it.

    The prompt goes in twice. Once the engine scores it, which it can only do without its prefix cache; once it may use
    the cache, and since the prompt is longer than a block of it, a stale cache shows.

    Args:
        trainer ([`OPSDTrainer`]):
            Gives the student and the processes.
        engine ([`~_compat.vllm.Engine`]):
            What has to write as the student does.
        dtype (`torch.dtype`):
            What both compute in.
        with_adapter (`bool`):
            Whether the student has adapters that the engine might lack.
    """

    def __init__(self, trainer: Any, engine: Any, dtype: torch.dtype, with_adapter: bool) -> None:
        self._trainer, self._engine, self._dtype, self._with_adapter = trainer, engine, dtype, with_adapter
        self._last_scores_L: Tensor | None = None
        length = engine.block_size + 2
        if trainer.limits.context is not None:
            length = min(length, trainer.limits.context - WRITTEN)
        # Spread over the vocabulary, and without drawing from the random state of training.
        self._probe_ids = [place * 7919 % trainer.limits.vocabulary for place in range(max(length, 1))]

    def check(self) -> float:
        """Compares both.

        Returns:
            `float`: the largest difference of log-probabilities over all processes, in nats.

        Raises:
            SyncError: It is larger than rounding explains. The message says what it looks like.
        """
        ids_RL, scores = self._asked()
        own_RL, largest = self._student(ids_RL)
        gap, tolerance = self._gap(scores, own_RL), self._tolerance(largest)
        worst = self._trainer.accelerator.gather(
            torch.tensor([gap, gap / tolerance], device=self._trainer.accelerator.device)
        ).view(-1, 2)
        if not worst[:, 1].max() <= 1:
            # Every process comes here: each asks equally often, as all are needed where the student is split.
            bare_RL = self._student(ids_RL, without_adapter=True)[0] if self._with_adapter else None
            raise SyncError(
                f"After a weight sync vLLM and the student disagree by {gap:.3g} nats on a log-probability; rounding "
                f"in {str(self._dtype).removeprefix('torch.')} explains {tolerance:.3g}. "
                f"{self._looks_like(scores, own_RL, bare_RL, largest)} No rollout was written with these weights. "
                "Set `use_vllm=False` to go on without vLLM."
            )
        self._last_scores_L = scores[0]
        return float(worst[:, 0].max())

    def observe(self) -> None:
        """Notes what the engine says before a first sync, so that one that changes nothing is told apart."""
        self._last_scores_L = self._asked()[1][0]

    def _asked(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The token ids [2, L + T] and the engine's log-probabilities: the whole first row, the end of the second."""
        sampled = {"max_tokens": WRITTEN, "ignore_eos": True, "seed": 0, "logprobs": 0}
        rows = self._engine.write([self._probe_ids] * 2, [{**sampled, "prompt_logprobs": 0}, {**sampled, "seed": 1}])
        ids_RL = torch.tensor([row.prompt_ids + row.completion_ids for row in rows])
        scored = torch.tensor(rows[0].prompt_logprobs + rows[0].logprobs)
        return ids_RL, (scored, torch.tensor(rows[1].logprobs))

    def _student(self, ids_RL: Tensor, without_adapter: bool = False) -> tuple[Tensor, float]:
        """The student's log-probabilities of all tokens but the first, [2, L + T - 1], and its largest logit."""
        trainer = self._trainer
        ids_RL = ids_RL.to(trainer.accelerator.device)
        with trainer.student_for_generation() as student, trainer.accelerator.autocast():
            off: AbstractContextManager[Any] = student.disable_adapter() if without_adapter else nullcontext()
            with off:
                logits_RLV = student(input_ids=ids_RL, attention_mask=torch.ones_like(ids_RL), use_cache=False).logits[
                    :, :-1
                ]
        logprobs_RLV = logits_RLV.float().log_softmax(-1)
        chosen_RL = logprobs_RLV.gather(-1, ids_RL[:, 1:, None])[..., 0]
        return chosen_RL.cpu(), float(logits_RLV.abs().max())

    def _gap(self, scores: tuple[Tensor, Tensor], own_RL: Tensor) -> float:
        scored, cached = scores
        return max(
            float((scored - own_RL[0]).abs().max()),
            float((cached - own_RL[1, -cached.numel() :]).abs().max()),
        )

    def _tolerance(self, largest: float) -> float:
        return RELATIVE[self._dtype] * max(largest, 1.0)

    def _looks_like(self, scores: tuple[Tensor, Tensor], own_RL: Tensor, bare_RL: Tensor | None, largest: float) -> str:
        """What the difference is like; `bare_RL` are the student's log-probabilities without its adapter."""
        gap, tolerance = self._gap(scores, own_RL), self._tolerance(largest)
        if bare_RL is not None and self._gap(scores, bare_RL) <= tolerance:
            return "It looks like a missing adapter: vLLM agrees with the student without its adapter."
        scored, _ = scores
        before = self._last_scores_L
        prompt = len(self._probe_ids) - 1
        if before is not None and float((scored[:prompt] - before[:prompt]).abs().max()) <= gap / 10:
            return (
                "It looks stale: what vLLM says has not changed since before the sync, so the weights did not arrive."
            )
        if float((scored - own_RL[0]).abs().max()) <= tolerance:
            return "It looks like a stale prefix cache: vLLM agrees with the student where it may not use its cache."
        if gap <= RELATIVE[torch.bfloat16] * max(largest, 1.0):
            return "It looks like a dtype: the difference is what a lower precision than the student's would give."
        if self._trainer.model.config.get_text_config().tie_word_embeddings:
            return (
                "It looks like a tied head: new weights arrived, but not all of them, and the student's head shares "
                "its weight with the embedding, which vLLM keeps a second time."
            )
        return "New weights arrived, but not all of them, or not under the names vLLM knows for this architecture."
