"""Verifies a weight sync: engine and student must agree on the log-probabilities of tokens that the engine generated.

L probe tokens · T generated tokens · V vocabulary
"""

from __future__ import annotations

import inspect
from itertools import chain, cycle, islice
from typing import Any, TypeAlias

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from trl_opsd._compat.peft import without_peft
from trl_opsd.errors import SyncError
from trl_opsd.models.backbone import preserved_mode, seen, together
from trl_opsd.parallel.precision import autocast
from trl_opsd.rollout.base import Engine
from trl_opsd.rollout.host import Host
from trl_opsd.types.rollout import PromptIds, images_of

Scores: TypeAlias = tuple[Tensor, Tensor]
"""The engine's log-probabilities: of a whole row without its first token, and of the end of the second row."""

WRITTEN = 16
"""Tokens the engine generates after the probe."""

PROMPTED = 64
"""Minimum of tokens in the probe, so that an average over them is meaningful."""

# Healthy medians in bfloat16 are 2e-3 to 8e-3; as a share of the largest logit they would vary tenfold.
RELATIVE = {torch.float32: 1e-4, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
"""Tolerance for the median difference of log-probabilities between two implementations, as a share of the logits' root
mean square."""

AVERAGE = 3
"""Tolerance for the average difference, as a multiple of the median's. The largest difference says little: where a
model is confident, one rounding step can be nats."""


class SyncProof:
    """Compares engine and student on the prompts of the first rollout and on what the engine generates. Collective.

    The probe is text, because on arbitrary ids rounding alone changes log-probabilities by nats; before there are
    prompts, the engine generates it. It is sent twice: scored, which an engine can only do without its prefix cache,
    and with the cache, which has a block of it. `dtype` is that of both, or the less precise; with `sees`, the text
    after an image is compared, too.
    """

    def __init__(self, trainer: Host, engine: Engine, dtype: torch.dtype, sees: bool = False) -> None:
        self._trainer, self._engine, self._dtype, self._sees = trainer, engine, dtype, sees
        # A shorter probe than a block never uses the prefix cache, and a stale one would go unnoticed.
        self._length = max(engine.block_size + 2, PROMPTED)
        if trainer.limits.context is not None:
            self._length = max(1, min(self._length, trainer.limits.context - WRITTEN - 1))
        self._probe_ids: list[int] | None = None

    def take_prompts(self, prompt_ids: list[list[int]]) -> None:
        """Builds the probe from the main process's first prompts, concatenated until it is long enough.

        Collective until there is a probe.
        """
        if self._probe_ids is None:
            placeholders = set(self._trainer.placeholders)
            text = [one for one in chain.from_iterable(prompt_ids) if one not in placeholders]
            text = list(islice(cycle(text), self._length))
            (text,) = broadcast_object_list([text])
            self._probe_ids = text or None

    def check(self) -> float:
        """The largest log-probability difference in nats over all processes; an error if rounding cannot explain it."""
        ids_RL, scores = self._engine_scores()
        own_RL, scale = self._student(ids_RL)
        gaps = [self._gap(scores, own_RL, scale), *([self._gap_after_image()] if self._sees else [])]
        # Of text, and after an image; unlike Python's `max`, torch's keeps NaN.
        worst_G2 = self._trainer.accelerator.gather(torch.tensor([gaps], device=ids_RL.device)).amax(0)
        largest, excess = worst_G2.amax(0).tolist()
        if not excess <= 1:  # not `> 1`: NaN has to fail, too
            where = (
                "text" if not worst_G2[0, 1] <= 1 else "text after an image, not in other text: see its vision tower"
            )
            raise SyncError(
                f"After a weight sync {self._engine.name} and the student disagree by {excess:.3g} times what "
                f"rounding in {str(self._dtype).removeprefix('torch.')} explains, in {where}. Weights may not have "
                "arrived (of an adapter, a tied head, or by names that the engine does not know), its prefix cache may "
                "be of earlier ones, or it computes in a lower precision."
            )
        return float(largest)

    def _gap_after_image(self) -> tuple[float, float]:
        """The difference in the text after an image, as states of the image itself were never trained to predict."""
        prompt = self._trainer.probe_prompts()[0]
        ids_RL, (scored, cached) = self._engine_scores(prompt)
        own_RL, scale = self._student(ids_RL, prompt)
        after = 1 + max(place for place, one in enumerate(prompt) if one in self._trainer.placeholders)
        return self._gap((scored[after:], cached), own_RL[:, after:], scale)

    def _engine_scores(self, prompt: PromptIds | None = None) -> tuple[Tensor, Scores]:
        """The token ids of both rows, [2, L + T], and the engine's log-probabilities."""
        probe = prompt or self._probe_ids or [0]
        length = WRITTEN if prompt or self._probe_ids else self._length
        sampled = {"max_tokens": length, "ignore_eos": True, "seed": 0, "logprobs": 0}
        rows = self._engine.write([probe] * 2, [{**sampled, "prompt_logprobs": 0}, {**sampled, "seed": 1}])
        found = [(row.prompt_ids == probe, len(row.completion_ids), len(row.logprobs)) for row in rows]
        if found != [(True, length, length)] * 2 or len(rows[0].prompt_logprobs) != len(probe) - 1:
            raise SyncError(
                f"{self._engine.name} did not return {length} tokens after a prompt of {len(probe)} with the "
                "log-probabilities of all: `write` must honour the options of `Engine.write`."
            )
        ids_RL = torch.tensor([row.prompt_ids + row.completion_ids for row in rows])
        scored = torch.tensor(rows[0].prompt_logprobs + rows[0].logprobs)
        return ids_RL.to(self._trainer.accelerator.device), (scored, torch.tensor(rows[1].logprobs))

    def _student(self, ids_RL: Tensor, prompt: PromptIds | None = None) -> tuple[Tensor, float]:
        """The student's log-probabilities of all tokens but the first, [2, L + T - 1], and the RMS of its logits."""
        trainer = self._trainer
        images = together(images_of([prompt] * len(ids_RL)), [0] * len(ids_RL), ids_RL.size(1))

        def logits(student: Any) -> Tensor:
            given = seen(images, inspect.signature(without_peft(student).forward).parameters, ids_RL.device)
            found = student(input_ids=ids_RL, attention_mask=torch.ones_like(ids_RL), use_cache=False, **given)
            logits_RLV: Tensor = found.logits[:, :-1]
            return logits_RLV

        # Layer by layer where it is sharded: no process holds the whole student.
        with preserved_mode(trainer.model), torch.no_grad(), autocast(trainer.accelerator):
            trainer.model.eval()
            logits_RLV = trainer.in_student(logits).float()
        chosen_RL = logits_RLV.gather(-1, ids_RL[:, 1:, None])[..., 0] - logits_RLV.logsumexp(-1)
        return chosen_RL.cpu(), float(torch.linalg.vector_norm(logits_RLV)) / logits_RLV.numel() ** 0.5

    def _gap(self, scores: Scores, own_RL: Tensor, scale: float) -> tuple[float, float]:
        """The largest difference in nats, and the difference relative to what rounding explains."""
        scored, cached = scores
        rows = [(scored - own_RL[0]).abs(), (cached - own_RL[1, -cached.numel() :]).abs()]
        # The median separates rounding from faults; the largest difference does not, in bfloat16.
        excess = torch.stack([one for row in rows for one in (row.mean() / AVERAGE, row.median())]).max()
        return float(torch.cat(rows).max()), float(excess) / (RELATIVE[self._dtype] * max(scale, 1e-6))
