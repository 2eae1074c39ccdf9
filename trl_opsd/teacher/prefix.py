"""A prefix that all rows of a batch share: a static teacher reads it once, and keeps its keys and values for the next.

B rows · P tokens of the prefix · C completion tokens · H hidden size
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import reshard
from trl_opsd.models.backbone import Run, completion_hidden, hidden_states, padded_hidden, shape_of
from trl_opsd.models.padding import BatchPolicy, agree
from trl_opsd.models.probes import Probed
from trl_opsd.models.weights import cached_per_token, state_of
from trl_opsd.parallel.precision import least_precise
from trl_opsd.types import OutputHead, Rollout

logger = get_logger(__name__)

PASS_TOKENS = {"cpu": 128, "accelerator": 512, "costly": 4096}
"""Tokens of a pass below which fewer take as long; a costly one copies or gathers the weights."""
MASKED = 1.3
"""Time of a token after a prefix, relative to one without: SDPA needs a mask there. Computed for 2,048 tokens."""


class _Before(DynamicLayer):
    """The beginning of a layer, put before each row; a copy per row lives only while the layer computes."""

    def __init__(self, layer: Any, tokens: int) -> None:
        super().__init__()
        self.__dict__.update(vars(layer))
        self.keys, self.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        each = (self.keys, key_states), (self.values, value_states)
        keys, values = (torch.cat([one.expand(len(own), *one.shape[1:]), own], dim=-2) for one, own in each)
        return keys, values


class SharedPrefix:
    """The prefix of one static teacher, of at most `limit` bytes, dropped when frozen parameters change.

    `computed` and `saved` count tokens that were read, and that were not; `kept` are the ids of those whose keys and
    values are kept; `works` says whether the model can continue from these, `None` until `prove`.
    """

    def __init__(self, model: CausalLM, limit: float, device: torch.device, costly: bool = False) -> None:
        self.computed = self.saved = 0
        self.works: bool | None = None
        self._model, self._device = model, device
        self._pass_tokens = PASS_TOKENS["cpu" if device.type == "cpu" else "costly" if costly else "accelerator"]
        self._most = int(limit / max(cached_per_token(model.config) * model.dtype.itemsize, 1))
        self._state: Any = None
        self.kept: list[int] = []

    def prove(self, run: Run, policy: BatchPolicy) -> None:
        """Tries in four passes whether the model continues from keys and values; warns if not. Collective."""
        probed, step = Probed(self._model, "teacher", run), shape_of(OutputHead.of(self._model))[0] // 23
        ids, rounded = [step * number for number in range(1, 23)], least_precise(self._model)
        rows = Rollout.of([ids[:12]] * 2, [ids[12:18], ids[:9:-1]], self._device)

        def read() -> list[Tensor]:
            whole_BCH = run(completion_hidden, rows)
            past = [self.past(run, ids[:tokens]) for tokens in (5, 14, 11)][-1]  # read, extended, cropped
            after_BCH = run(padded_hidden, rows, rows.measured(), policy, past, 11)
            return [one_BCH[rows.counts].to(rounded) for one_BCH in (after_BCH, whole_BCH)]

        self.works = False
        with suppress(Exception):  # whatever a model raises
            self.works = policy.padded_up_to == math.inf and agree(*probed.evaluate(read))
        self.kept = []
        if not self.works:
            logger.warning(f"`teacher_prefix_cache_gb`: {probed} cannot continue from keys and values: no cache.")

    def choose(self, rollout: Rollout, policy: BatchPolicy) -> tuple[list[int], int]:
        """The tokens that these rows share and do not read, none where that would take longer; the passes of `past`."""
        if not self.works:
            return [], 0
        reshard(self._model)  # FSDP2 leaves some parameters gathered, whose values are others than those of a shard
        values, kind = state_of(one for one in self._model.parameters() if not one.requires_grad), self._device.type
        state = values, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if state != self._state:
            self._state, self.kept = state, []
        lengths, ids = rollout.measured(), rollout.prompt_lists()
        rows, total, shared = len(lengths), sum(one.total for one in lengths), 0
        if not (rollout.images or policy.dummy_image_prompt or any(one.masked for one in lengths)):
            # The last token of a prompt is read: its state predicts a token.
            shared = max(min(_in_common(*ids), *(len(one) - 1 for one in ids), self._most), 0)
        known = min(_in_common(ids[0], self.kept), shared)

        def cost(tokens: int) -> float:
            reading = max(tokens - known, self._pass_tokens) if tokens > known else 0
            return reading + (MASKED if tokens else 1) * (total - rows * tokens)

        tokens = min((0, known, shared), key=cost)
        unread = max(tokens - known, 0)
        self.computed += total - rows * tokens + unread
        self.saved += rows * tokens - unread
        return ids[0][:tokens], int(unread > 0)

    def past(self, run: Run, ids: list[int]) -> Cache:
        """What rows continue from; reads what is not kept."""
        if (known := _in_common(ids, self.kept)) < len(ids):
            if not known:
                self._cache = DynamicCache()  # without a config, layers with a window keep all tokens, too
            elif known < len(self.kept):
                self._cache.crop(known - len(self.kept))
            self.kept = []  # until the pass has ended
            ids_1P, places_1P = (torch.tensor([one]).to(self._device) for one in (ids[known:], range(known, len(ids))))
            run(hidden_states, ids_1P, None, places_1P, None, self._cache)
            self.kept = list(ids)
        return Cache(layers=[_Before(layer, len(ids)) for layer in self._cache.layers])


def _in_common(*rows: list[int]) -> int:
    """How many tokens all begin with, which the first and the last in order do."""
    first, last = min(rows), max(rows)
    return next((place for place, one in enumerate(first) if last[place] != one), len(first))
