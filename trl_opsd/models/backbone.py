"""Runs a causal language model up to its last hidden state, perhaps compiled, and reads its output head.

B rows · P prompt tokens · C completion tokens · L tokens of a row · V vocabulary size · H hidden size
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from types import MethodType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split_model, whole_numel, whole_shape
from trl_opsd.models.grouping import fewest_groups
from trl_opsd.models.padding import PADDED, BatchPolicy
from trl_opsd.types import Length, OutputHead, Rollout
from trl_opsd.types.rollout import RowImages

Run: TypeAlias = Callable[..., Any]
"""`run(function, *args)` equals `function(model, *args)`, also where the weights are sharded or offloaded."""


BLOCK_TOKENS = 1024
"""Tokens of packed rows in a pass where attention compares all of them with each other; a longer row has its own."""


def has_varlen(model: CausalLM) -> bool:
    """Whether attention skips pairs of tokens of different packed rows, as FlashAttention and FlexAttention do."""
    return model.config.get_text_config()._attn_implementation not in ("eager", "sdpa")


def together(
    images: Sequence[RowImages | None] | None, starts: Sequence[int], columns: int, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Arguments of a forward pass over rows that begin at these of its columns; empty without images.

    Those of floating point, the pixels, are joined on the device: from pinned memory nothing waits.
    """
    seen = [one for one in images or () if one is not None]
    found = {name: _joined([one.values[name] for one in seen], device) for name in (seen[0].values if seen else ())}
    for name in seen[0].kinds if seen else ():
        kinds_BL = torch.zeros(len(starts), columns, dtype=torch.long)
        for row, (one, start) in enumerate(zip(images or (), starts, strict=True)):
            if one is not None:
                kinds_BL[row, start : start + len(one.kinds[name])] = one.kinds[name]
        found[name] = kinds_BL
    return found


def _joined(values: Sequence[Tensor], device: torch.device | None) -> Tensor:
    """Concatenated along the first dimension; the others are padded with zeros to the largest."""
    widest = [max(sizes) for sizes in zip(*(one.shape[1:] for one in values), strict=True)]
    place = device if values[0].is_floating_point() else None
    joined = values[0].new_zeros(sum(map(len, values)), *widest, device=place)
    start = 0
    for one in values:
        joined[(slice(start, start + len(one)), *map(slice, one.shape[1:]))].copy_(one, non_blocking=True)
        start += len(one)
    return joined


def call(model: CausalLM, function: Run, *args: Any) -> Any:
    """`function(model, *args)`; with the model bound, it is a [`Run`]."""
    return function(model, *args)


def completion_hidden(model: CausalLM, rollout: Rollout, policy: BatchPolicy = PADDED) -> Tensor:
    """The last hidden state at the position that predicts each completion token, [B, C, H], undefined at padding.

    Equals `model(...).hidden_states[-1][:, P - 1 : -1]` with every token at the position it would have without padding.
    `policy` says which rows may share a forward pass, as [`~models.probes.find_batching`] determined.
    """
    if rollout.begins_at is not None:
        return _hidden_of_part(model, rollout, rollout.begins_at)
    # The padding between prompt and completion, and before shorter prompts, is left out: a pass is as wide as its
    # longest row or, packed, as long as its rows together.
    lengths = rollout.measured()
    if policy.padded_up_to == math.inf and not policy.packed:
        return padded_hidden(model, rollout, lengths, policy)
    check_no_holes(lengths)
    totals, is_split = [one.total for one in lengths], is_split_model(model)
    if policy.packed:
        within = math.inf if is_split or has_varlen(model) else BLOCK_TOKENS
        if sum(totals) <= within:
            return _completion_hidden_packed(model, rollout, lengths)
        groups, read = fewest_groups(totals, lambda tokens, _: tokens <= within, packed=True), _completion_hidden_packed
    else:
        groups = policy.groups(totals, is_split)
        read = partial(padded_hidden, policy=replace(policy, multiple_of=1))
    parts = [read(model, rollout.select(rows), [lengths[row] for row in rows]) for rows in groups]
    # Rows come back in their original order.
    order = torch.tensor([row for rows in groups for row in rows], device=parts[0].device)
    return torch.cat(parts)[order.argsort()]


