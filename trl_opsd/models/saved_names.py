"""Maps a weight in memory to its tensors in a checkpoint, where transformers renames or fuses them on loading."""

from __future__ import annotations

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from trl_opsd._compat.peft import CausalLM


def as_saved(model: CausalLM, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Names and values that `save_pretrained` writes for one weight, such as the experts of a layer one by one."""
    if getattr(model, "_weight_conversions", None) == []:  # saved under the same names; skips a slow conversion
        return [(name, tensor)]
    # The tensor is unsharded, or on the meta device where only the names are needed.
    return list(revert_weight_conversion(model, {name: tensor}).items())
