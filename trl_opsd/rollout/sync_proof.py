"""Verifies a weight sync: engine and student must agree on the log-probabilities of tokens that the engine generated.

L probe tokens · T generated tokens · V vocabulary
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from trl_opsd._compat.peft import without_peft
from trl_opsd.errors import SyncError
from trl_opsd.models.backbone import preserved_mode, seen, together
from trl_opsd.parallel.precision import autocast
from trl_opsd.rollout.base import Engine
from trl_opsd.rollout.host import Host
from trl_opsd.types import Completion
from trl_opsd.types.rollout import PromptIds, images_of

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


@dataclass(frozen=True, slots=True)
class Gap:
    """Differences between the log-probabilities of engine and student."""

    largest: float
    """The largest over all tokens, in nats."""
    average: float
    """The average of the row where it is larger, in nats."""
    excess: float
    """The difference relative to what rounding explains: more than 1 is a fault."""


class SyncProof:
    """Compares engine and student on the prompts of the first rollout and on what the engine generates after them.

    All methods are collective.

    The probe is text, because on arbitrary ids rounding alone changes log-probabilities by nats. Before there are
    prompts, the engine generates the text itself. The probe is sent twice. The first time the engine also scores it,
    which it can only do without its prefix cache; the second time it may use the cache, and as the probe is longer than
    a block, a stale cache is detected. `dtype` is that of both, or the less precise; `with_adapter` enables a diagnosis
    of its own. With `sees`, it also compares a prompt with an image, by the text after the image.
    """

    def __init__(
        self, trainer: Host, engine: Engine, dtype: torch.dtype, with_adapter: bool, sees: bool = False
    ) -> None:
        self._trainer, self._engine, self._dtype, self._with_adapter = trainer, engine, dtype, with_adapter
        self._sees = sees
        self._last_scores_L: Tensor | None = None
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
            self._probe_ids, self._last_scores_L = text or None, None

    def check(self) -> float:
        """The largest log-probability difference in nats over all processes; an error if rounding cannot explain it."""
        ids_RL, scores = self._engine_scores()
        own_RL, scale = self._student(ids_RL)
        of_text = gap = self._gap(scores, own_RL, scale)
        if self._sees:
            pairs = zip(astuple(of_text), astuple(self._gap_after_image()), strict=True)
            gap = Gap(*(float(torch.tensor(pair).max()) for pair in pairs))  # unlike `max`, it keeps NaN
        worst = self._trainer.accelerator.gather(
            torch.tensor([gap.largest, gap.excess], device=self._trainer.accelerator.device)
        ).view(-1, 2)
        if not worst[:, 1].max() <= 1:  # not `> 1`: NaN has to fail, too
            # All processes get here together, as the forward of a sharded student is collective.
            bare_RL = self._student(ids_RL, without_adapter=True)[0] if self._with_adapter else None
            diagnosis = "Likely the vision tower: text agrees, images do not."
            if not of_text.excess <= 1 or gap.excess <= 1:
                diagnosis = self._diagnosis(scores, own_RL, bare_RL, scale)
            raise SyncError(
                f"After a weight sync {self._engine.name} and the student disagree by {gap.average:.3g} nats on the "
                f"average log-probability: {worst[:, 1].max():.3g} times what rounding in "
                f"{str(self._dtype).removeprefix('torch.')} explains. "
                f"{diagnosis} No rollout was generated with these weights. Set "
                "`use_vllm=False` and no `sglang_server_url` to continue without an engine."
            )
        self._last_scores_L = scores[0]
        return float(worst[:, 0].max())

    def record_scores(self) -> None:
        """Records the engine's log-probabilities before the first sync, to detect a sync that changes nothing."""
        self._last_scores_L = self._engine_scores()[1][0]

    def _gap_after_image(self) -> Gap:
        """The difference in the text after an image, as states of the image itself were never trained to predict."""
        prompt, limits = self._trainer.probe_prompts()[0], self._trainer.limits
        if limits.context is not None and len(prompt) + WRITTEN > limits.context:
            raise ValueError(
                f"The prompt with an image that verifies a weight sync needs {len(prompt) + WRITTEN} tokens, but the "
                f"context has {limits.context}: raise `vllm_max_model_length`, or set `vllm_sync_check='never'`."
            )
        ids_RL, (scored, cached) = self._engine_scores(prompt)
        own_RL, scale = self._student(ids_RL, prompt)
        after = 1 + max(place for place, one in enumerate(prompt) if one in self._trainer.placeholders)
        return self._gap((scored[after:], cached), own_RL[:, after:], scale)

    def _engine_scores(self, prompt: PromptIds | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The token ids [2, L + T] and the engine's log-probabilities: the whole first row, the end of the second."""
        probe = prompt or self._probe_ids or [0]
        length = WRITTEN if prompt or self._probe_ids else self._length
        sampled = {"max_tokens": length, "ignore_eos": True, "seed": 0, "logprobs": 0}
        rows = self._engine.write([probe] * 2, [{**sampled, "prompt_logprobs": 0}, {**sampled, "seed": 1}])
        _check_answer(self._engine.name, rows, probe, length)
        ids_RL = torch.tensor([row.prompt_ids + row.completion_ids for row in rows])
        scored = torch.tensor(rows[0].prompt_logprobs + rows[0].logprobs)
        return ids_RL, (scored, torch.tensor(rows[1].logprobs))

    def _student(
        self, ids_RL: Tensor, prompt: PromptIds | None = None, without_adapter: bool = False
    ) -> tuple[Tensor, float]:
        """The student's log-probabilities of all tokens but the first, [2, L + T - 1], and the RMS of its logits."""
        trainer = self._trainer
        ids_RL = ids_RL.to(trainer.accelerator.device)
        images = together(images_of([prompt] * len(ids_RL)), [0] * len(ids_RL), ids_RL.size(1))

        def logits(student: Any) -> Tensor:
            off: AbstractContextManager[Any] = student.disable_adapter() if without_adapter else nullcontext()
            given = seen(images, inspect.signature(without_peft(student).forward).parameters, ids_RL.device)
            with off:
                found: Tensor = student(
                    input_ids=ids_RL, attention_mask=torch.ones_like(ids_RL), use_cache=False, **given
                ).logits[:, :-1]
            return found

        # Layer by layer where it is sharded: no process holds the whole student.
        with preserved_mode(trainer.model), torch.no_grad(), autocast(trainer.accelerator):
            trainer.model.eval()
            logits_RLV = trainer.in_student(logits).float()
        chosen_RL = logits_RLV.gather(-1, ids_RL[:, 1:, None])[..., 0] - logits_RLV.logsumexp(-1)
        return chosen_RL.cpu(), float(torch.linalg.vector_norm(logits_RLV)) / logits_RLV.numel() ** 0.5

    def _gap(self, scores: tuple[Tensor, Tensor], own_RL: Tensor, scale: float, relative: float | None = None) -> Gap:
        scored, cached = scores
        rounding = (relative or RELATIVE[self._dtype]) * max(scale, 1e-6)
        rows = [(scored - own_RL[0]).abs(), (cached - own_RL[1, -cached.numel() :]).abs()]
        # The median separates rounding from faults; the largest difference does not, in bfloat16.
        averages = torch.stack([row.mean() for row in rows])
        medians = torch.stack([row.median() for row in rows])
        return Gap(
            largest=float(torch.cat(rows).max()),
            average=float(averages.max()),
            excess=float(torch.cat([averages / AVERAGE, medians]).max()) / rounding,
        )

    def _diagnosis(self, scores: tuple[Tensor, Tensor], own_RL: Tensor, bare_RL: Tensor | None, scale: float) -> str:
        """A likely cause; `bare_RL` are the student's log-probabilities without its adapter."""
        engine = self._engine.name
        if bare_RL is not None and self._gap(scores, bare_RL, scale).excess <= 1:
            return f"Likely a missing adapter: {engine} agrees with the student without its adapter."
        scored, cached = scores
        prompt = len(self._probe_ids or [0]) - 1
        if self._is_unchanged(scored[:prompt], self._gap(scores, own_RL, scale).largest):
            return (
                f"Likely stale weights: the log-probabilities of {engine} are the same as before the sync, so the "
                "weights did not arrive."
            )
        # What follows the prompt may be generated with the cached keys of the same prompt.
        uncached = torch.cat([scored[:prompt], own_RL[0, prompt:]])
        if self._gap((uncached, own_RL[1, -cached.numel() :]), own_RL, scale).excess <= 1:
            return f"Likely a stale prefix cache: {engine} agrees with the student when it cannot use its cache."
        if self._gap(scores, own_RL, scale, RELATIVE[torch.bfloat16]).excess <= 1:
            return "Likely a dtype: a lower precision than the student's would explain the difference."
        if self._trainer.model.config.get_text_config().tie_word_embeddings:
            return (
                "Likely a tied head: only some new weights arrived, and the student's head is tied to the embedding, "
                f"which {engine} stores twice."
            )
        return f"Only some new weights arrived, or their names do not match {engine}'s for this architecture."

    def _is_unchanged(self, scored_L: Tensor, gap: float) -> bool:
        """Whether the engine's log-probabilities of the probe are those from before the sync."""
        if self._last_scores_L is None or not len(scored_L):
            return False
        return float((scored_L - self._last_scores_L[: len(scored_L)]).abs().max()) <= gap / 10


def _check_answer(engine: str, rows: list[Completion], probe: list[int], length: int) -> None:
    """Rejects an answer that cannot be compared: a user's engine may lack what `Engine.write` requires."""
    found = [(row.prompt_ids, len(row.completion_ids), len(row.logprobs)) for row in rows]
    scored = len(rows[0].prompt_logprobs) if rows else 0
    if found != [(probe, length, length)] * 2 or scored != len(probe) - 1:
        lengths = [(len(prompt), written, logprobs) for prompt, written, logprobs in found]
        raise SyncError(
            f"{engine} returned for a probe of {len(probe)} tokens {lengths} (prompt tokens, generated tokens, their "
            f"log-probabilities) and {scored} log-probabilities of the prompt: expected "
            f"{[(len(probe), length, length)] * 2} and {len(probe) - 1}, of the same prompt. Its `write` must honour "
            "`max_tokens`, `ignore_eos`, `logprobs` and `prompt_logprobs`; `vllm_sync_check='never'` disables the "
            "check."
        )
