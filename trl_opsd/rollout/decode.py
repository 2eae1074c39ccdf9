"""Decodes a ragged batch token by token, and removes a row from the batch once it has ended.

`generate` of `transformers` prepares everything (logits processors, stopping criteria, cache) and hands over at its
`custom_generate` hook; only the loop is ours. It knows token ids, and neither the trainer nor how the model is sharded.

B rows at the start · n places in the batch now · P prompt tokens, padded · L = P + tokens so far · V logits
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.versions import CACHE
from trl_opsd.errors import NonFiniteError
from trl_opsd.rollout import every_row
from trl_opsd.rollout.generate import other_generate
from trl_opsd.rollout.kept_caches import KeptCaches, with_one_dtype

_NEEDS_PLAIN_GENERATE = {
    "stop_strings": "needs a tokenizer",
    "token_healing": "needs a tokenizer",
    "guidance_scale": "reads every row a second time",
}
"""Options of `generate` that this loop does not support, and why."""

_OFF = (None, False, 0, 1.0)

_CACHES_WITHOUT_ROWS = ("offloaded", "offloaded_static", "quantized", "paged")


def obstacle(model: CausalLM, config: Any) -> str | None:
    """Why [`RaggedDecoding`] cannot replace the loop of `generate` with these options, or `None` where it can."""
    if reason := other_generate(model):
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
        return f"rows cannot leave a cache of `cache_implementation={config.cache_implementation!r}`"
    if config.use_cache is False:
        return "`use_cache=False` leaves no cache to decode from"
    bare = without_peft(model)
    if CACHE not in inspect.signature(bare.forward).parameters:
        return f"the forward pass of {type(bare).__name__} takes no `{CACHE}`"
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


@dataclass(frozen=True, kw_only=True)
class RaggedDecoding:
    """The decoding loop for `model.generate(custom_generate=...)`, greedy or sampled.

    Generates the tokens that the loop of `generate` generates, from the same random numbers, whichever rows have left:
    each step draws for all B rows, as `torch.multinomial` does there, and uses the draws of unfinished rows.
    """

    rooms: Sequence[int]
    """Maximum new tokens of each row. A row with 0 is part of the prefill and generates nothing."""
    context: int | None
    """Number of positions of the model, where that is limited."""
    collective: bool
    """Whether forwards are collective; finished processes keep calling the model."""
    caches: KeptCaches = field(default_factory=KeptCaches)
    """Static caches for compiled steps, kept from one call to the next so that graphs are recorded once."""
    lazily: bool = False
    """Whether `generate` returns after the prefill, with an iterator that yields rows as they end."""
    writer: str = "the student"
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
        # The limit on the length of the padded batch is replaced by `rooms`.
        criteria = StoppingCriteriaList(one for one in stopping_criteria if not isinstance(one, MaxLengthCriteria))
        compiled = model._valid_auto_compile_criteria(model_kwargs, generation_config)
        forward = model.get_compiled_call(generation_config.compile_config) if compiled else model
        batch = _Batch(input_ids, self.rooms, generation_config.pad_token_id or 0, model_kwargs, self.writer)
        # transformers 5.10 would reuse the static cache it made for this batch in the next.
        vars(model).pop("_cache", None)
        if compiled:
            tokens = max(generation_config.max_length, getattr(generation_config, "max_cache_len", None) or 0)
            model_kwargs[CACHE] = self.caches.start(model, tokens, batch.size)
        with_one_dtype(model_kwargs[CACHE])

        outputs = model._prefill(input_ids, generation_config, batch.model_kwargs)
        if compiled:
            self.caches.keep(batch.model_kwargs[CACHE], batch.size)
        ended = self._decoded(
            model, forward, batch, outputs, compiled, logits_processor, criteria, generation_config.do_sample
        )
        if self.lazily:
            return ended
        completions = dict(ended)
        return [completions[row] for row in range(len(self.rooms))]

    @torch.no_grad()
    def _decoded(
        self,
        model: CausalLM,
        forward: Any,
        batch: _Batch,
        outputs: Any,
        compiled: bool,
        logits_processor: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        do_sample: bool,
    ) -> Iterator[tuple[int, list[int]]]:
        device = batch.every.device
        with model._optimize_model_for_decode():
            while model._has_unfinished_sequences(not batch.writing, self.collective, device=device):
                if not batch.writing:  # other processes still generate, and need this one in their collectives
                    model(input_ids=batch.every[:1, -1:], use_cache=False)
                    continue
                if outputs is None:
                    inputs = model.prepare_inputs_for_generation(
                        batch.ids, next_sequence_length=1, **batch.model_kwargs
                    )
                    outputs = forward(**inputs, return_dict=True)
                batch.model_kwargs = model._update_model_kwargs_for_generation(outputs, batch.model_kwargs)
                # A copy: the logits of a whole prompt must not stay, and a CUDA graph writes over its own outputs.
                logits_nV = outputs.logits[:, -1].to(device=device, dtype=torch.float32, copy=True)
                outputs = None
                scores_nV = every_row.process(logits_processor, batch.every, batch.rows, logits_nV)
                ended = batch.write(*self._next_tokens(scores_nV, batch, do_sample), criteria)
                if batch.writing:
                    batch.shrink(self.caches if compiled else None)
                if compiled and self.context is not None and "position_ids" in batch.model_kwargs:
                    # A finished row that keeps its place must not run past the table of positions.
                    batch.model_kwargs["position_ids"].clamp_(max=self.context - 1)
                yield from ended

    def _next_tokens(self, scores_nV: Tensor, batch: _Batch, do_sample: bool) -> tuple[Tensor, Tensor]:
        """The next token of each place, and whether its logits hold NaN."""
        if not do_sample:
            best = scores_nV.max(-1)
            return best.indices, best.values.isnan()
        best = scores_nV.softmax(-1).div_(self._exponential_noise(scores_nV, batch)).max(-1)
        return best.indices, best.values.isnan()

    def _exponential_noise(self, scores_nV: Tensor, batch: _Batch) -> Tensor:
        """[n, V], exponential noise; argmax(p / noise) samples p.

        `torch.multinomial` does the same, but it synchronises with the device, and draws for the rows it is given only.
        """
        every, vocabulary = len(self.rooms), scores_nV.size(-1)
        if batch.size == every or scores_nV.device.type != "cpu":
            noise_BV = scores_nV.new_empty(every, vocabulary).exponential_()
            return noise_BV if batch.size == every else noise_BV[batch.rows]
        # On a CPU one thread draws one number after the other, for 48 ns each. The draws of rows that have left are
        # skipped for 6 ns: a float64 advances the generator as far as an exponential does, without a logarithm.
        noise_nV, unused_V = torch.ones_like(scores_nV), torch.empty(vocabulary, dtype=torch.float64)
        places = {row: place for place, row in batch.writing.items()}
        for row in range(every):
            if row in places:
                noise_nV[places[row]].exponential_()
            else:
                unused_V.uniform_()
        return noise_nV


class _Batch:
    """The unfinished rows, each at a place in the batch, and the ids of all rows."""

    def __init__(
        self, input_ids: Tensor, rooms: Sequence[int], pad: int, model_kwargs: dict[str, Any], writer: str
    ) -> None:
        self.every = input_ids
        """`[B, L]`, the ids of every row, padded since it left."""
        self.rows = torch.arange(len(rooms), device=input_ids.device)
        """`[n]`, the row that each place holds."""
        self.writing = dict(enumerate(range(len(rooms))))
        """The unfinished rows, by place."""
        self.model_kwargs = model_kwargs
        self._rooms = rooms
        self._pad = pad
        self._writer = writer
        self._prompt_tokens = input_ids.size(1)

    @property
    def size(self) -> int:
        """Places, n."""
        return len(self.rows)

    @property
    def ids(self) -> Tensor:
        """`[n, L]`, the ids of the rows that have a place."""
        return self.every if self.size == len(self.every) else self.every[self.rows]

    def write(self, tokens_n: Tensor, broken_n: Tensor, criteria: StoppingCriteriaList) -> list[tuple[int, list[int]]]:
        """Appends a token to each row; returns the rows that this ends, with their completions."""
        tokens_B = tokens_n.new_full((len(self.every),), self._pad).index_copy_(0, self.rows, tokens_n)
        self.every = torch.cat([self.every, tokens_B[:, None]], dim=-1)
        # One transfer from the device for each step.
        ended, broken = torch.stack([every_row.ended(criteria, self.every, self.rows), broken_n]).tolist()
        written, complete = self.every.size(1) - self._prompt_tokens, []
        for place, row in list(self.writing.items()):
            if broken[place]:
                raise NonFiniteError(
                    f"The logits of {self._writer} for token {written} of row {row} hold NaN: its weights hold NaN, or "
                    "overflow in the precision it generates in; go back to an earlier checkpoint, lower the learning "
                    "rate, or generate in bfloat16 or float32."
                )
            if ended[place] or written >= self._rooms[row]:
                room = max(self._rooms[row], 0)
                complete.append((row, self.every[row, self._prompt_tokens :][:room].tolist()))
                del self.writing[place]
        return complete

    def shrink(self, caches: KeptCaches | None) -> None:
        """Removes the places of finished rows: all of them, or, with `caches`, down to the next bucket size."""
        size = min(_bucket(len(self.writing)), self.size) if caches else len(self.writing)
        if size == self.size:
            return
        # Finished rows fill the bucket; the loop ignores what they generate.
        idle = [place for place in range(self.size) if place not in self.writing]
        kept = [*self.writing, *idle[: size - len(self.writing)]]
        self.writing = dict(enumerate(self.writing.values()))
        places = torch.tensor(kept, device=self.rows.device)
        self.rows = self.rows[places]
        for name, value in self.model_kwargs.items():
            if isinstance(value, Tensor):  # [n, L], or [.., n, L] where positions have several axes
                self.model_kwargs[name] = value.index_select(-2, places.to(value.device))
        cache = self.model_kwargs[CACHE]
        if caches:
            self.model_kwargs[CACHE] = caches.shrink(cache, places)
        else:
            cache.reorder_cache(places)


def _bucket(rows: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds `rows`: few graphs, and at most half of it idle."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power