def _hidden_of_part(model: CausalLM, rollout: Rollout, begins_at: int) -> Tensor:
    """[B, C, H] of a part of each row, with positions counted in the whole row."""
    ids_BC = rollout.input_ids[:, :-1]
    places_C = begins_at + torch.arange(ids_BC.size(1), device=ids_BC.device)
    if (limit := context_of(model)) is not None:
        places_C = places_C.clamp(max=limit - 1)  # padding may lie beyond it
    return hidden_states(model, ids_BC, None, places_C.expand_as(ids_BC))


def check_no_holes(lengths: Sequence[Length]) -> None:
    """Refuses masked tokens between others, where rows are computed without a mask."""
    if any(one.masked for one in lengths):
        raise ValueError(
            "A completion has masked tokens between others, which a model that runs without padding cannot skip: leave "
            "`completion_mask` unchanged and set their weights to 0, in `weigh`."
        )


def padded_hidden(
    model: CausalLM, rollout: Rollout, lengths: Sequence[Length], policy: BatchPolicy, past: Any = None, before: int = 0
) -> Tensor:
    """[B, C, H], from rows shifted to the first column and padded at the end.

    With the `past` of their first tokens, `before` in number, only the others are computed.
    """
    places = _Places(rollout, lengths)
    starts_B1, totals_B1 = places.starts_B.unsqueeze(1) + before, places.totals_B.unsqueeze(1) - before
    width = -(-(max(places.totals) - before) // policy.multiple_of) * policy.multiple_of
    columns_W = torch.arange(width, device=starts_B1.device)
    mask_BL, ids_BL = rollout.attention_mask, rollout.input_ids
    index_BW = (starts_B1 + columns_W).clamp(max=mask_BL.size(1) - 1)
    ids_BW = ids_BL.gather(1, index_BW)
    needs_mask = policy.needs_mask or policy.dummy_image_prompt is not None or rollout.images is not None
    # Positions beyond the context, of rows that are padded to a multiple, would have to be those of the last token.
    needs_mask |= any(one.masked for one in lengths) or width > (context_of(model) or width)
    mask_BW = mask_BL.gather(1, index_BW) * (columns_W < totals_B1) if needs_mask else None
    if before:
        whole_mask = None if mask_BW is None else pad(mask_BW, (before, 0), value=1)
        places_BW = before + columns_W.minimum(totals_B1 - 1)  # padding may lie beyond the context
        hidden_BWH = hidden_states(model, ids_BW, whole_mask, places_BW, past=past)
        return _at(hidden_BWH, places.predicting_BC - before)
    if rollout.images is None and policy.dummy_image_prompt is None:
        return _at(hidden_states(model, ids_BW, mask_BW), places.predicting_BC)
    images: Sequence[RowImages | None] = rollout.images or [None] * len(lengths)
    if policy.dummy_image_prompt is not None and mask_BW is not None and all(one is None for one in images):
        ids_BW, mask_BW = (
            torch.cat([pad(each, (0, max(0, row.numel() - width))), pad(row, (0, max(0, width - row.numel())))[None]])
            for each, row in (
                (ids_BW, ids_BW.new_tensor(policy.dummy_image_prompt)),
                (mask_BW, mask_BW.new_ones(len(policy.dummy_image_prompt))),
            )
        )
        images = [*images, policy.dummy_image_prompt.images]
    arguments = together(images, [0] * len(images), ids_BW.size(1), ids_BW.device)
    axes_3BW = None
    if arguments and not any(one.masked for one in lengths):
        totals = [*places.totals, *(len(policy.dummy_image_prompt or ()) for _ in ids_BW[len(lengths) :])]
        axes_3BW = of_three_axes(backbone_of(model), arguments, totals, ids_BW)
    hidden_BWH = hidden_states(model, ids_BW, mask_BW, axes_3BW, images=arguments)
    if len(hidden_BWH) > len(lengths):
        # Its gradient is zero, but there is one: reducing gradients is collective, too.
        hidden_BWH = hidden_BWH[:-1] + 0 * hidden_BWH[-1].sum()
    return _at(hidden_BWH, places.predicting_BC)


def _at(hidden_BWH: Tensor, places_BC: Tensor) -> Tensor:
    """[B, C, H], the states at these columns; of one outside, that of the nearest."""
    places_BC1 = places_BC.clamp(0, hidden_BWH.size(1) - 1).to(hidden_BWH.device)[..., None]
    return hidden_BWH.gather(1, places_BC1.expand(-1, -1, hidden_BWH.size(-1)))


def _completion_hidden_packed(model: CausalLM, rollout: Rollout, lengths: Sequence[Length]) -> Tensor:
    """[B, C, H], from all rows as one sequence of N tokens, in which positions restart at 0 with each row."""
    places = _Places(rollout, lengths)
    tokens = sum(places.totals)
    row_N = places.rows_B.repeat_interleave(places.totals_B, output_size=tokens)
    begins_B = places.totals_B.cumsum(0) - places.totals_B
    positions_N = torch.arange(tokens, device=row_N.device) - begins_B[row_N]
    ids_N = rollout.input_ids[row_N, places.starts_B[row_N] + positions_N]
    hidden_NH = hidden_states(model, ids_N[None], None, positions_N[None])[0]
    predicting_BC = (begins_B.unsqueeze(1) + places.predicting_BC).clamp(0, tokens - 1)
    return hidden_NH[predicting_BC.to(hidden_NH.device)]


class _Places:
    """Column indices of the tokens of B rows, on their device, from lengths in host memory: nothing waits."""

    def __init__(self, rollout: Rollout, lengths: Sequence[Length]) -> None:
        device, (_, columns) = rollout.prompt_ids.device, rollout.prompt_ids.shape
        self.totals = [one.total for one in lengths]
        numbers_B4 = [(row, columns - one.prompt, self.totals[row], one.prompt) for row, one in enumerate(lengths)]
        self.rows_B, self.starts_B, self.totals_B, prompts_B = (
            torch.tensor(numbers_B4).to(device, non_blocking=True).unbind(1)
        )
        places_C = torch.arange(rollout.completion_ids.size(1), device=device)
        self.predicting_BC = prompts_B.unsqueeze(1) - 1 + places_C
        """Index of the token that predicts each completion token, counted from the first real token of its row."""


def context_of(model: CausalLM) -> int | None:
    """The context length of a model in tokens, or `None` where its config has no limit."""
    # A multimodal model's limits are those of its language model.
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def backbone_of(model: CausalLM) -> Any:
    """The module of a causal language model, bare or wrapped by `peft`, that computes hidden states."""
    causal_lm = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    backbone = causal_lm.base_model
    # The text part of a multimodal model has that model's `base_model_prefix`, so `base_model` misses it (Llama 4).
    return getattr(causal_lm, "model", causal_lm) if backbone is causal_lm else backbone


def positions(mask_BL: Tensor) -> Tensor:
    """The position of each token without the padding around its row, [B, L], numbered as `generate` does."""
    # A masked token between others keeps its position, as it does where a model numbers positions itself.
    seen_BL = (mask_BL != 0).long().cumsum(-1)
    before_B1 = (seen_BL == 0).sum(-1, keepdim=True)
    after_B1 = (seen_BL == seen_BL[:, -1:]).sum(-1, keepdim=True) - 1  # the last real token is not after itself
    places_BL = torch.arange(mask_BL.size(1), device=mask_BL.device) - before_B1
    last_B1 = mask_BL.size(1) - 1 - after_B1 - before_B1
    return places_BL.minimum(last_B1).clamp(min=0)


def of_three_axes(backbone: Any, images: Mapping[str, Tensor], totals: Sequence[int], ids_BL: Tensor) -> Tensor | None:
    """[3, B, L], on the device: positions of rows with images from the first column on, without waiting for the device.

    By the model's own method, from what is in host memory; `None` where it has none, or one that reads token ids.
    """
    method = getattr(backbone, "get_rope_index", None)
    taken = {} if method is None else inspect.signature(method).parameters
    if method is None or "mm_token_type_ids" not in images.keys() & taken.keys():
        return None
    given = {name: one for name, one in images.items() if name in taken}
    mask_BL = torch.arange(ids_BL.size(1)) < torch.tensor(totals).unsqueeze(1)
    places_3BL: Tensor = method(torch.zeros_like(mask_BL, dtype=torch.long), attention_mask=mask_BL.long(), **given)[0]
    return places_3BL.to(ids_BL.device, non_blocking=True)


def seen(images: Mapping[str, Tensor], taken: Collection[str], device: torch.device) -> dict[str, Tensor]:
    """What a model takes of the arguments of its images, on its device."""
    return {name: value.to(device, non_blocking=True) for name, value in images.items() if name in taken}


def hidden_states(
    model: CausalLM,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor | None,
    position_ids_BL: Tensor | None = None,
    images: Mapping[str, Tensor] | None = None,
    past: Any = None,
) -> Tensor:
    """The last hidden state, [B, L, H], of right- or left-padded rows, of packed rows with positions and no mask, or of
    rows from the first column on with neither. Positions are [B, L], or [3, B, L] of three axes. `past` is a cache of
    what comes before; a mask covers it, too.
    """
    backbone = backbone_of(model)
    inputs: dict[str, Any] = {"input_ids": input_ids_BL, "use_cache": past is not None}
    if past is not None:
        inputs["past_key_values"] = past
    given = dict(images or {})
    if attention_mask_BL is not None:
        inputs["attention_mask"] = attention_mask_BL
        # By default a model counts padding too, which shifts learned positions. Those of three axes are its own.
        if position_ids_BL is None and not (images and hasattr(backbone, "get_rope_index")):
            position_ids_BL = positions(attention_mask_BL)
    if position_ids_BL is not None:
        given["position_ids"] = position_ids_BL
    if given:  # to look at what a model takes is slow
        inputs |= seen(given, inspect.signature(backbone.forward).parameters, input_ids_BL.device)
    output = backbone(**inputs)
    if getattr(output, "last_hidden_state", None) is None:
        raise ValueError(
            f"The {type(backbone).__name__} inside the {type(model).__name__} returns a {type(output).__name__} "
            "without `last_hidden_state`, which the loss needs: use a causal language model that returns it, or report "
            "the unsupported architecture."
        )
    hidden_BLH: Tensor = output.last_hidden_state
    return hidden_BLH


@contextmanager
def preserved_mode(model: nn.Module) -> Iterator[None]:
    """Restores the mode on exit, also after an exception: dropout and where TRL logs metrics depend on it."""
    was_training = model.training
    try:
        yield
    finally:
        if model.training != was_training:
            model.train(was_training)


def shape_of(head: OutputHead) -> tuple[int, int]:
    """V and H, also where ZeRO-3 has sharded the weight."""
    rows, width = whole_shape(head.weight)
    return rows, width


def model_shape(model: CausalLM) -> tuple[int, int]:
    """V and H of a model's head."""
    return shape_of(OutputHead.of(model))


def logits_of(hidden_BLH: Tensor, head: OutputHead) -> Tensor:
    """[..., V], float32: the logits of hidden states [..., H]."""
    logits_BLV = nn.functional.linear(hidden_BLH.to(head.weight.dtype), head.weight, head.bias).float() * head.scale
    return logits_BLV if head.softcap is None else head.softcap * torch.tanh(logits_BLV / head.softcap)


# ---- Layers ---------------------------------------------------------------------------------------------------------


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module and of those inside it, each once."""
    return distinct(chain(module.parameters(), module.buffers()))


def layer_list(model: nn.Module) -> nn.ModuleList:
    """The `ModuleList` with the most numbers, which is that of the decoder layers; empty if there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=numbers_in, default=nn.ModuleList())  # if lists tie, the first is the outer one


