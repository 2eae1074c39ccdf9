"""Runs a causal language model up to its last hidden state; the output head is in `head.py`.

B rows · P prompt tokens · C completion tokens · L = P + C · V vocabulary size · H hidden size
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.sharding import is_split_model
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.types import Rollout

Run: TypeAlias = Callable[..., Any]
"""`run(function, *args)` equals `function(model, *args)`, wherever the model's weights are."""


def call(model: CausalLM, function: Run, *args: Any) -> Any:
    """`function(model, *args)`; with the model bound, it is a [`Run`]."""
    return function(model, *args)


def completion_hidden(model: CausalLM, rollout: Rollout, reading: Reading = PADDED) -> Tensor:
    """The last hidden state at the position that predicts each completion token.

    Equals `model(...).hidden_states[-1][:, P - 1 : -1]` with every token at the position it would have without padding.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A causal language model, not wrapped for distributed training.
        rollout ([`~types.Rollout`]):
            The rows to read.
        reading ([`~models.padding.Reading`], *optional*, defaults to `PADDED`):
            Which rows share a forward pass, as [`prove_padding`] determined.

    Returns:
        `torch.Tensor`: `[B, C, H]`; undefined at padding.
    """
    if rollout.begins_at is not None:
        return _hidden_of_part(model, rollout, rollout.begins_at)
    if reading == PADDED:
        hidden_BLH = hidden_states(model, rollout.input_ids, rollout.attention_mask)
        return hidden_BLH[:, rollout.prompt_ids.size(1) - 1 : -1]
    lengths = rollout.attention_mask.sum(-1).tolist()
    groups = reading.groups(lengths, is_split_model(model))
    read = [_completion_hidden_unpadded if _same_length(lengths, rows) else completion_hidden for rows in groups]
    check_no_holes(rollout)
    parts = [one(model, rollout.select(rows)) for one, rows in zip(read, groups, strict=True)]
    order = torch.tensor([row for rows in groups for row in rows], device=parts[0].device)
    return torch.cat(parts)[order.argsort()]


def _hidden_of_part(model: CausalLM, rollout: Rollout, begins_at: int) -> Tensor:
    """[B, C, H], of the first C tokens of a part, at their positions in the whole rows."""
    ids_BC = rollout.input_ids[:, :-1]
    places_C = begins_at + torch.arange(ids_BC.size(1), device=ids_BC.device)
    if (limit := context_of(model)) is not None:
        places_C = places_C.clamp(max=limit - 1)  # padding may lie beyond it
    return hidden_states(model, ids_BC, None, places_C.expand_as(ids_BC))


def check_no_holes(rollout: Rollout) -> None:
    """Rejects masked tokens between others, where rows are read without their padding."""
    rises = rollout.attention_mask[:, 1:].bool() & ~rollout.attention_mask[:, :-1].bool()
    first = rollout.attention_mask[:, :1].bool()
    if (torch.cat([first, rises], 1).sum(-1) > 1).any():
        raise ValueError(
            "A completion has masked tokens between others, which a model that reads rows without padding cannot leave "
            "out: keep `completion_mask` as it is and set their weights to 0, in `weigh` or with a `tool_mask`."
        )


def _same_length(lengths: list[int], rows: list[int]) -> bool:
    return len({lengths[row] for row in rows}) == 1


def _completion_hidden_unpadded(model: CausalLM, rollout: Rollout) -> Tensor:
    """[n, C, H], of n rows with the same number of tokens, prompt and completion together."""
    mask_nL = rollout.attention_mask
    ids_nL = rollout.input_ids[mask_nL != 0].view(len(mask_nL), -1)
    hidden_nLH = hidden_states(model, ids_nL, torch.ones_like(ids_nL))
    before_n1 = rollout.prompt_mask.sum(-1, keepdim=True) - 1
    places_nC = before_n1 + torch.arange(rollout.completion_ids.size(1), device=ids_nL.device)
    places_nC = places_nC.clamp(max=ids_nL.size(1) - 1).to(hidden_nLH.device)
    return hidden_nLH.gather(1, places_nC[..., None].expand(-1, -1, hidden_nLH.size(-1)))


def context_of(model: CausalLM) -> int | None:
    """The context length of a model in tokens, or `None` where its config has no limit."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def backbone_of(model: CausalLM) -> Any:
    """The module of a causal language model, bare or wrapped by `peft`, that computes hidden states."""
    causal_lm = without_peft(model)
    backbone = causal_lm.base_model
    # The text part of a multimodal model has that model's `base_model_prefix`, so `base_model` misses it (Llama 4).
    return getattr(causal_lm, "model", causal_lm) if backbone is causal_lm else backbone


def positions(mask_BL: Tensor) -> Tensor:
    """The position of each token without the padding around its row, [B, L], as `generate` numbers them.

    A masked token between others counts, as it does where a model numbers positions by itself.
    """
    seen_BL = (mask_BL != 0).long().cumsum(-1)
    before_B1 = (seen_BL == 0).sum(-1, keepdim=True)
    after_B1 = (seen_BL == seen_BL[:, -1:]).sum(-1, keepdim=True) - 1  # the last real token is not after itself
    places_BL = torch.arange(mask_BL.size(1), device=mask_BL.device) - before_B1
    last_B1 = mask_BL.size(1) - 1 - after_B1 - before_B1
    return places_BL.minimum(last_B1).clamp(min=0)


def hidden_states(
    model: CausalLM, input_ids_BL: Tensor, attention_mask_BL: Tensor | None, position_ids_BL: Tensor | None = None
) -> Tensor:
    """The last hidden state, [B, L, H], of right- or left-padded rows; positions are numbered as in `generate`.

    Without a mask there is no padding, and positions have to be given.

    Raises:
        ValueError: The backbone returns no `last_hidden_state`.
    """
    backbone = backbone_of(model)
    inputs: dict[str, Any] = {"input_ids": input_ids_BL, "attention_mask": attention_mask_BL, "use_cache": False}
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        # By default a model counts the padding too, which shifts learned positions.
        if position_ids_BL is None:
            assert attention_mask_BL is not None, "it tells the positions"
            position_ids_BL = positions(attention_mask_BL)
        inputs["position_ids"] = position_ids_BL
    output = backbone(**inputs)
    if getattr(output, "last_hidden_state", None) is None:
        raise ValueError(
            f"The {type(backbone).__name__} inside the {type(model).__name__} returns a {type(output).__name__} "
            "without `last_hidden_state`, which the loss reads: use a causal language model that returns it, or "
            "report the unsupported architecture."
        )
    hidden_BLH: Tensor = output.last_hidden_state
    return hidden_BLH
