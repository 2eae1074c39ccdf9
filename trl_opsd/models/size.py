"""Describes a model and its size in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from trl_opsd._compat.peft import CausalLM, is_peft, without_peft
from trl_opsd._compat.sharding import class_of, whole_numel


def described(model: CausalLM) -> str:
    """The class of a model, the path or id it was loaded from, and the size of its weights in each dtype."""
    from trl_opsd._compat.trl import get_config_model_id

    inner = without_peft(model)
    path = get_config_model_id(inner.config)
    adapter = " with an adapter" if is_peft(model) else ""
    kind = f"{class_of(inner).__name__}{f' {path!r}' if path else ''}{_quantised(inner)}{adapter}"
    return f"{kind}, {sizes(model.parameters())}"


def _quantised(model: CausalLM) -> str:
    given = getattr(model.config, "quantization_config", None) if getattr(model, "is_quantized", False) else None
    if given is None:
        return ""
    method = (given if isinstance(given, dict) else given.to_dict()).get("quant_method")
    return f" quantised with {getattr(method, 'value', method)}"


def sizes(parameters: Iterable[Tensor]) -> str:
    """The size of the full, unsharded weights in each dtype: `"1.98 GB in float32"`."""
    found: Counter[str] = Counter()
    for one in parameters:
        found[str(one.dtype).removeprefix("torch.")] += whole_numel(one) * one.element_size()
    return " and ".join(f"{_size(size)} in {dtype}" for dtype, size in found.most_common()) or "no weights"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
