"""Decodes a ragged batch token by token, and removes a row from the batch once it has ended.

`generate` of `transformers` prepares everything (logits processors, stopping criteria, cache) and hands over at its
`custom_generate` hook; only the loop is ours. It knows token ids, and neither the trainer nor how the model is sharded.

B rows at the start · n places in the batch now · P prompt tokens, padded · L = P + tokens so far · V logits
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.versions import CACHE
from trl_opsd.errors import NonFiniteError
from trl_opsd.rollout.grouped_heads import keys_read_once
from trl_opsd.rollout.static_caches import StaticCaches, with_one_dtype

_NEEDS_PLAIN_GENERATE = {
    "stop_strings": "needs a tokenizer",
    "token_healing": "needs a tokenizer",
    "guidance_scale": "runs every row a second time",
}
"""Options of `generate` that this loop does not support, and why."""
_OFF = (None, False, 0, 1.0)
_CACHES_WITHOUT_ROWS = ("offloaded", "offloaded_static", "quantized", "paged")


def custom_generate(model: CausalLM) -> str | None:
    """Why a decoding loop cannot be passed to this model's `generate`, or `None` if it is that of `transformers`."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "generate" in vars(bare) or "generate" in vars(model):
        return f"the `generate` of this {type(bare).__name__} was replaced"
    if type(bare).generate is not GenerationMixin.generate:
        return f"{type(bare).__name__} has a `generate` of its own"
    return None


def obstacle(model: CausalLM, config: Any) -> str | None:
    """Why [`RaggedDecoding`] cannot replace the loop of `generate` with these options, or `None` where it can."""
    if reason := custom_generate(model):
        return reason
    # What the model's own generation config adds counts too.
    config, _ = model._prepare_generation_config(config)
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        return f"decoding is {mode!r}"
    for option, reason in _NEEDS_PLAIN_GENERATE.items():
        if getattr(config, option, None) not in _OFF:
            return f"`{option}` {reason}"
    if config.cache_implementation in _CACHES_WITHOUT_ROWS:
        return f"rows cannot be removed from a cache of `cache_implementation={config.cache_implementation!r}`"
    if config.use_cache is False:
        return "`use_cache=False` disables the cache it decodes from"
    bare = without_peft(model)
    if CACHE not in inspect.signature(bare.forward).parameters:
        return f"the forward pass of {type(bare).__name__} does not accept `{CACHE}`"
    if not _has_common_cache(bare):
        return f"{type(bare).__name__} has its own type of cache"
    return None


def _has_common_cache(model: CausalLM) -> bool:
    """Whether `generate` gives the model a cache whose rows can be selected layer by layer."""
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    # A model may define cache layers with state that `transformers` cannot select by row.
    return all(type(layer).__module__ == DynamicCache.__module__ for layer in layers)


# ---- Logits processors, some of which keep state by the index of a row ----------------------------------------------


class KnownTokensOnly(LogitsProcessor):
    """Masks ids beyond the vocabulary, which heads padded to round sizes have, and placeholders for images."""

    def __init__(self, vocabulary: int, placeholders: Collection[int] = ()) -> None:
        self._vocabulary, self._placeholders = vocabulary, torch.tensor([*placeholders], dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self._vocabulary :].fill_(-torch.inf)
        self._placeholders = self._placeholders.to(scores.device)  # once: a copy waits for the device
        return scores.index_fill_(1, self._placeholders, -torch.inf)


_STATELESS = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    KnownTokensOnly,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}
"""Functions of one row of scores. Those that sort the vocabulary are expensive: skipping finished rows pays."""


def _processed(processors: LogitsProcessorList, ids_BL: Tensor, rows_n: Tensor, scores_nV: Tensor) -> Tensor:
    """Applies the processors to the scores of the remaining rows, which may be overwritten."""
    is_complete = len(rows_n) == len(ids_BL)
    for processor in processors:
        if is_complete:
            scores_nV = processor(ids_BL, scores_nV)
        elif type(processor) in _STATELESS:
            scores_nV = processor(ids_BL[rows_n], scores_nV)
        else:
            # Others may keep state by row (its prompt, its padding, the context of a watermark), and which do changes
            # between versions of `transformers`: they get every row where it was at the start.
            scores_BV = scores_nV.new_zeros(len(ids_BL), scores_nV.size(-1))
            scores_nV = processor(ids_BL, scores_BV.index_copy_(0, rows_n, scores_nV))[rows_n]
    return scores_nV