def numbers_in(module: nn.Module) -> int:
    """Elements of all parameters and buffers inside a module, unsharded."""
    return sum(map(whole_numel, tensors_of(module)))


def distinct(things: Iterable[Any]) -> list[Any]:
    """Each object once, in their order."""
    return list({id(thing): thing for thing in things}.values())


_VERSIONS = 64
"""Compiled versions of one layer's code that torch keeps before it computes eagerly: students and teachers of a family
share it, and each has one for a single row and one for several."""


@contextmanager
def compiled(backend: str, mode: str | None, models: Iterable[nn.Module]) -> Iterator[None]:
    """Has the decoder layers of models compute compiled within it, by a backend and mode of `torch.compile`.

    Lengths are symbolic, so that those of another batch compile nothing again. Of a layer `forward` alone is compiled:
    its hooks, which may copy or gather weights, run as before. Layers that accelerate spreads over devices stay eager,
    as does a generation, in which each layer has a cache of its own.
    """
    with ExitStack() as stack, torch._dynamo.config.patch(recompile_limit=_VERSIONS):
        for layer in chain.from_iterable(map(_layers_of, models)):
            if "forward" not in vars(layer):
                forward = _compiled(type(layer).forward, backend, mode)
                layer.forward = MethodType(forward, layer)
                stack.callback(delattr, layer, "forward")
        yield


def _layers_of(model: nn.Module) -> list[nn.Module]:
    if model not in _layers:
        _layers[model] = distinct(layer_list(model))
    return _layers[model]


_layers: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


@cache
def _compiled(forward: Callable[..., Any], backend: str, mode: str | None) -> Callable[..., Any]:
    return torch.compile(forward, dynamic=True, backend=backend, mode=mode)
