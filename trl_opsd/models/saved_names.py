"""Says what a checkpoint holds of a weight, where transformers keeps it under another name or several in one."""

from __future__ import annotations

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from trl_opsd._compat.peft import CausalLM


def as_saved(model: CausalLM, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Names and values that `save_pretrained` writes for one weight: the experts of a layer one by one, for example.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            As it was loaded, which decides what its checkpoint looks like.
        name (`str`):
            Of the weight, in the model.
        tensor (`torch.Tensor`):
            Its value, whole; or without one, on the device `meta`.
    """
    if getattr(model, "_weight_conversions", None) == []:  # loaded as it was saved: what follows would take a while
        return [(name, tensor)]
    return list(revert_weight_conversion(model, {name: tensor}).items())
