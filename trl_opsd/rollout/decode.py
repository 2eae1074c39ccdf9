"""Decodes a ragged batch token by token, and removes a row from the batch once it has ended.

`generate` of `transformers` prepares everything (logits processors, stopping criteria, cache) and hands over at its
`custom_generate` hook; only the loop is ours. It knows token ids, and neither the trainer nor how the model is sharded.

B rows at the start · n rows in the batch now · P prompt tokens, padded · L = P + tokens so far · V logits
Q query heads · K key heads, each of G = Q / K query heads · D head size
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DynamicCache,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StaticCache,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.versions import CACHE
from trl_opsd.errors import NonFiniteError

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
    collective: bool
    """Whether forwards are collective; finished processes keep calling the model."""
    context: int | None = None
    """Number of positions of the model, where that is limited."""
    kept: dict[str, Any] = field(default_factory=dict)
    """The static cache of compiled steps, kept from one call to the next: a CUDA graph is recorded for its address."""
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
    ) -> list[list[int]]:
        """Decodes until every row has ended, here and in all other processes.

        Called by `generate`, with what it has prepared; `input_ids` are [B, P], left-padded. Returns the completion of
        each row, its end token included. Compiled, all rows stay until the last has ended: one graph serves all steps.
        """
        compiled = model._valid_auto_compile_criteria(model_kwargs, generation_config)
        forward = model.get_compiled_call(generation_config.compile_config) if compiled else model
        if compiled:
            model_kwargs[CACHE] = self._static_cache(model, len(input_ids), generation_config)
        # transformers 5.10 would reuse the static cache it made for this batch in the next.
        vars(model).pop("_cache", None)
        keys_and_values: Any = model_kwargs[CACHE]
        keys_and_values.__class__ = _of_one_dtype(keys_and_values.__class__)
        # The limit on the length of the padded batch is replaced by `max_new_tokens`.
        criteria = StoppingCriteriaList(one for one in stopping_criteria if not isinstance(one, MaxLengthCriteria))
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        ids_BL, device, prompt_tokens = input_ids, input_ids.device, input_ids.size(1)
        rows, completions = list(range(len(ids_BL))), [list[int]() for _ in ids_BL]
        rows_n, unfinished = torch.arange(len(rows), device=device), {*rows}  # the rows in the batch, as a tensor too
        with model._optimize_model_for_decode():
            while model._has_unfinished_sequences(not unfinished, self.collective, device=device):
                if not unfinished:  # other processes still generate, and need this one in their collectives
                    model(input_ids=ids_BL[:1, -1:], use_cache=False)
                    continue
                if outputs is None:
                    inputs = model.prepare_inputs_for_generation(ids_BL[rows_n], next_sequence_length=1, **model_kwargs)
                    with keys_read_once():
                        outputs = forward(**inputs, return_dict=True)
                model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
                if compiled and self.context is not None and "position_ids" in model_kwargs:
                    # A finished row must not run past the table of positions.
                    model_kwargs["position_ids"].clamp_(max=self.context - 1)
                # A copy: the logits of a whole prompt must not stay, and a CUDA graph writes over its own outputs.
                logits_nV = outputs.logits[:, -1].to(device=device, dtype=torch.float32, copy=True)
                outputs = None
                scores_nV = _processed(logits_processor, ids_BL, rows_n, logits_nV)
                if generation_config.do_sample:
                    scores_nV = scores_nV.softmax(-1).div_(_exponential_noise(scores_nV, rows, rows_n, len(ids_BL)))
                best = scores_nV.max(-1)

                # Rows that have left are padded. Criteria may keep state by row: they get all.
                pad_B = rows_n.new_full((len(ids_BL),), generation_config.pad_token_id or 0)
                ids_BL = torch.cat([ids_BL, pad_B.index_copy_(0, rows_n, best.indices)[:, None]], dim=-1)
                # One transfer from the device for each step.
                stops, broken = torch.stack([criteria(ids_BL, None)[rows_n], best.values.isnan()]).tolist()
                tokens = ids_BL.size(1) - prompt_tokens
                for row, stop, is_broken in zip(rows, stops, broken, strict=True):
                    if row not in unfinished:
                        continue
                    if is_broken:
                        raise NonFiniteError(
                            f"The logits of {self.generator} for token {tokens} of row {row} are NaN: its weights are "
                            "NaN, or overflow in the precision of generation; resume from an earlier checkpoint, lower "
                            "the learning rate, or generate in bfloat16 or float32."
                        )
                    if stop or tokens >= self.max_new_tokens[row]:
                        completions[row] = ids_BL[row, prompt_tokens:][: max(self.max_new_tokens[row], 0)].tolist()
                        unfinished.remove(row)
                if unfinished and len(unfinished) < len(rows) and not compiled:
                    places_n = torch.tensor([rows.index(row) for row in sorted(unfinished)], device=device)
                    _keep(model_kwargs, places_n, len(rows))
                    rows, rows_n = sorted(unfinished), rows_n[places_n]
        return completions

    def _static_cache(self, model: CausalLM, rows: int, generation_config: Any) -> Any:
        """An empty static cache; the one of an earlier call where it has as many rows, and is long enough."""
        tokens = max(generation_config.max_length, generation_config.max_cache_len or 0)
        made_for = (model, rows, model.dtype, model.device)
        if self.kept.get("made_for") != made_for or self.kept["tokens"] < tokens:
            self.kept.clear()  # before the new one takes its memory
            cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=tokens)
            self.kept.update(made_for=made_for, tokens=tokens, cache=cache)
        self.kept["cache"].reset()
        return self.kept["cache"]


def _exponential_noise(scores_nV: Tensor, rows: list[int], rows_n: Tensor, every: int) -> Tensor:
    """[n, V], exponential noise; argmax(p / noise) samples p.

    `torch.multinomial` does the same, but it synchronises with the device, and draws for the rows it is given only.
    """
    if len(rows) == every or scores_nV.device.type != "cpu":
        noise_BV = scores_nV.new_empty(every, scores_nV.size(-1)).exponential_()
        return noise_BV if len(rows) == every else noise_BV[rows_n]
    # On a CPU one thread draws one number after the other, for 48 ns each. The draws of rows that have left are
    # skipped for 6 ns: a float64 advances the generator as far as an exponential does, without a logarithm.
    noise_nV, unused_V = torch.ones_like(scores_nV), torch.empty(scores_nV.size(-1), dtype=torch.float64)
    noise_of = dict(zip(rows, noise_nV, strict=True))
    for row in range(every):
        if row in noise_of:
            noise_of[row].exponential_()
        else:
            unused_V.uniform_()
    return noise_nV


def _keep(model_kwargs: dict[str, Any], places_n: Tensor, rows: int) -> None:
    """Removes the other rows from what the model is given."""
    for name, value in model_kwargs.items():
        # [n, L], or [.., n, L] where positions have several axes; others are images, read with the prompt.
        if isinstance(value, Tensor) and value.ndim > 1 and value.size(-2) == rows:
            model_kwargs[name] = value.index_select(-2, places_n.to(value.device))
    model_kwargs[CACHE].reorder_cache(places_n)


# ---- Keys and values -------------------------------------------------------------------------------------------------


@cache
def _of_one_dtype(kind: Any) -> Any:
    """A kind of cache that converts keys to the dtype of the values.

    Under autocast keys come out of a rotation in float32, and values out of a product in half precision. A static cache
    takes only one dtype; another would take twice the memory, and all of it would be cast again for each token.
    """
    if hasattr(kind, "takes_one_dtype"):
        return kind

    class OfOneDtype(kind):
        takes_one_dtype = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return kind.update(self, key_states.to(value_states.dtype), value_states, *args, **kwargs)

    return OfOneDtype


@contextmanager
def keys_read_once() -> Iterator[None]:
    """In the body, SDPA reads each key once in a decode step, where `transformers` copies the cache G times.

    It does so wherever there is a mask: for prompts of unequal length, and with a static cache.
    """
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:  # a user's own
        yield
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attended
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # what is registered from now on counts


def _attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """[B, 1, Q, D]: attention as that of `transformers`, in one call for a token under a mask."""
    (rows, heads, tokens, _), groups = query.shape, getattr(module, "num_key_value_groups", 1)
    if attention_mask is None or tokens > 1 or groups == 1 or attention_mask.size(1) > 1 or "position_bias" in more:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    # With one token there is no order among queries, so the G heads of a key can be its queries.
    query_BKGD = query.view(rows, heads // groups, groups, -1)
    out_BKGD = functional.scaled_dot_product_attention(
        query_BKGD,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=more.get("dropout", 0.0),
        scale=more.get("scaling"),
    )
    return out_BKGD.reshape(rows, 1, heads, -1), None