# ---- The loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RaggedDecoding:
    """The decoding loop for `model.generate(custom_generate=...)`, greedy or sampled.

    Generates the tokens that the loop of `generate` generates, from the same random numbers, whichever rows have left:
    each step draws for all B rows, as `torch.multinomial` does there, and uses the draws of unfinished rows.
    """

    max_new_tokens: Sequence[int]
    """Maximum new tokens of each row. A row with 0 is part of the prefill and generates nothing."""
    context: int | None
    """Number of positions of the model, where that is limited."""
    collective: bool
    """Whether forwards are collective; finished processes keep calling the model."""
    caches: StaticCaches = field(default_factory=StaticCaches)
    """Static caches for compiled steps, kept from one call to the next so that graphs are recorded once."""
    lazily: bool = False
    """Whether `generate` returns after the prefill, with an iterator that yields rows as they end."""
    generator: str = "the student"
    """Who generates, for messages."""

    def __call__(
        self,
        model: CausalLM,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> list[list[int]] | Iterator[tuple[int, list[int]]]:
        """Decodes until every row has ended, here and in all other processes.

        Called by `generate`, with what it has prepared; `input_ids` are [B, P], left-padded. Returns the completion of
        each row, its end token included, or `lazily` an iterator that decodes.
        """
        compiled = model._valid_auto_compile_criteria(model_kwargs, generation_config)
        batch = _Batch(
            input_ids,
            self.max_new_tokens,
            generation_config.pad_token_id or 0,
            model_kwargs,
            # The limit on the length of the padded batch is replaced by `max_new_tokens`.
            StoppingCriteriaList(one for one in stopping_criteria if not isinstance(one, MaxLengthCriteria)),
            self.caches if compiled else None,
            self.generator,
        )
        # transformers 5.10 would reuse the static cache it made for this batch in the next.
        vars(model).pop("_cache", None)
        if compiled:
            tokens = max(generation_config.max_length, getattr(generation_config, "max_cache_len", None) or 0)
            model_kwargs[CACHE] = self.caches.start(model, tokens, batch.size)
        with_one_dtype(model_kwargs[CACHE])

        outputs = model._prefill(input_ids, generation_config, batch.model_kwargs)
        if compiled:
            self.caches.keep(batch.model_kwargs[CACHE], batch.size)
        forward = model.get_compiled_call(generation_config.compile_config) if compiled else model
        ended = self._steps(model, forward, batch, outputs, logits_processor, generation_config.do_sample)
        if self.lazily:
            return ended
        completions = dict(ended)
        return [completions[row] for row in range(len(self.max_new_tokens))]

    @torch.no_grad()
    def _steps(
        self,
        model: CausalLM,
        forward: Any,
        batch: _Batch,
        outputs: Any,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
    ) -> Iterator[tuple[int, list[int]]]:
        device = batch.every.device
        with model._optimize_model_for_decode():
            while model._has_unfinished_sequences(not batch.unfinished, self.collective, device=device):
                if not batch.unfinished:  # other processes still generate, and need this one in their collectives
                    model(input_ids=batch.every[:1, -1:], use_cache=False)
                    continue
                if outputs is None:
                    inputs = model.prepare_inputs_for_generation(
                        batch.ids, next_sequence_length=1, **batch.model_kwargs
                    )
                    with keys_read_once():
                        outputs = forward(**inputs, return_dict=True)
                batch.model_kwargs = model._update_model_kwargs_for_generation(outputs, batch.model_kwargs)
                # A copy: the logits of a whole prompt must not stay, and a CUDA graph writes over its own outputs.
                logits_nV = outputs.logits[:, -1].to(device=device, dtype=torch.float32, copy=True)
                outputs = None
                scores_nV = _processed(logits_processor, batch.every, batch.rows, logits_nV)
                if do_sample:
                    scores_nV = scores_nV.softmax(-1).div_(self._exponential_noise(scores_nV, batch))
                best = scores_nV.max(-1)
                ended = batch.append(best.indices, best.values.isnan())
                batch.shrink(self.context)
                yield from ended

    def _exponential_noise(self, scores_nV: Tensor, batch: _Batch) -> Tensor:
        """[n, V], exponential noise; argmax(p / noise) samples p.

        `torch.multinomial` does the same, but it synchronises with the device, and draws for the rows it is given only.
        """
        every, vocabulary = len(self.max_new_tokens), scores_nV.size(-1)
        if batch.size == every or scores_nV.device.type != "cpu":
            noise_BV = scores_nV.new_empty(every, vocabulary).exponential_()
            return noise_BV if batch.size == every else noise_BV[batch.rows]
        # On a CPU one thread draws one number after the other, for 48 ns each. The draws of rows that have left are
        # skipped for 6 ns: a float64 advances the generator as far as an exponential does, without a logarithm.
        noise_nV, unused_V = torch.ones_like(scores_nV), torch.empty(vocabulary, dtype=torch.float64)
        places = {row: place for place, row in batch.unfinished.items()}
        for row in range(every):
            if row in places:
                noise_nV[places[row]].exponential_()
            else:
                unused_V.uniform_()
        return noise_nV


class _Batch:
    """The unfinished rows, each at a place in the batch, and the ids of all rows."""

    def __init__(
        self,
        input_ids: Tensor,
        max_new_tokens: Sequence[int],
        pad: int,
        model_kwargs: dict[str, Any],
        criteria: StoppingCriteriaList,
        caches: StaticCaches | None,
        generator: str,
    ) -> None:
        self.every = input_ids
        """`[B, L]`, the ids of every row, padded since it left."""
        self.rows = torch.arange(len(max_new_tokens), device=input_ids.device)
        """`[n]`, the row that each place holds."""
        self.unfinished = dict(enumerate(range(len(max_new_tokens))))
        """The unfinished rows, by place."""
        self.model_kwargs = model_kwargs
        self._max_new_tokens, self._pad, self._criteria, self._caches = max_new_tokens, pad, criteria, caches
        self._generator = generator
        self._prompt_tokens = input_ids.size(1)

    @property
    def size(self) -> int:
        """Places, n."""
        return len(self.rows)

    @property
    def ids(self) -> Tensor:
        """`[n, L]`, the ids of the rows that have a place."""
        return self.every if self.size == len(self.every) else self.every[self.rows]

    def append(self, tokens_n: Tensor, broken_n: Tensor) -> list[tuple[int, list[int]]]:
        """Appends a token to each row; returns the rows that this ends, with their completions."""
        tokens_B = tokens_n.new_full((len(self.every),), self._pad).index_copy_(0, self.rows, tokens_n)
        self.every = torch.cat([self.every, tokens_B[:, None]], dim=-1)
        # Criteria may keep state by row, too. One transfer from the device for each step.
        ended, broken = torch.stack([self._criteria(self.every, None)[self.rows], broken_n]).tolist()
        tokens, complete = self.every.size(1) - self._prompt_tokens, []
        for place, row in list(self.unfinished.items()):
            if broken[place]:
                raise NonFiniteError(
                    f"The logits of {self._generator} for token {tokens} of row {row} are NaN: its weights are NaN, or "
                    "overflow in the precision of generation; resume from an earlier checkpoint, lower the learning "
                    "rate, or generate in bfloat16 or float32."
                )
            if ended[place] or tokens >= self._max_new_tokens[row]:
                room = max(self._max_new_tokens[row], 0)
                complete.append((row, self.every[row, self._prompt_tokens :][:room].tolist()))
                del self.unfinished[place]
        return complete

    def shrink(self, context: int | None) -> None:
        """Removes the places of finished rows: all of them, or, compiled, down to the next bucket size."""
        if self.unfinished:
            left = len(self.unfinished)
            size = min(_bucket(left), self.size) if self._caches else left
            if size < self.size:
                self._select(size)
        if self._caches and context is not None and "position_ids" in self.model_kwargs:
            # A finished row that keeps its place must not run past the table of positions.
            self.model_kwargs["position_ids"].clamp_(max=context - 1)

    def _select(self, size: int) -> None:
        # Finished rows fill the bucket; the loop ignores what they generate.
        idle = [place for place in range(self.size) if place not in self.unfinished]
        kept = [*self.unfinished, *idle[: size - len(self.unfinished)]]
        self.unfinished = dict(enumerate(self.unfinished.values()))
        places = torch.tensor(kept, device=self.rows.device)
        rows, self.rows = self.size, self.rows[places]
        for name, value in self.model_kwargs.items():
            # [n, L], or [.., n, L] where positions have several axes; others are images, read with the prompt.
            if isinstance(value, Tensor) and value.ndim > 1 and value.size(-2) == rows:
                self.model_kwargs[name] = value.index_select(-2, places.to(value.device))
        cache = self.model_kwargs[CACHE]
        if self._caches:
            self.model_kwargs[CACHE] = self._caches.shrink(cache, places)
        else:
            cache.reorder_cache(places)


def _bucket(rows: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds `rows`: few graphs, and at most half of it idle."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power
