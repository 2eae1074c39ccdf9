"""Calls a model's `generate`, that of `transformers` or another, and validates the result."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin

from trl_opsd._compat.peft import CausalLM


def other_generate(model: CausalLM) -> str | None:
    """Why a decoding loop cannot be passed to this model's `generate`, or `None` if it is that of `transformers`."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "generate" in vars(bare) or "generate" in vars(model):
        return f"the `generate` of this {type(bare).__name__} was replaced"
    if type(bare).generate is not GenerationMixin.generate:
        return f"{type(bare).__name__} has a `generate` of its own"
    return None


def generate(model: CausalLM, inputs: dict[str, Tensor], config: GenerationConfig, **extras: Any) -> Any:
    """Calls `model.generate` with `[B, P]` inputs; `extras` that this `generate` does not accept are omitted."""
    parameters = inspect.signature(model.generate).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if not takes_any and "generation_config" not in parameters:
        raise ValueError(
            f"`generate` of {type(model).__name__} takes {list(parameters)}, but no `generation_config`: neither "
            "length nor sampling can be set. Pass a model with `generate` of `transformers`, or set `use_vllm=True`."
        )
    taken = {name: value for name, value in extras.items() if takes_any or name in parameters}
    with _contiguous_before_head(model):
        return model.generate(**inputs, generation_config=config, **taken)


@contextmanager
def _contiguous_before_head(model: CausalLM) -> Iterator[None]:
    """Makes the states that reach the output head contiguous, without a change of their values.

    In a prefill they are a view, `hidden[:, -1:]`. Where the head needs no gradient, as below an adapter or after a
    cast, `torch.matmul` then copies it for each row, to multiply row by row (`bmm`).
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(_made_contiguous)
    try:
        yield
    finally:
        hook.remove()


def _made_contiguous(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # Through one dimension, because `contiguous` keeps the strides of a single row, which `matmul` looks at.
    return tuple(one.flatten().view(one.shape) if isinstance(one, Tensor) else one for one in inputs)


def completions_of(written: Any, prompt_ids: Tensor, max_new_tokens: int, name: str) -> list[list[int]]:
    """The completions in the result of a plain `generate`; anything but ids that begin with the prompts is an error."""
    ids = getattr(written, "sequences", written)
    rows, tokens = prompt_ids.shape
    asked = f"expected integers of shape [{rows}, {tokens} to {tokens + max_new_tokens}] that begin with the prompts"
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        got = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
    elif len(ids) != rows or not tokens <= ids.size(1) <= tokens + max_new_tokens:
        got = f"shape {list(ids.shape)}"
    elif not ids[:, :tokens].equal(prompt_ids.to(ids.device, ids.dtype)):
        got = "rows that do not begin with their prompts"
    else:
        return ids[:, tokens:].tolist()
    raise ValueError(
        f"`generate` of {name} returned {got}; {asked}. Pass a model with the `generate` of `transformers`, set "
        "`use_vllm=True`, or write a `RolloutBackend` around it."
    )
