"""Takes a few values of every weight of a model, to tell later whether it is still the same; never a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import TypeAlias

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from trl_opsd._compat.peft import CausalLM, base_parameters
from trl_opsd._compat.sharding import whole

VALUES = 64
"""Values of one weight."""

Samples: TypeAlias = dict[str, Tensor]
"""[at most VALUES] in host memory, by the name of the weight in a checkpoint of the base model."""


def sampled(model: CausalLM) -> Samples:
    """Values of each weight of a model without its adapters, as the main process has them. Collective.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Its weights may be split over the processes; one on the meta device has no values.
    """
    samples = {name: _values(parameter) for name, parameter in base_parameters(model).items()}
    # With accelerate's `fsdp_cpu_ram_efficient_loading` only the main process has read a checkpoint.
    of_the_main_process: list[Samples] = broadcast_object_list([samples])
    return of_the_main_process[0]


def digest(samples: Samples) -> str:
    """A short text, the same for weights that are equal when rounded to bfloat16, whatever they were loaded as."""
    summed = sha256()
    for name, values in sorted(samples.items()):
        rounded = values.bfloat16() if values.is_floating_point() else values
        summed.update(f"{name} {rounded.numel()} ".encode())
        summed.update(rounded.view(torch.uint8).numpy().tobytes())
    return f"sha256 {summed.hexdigest()[:16]}"


def first_change(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> str | None:
    """The first weight that is not what it was, or `None`; being cast by a launcher is no change."""
    return next((name for name, values in before.items() if name not in now or _differ(values, now[name])), None)


def _differ(before: Tensor, now: Tensor) -> bool:
    def same(one: Tensor, other: Tensor) -> bool:
        return torch.equal(one.nan_to_num(), other.to(one.dtype).nan_to_num())

    # Integers are quantised, and bitsandbytes stores the same ones in another order once they are used on a CPU.
    if not (before.is_floating_point() and now.is_floating_point()):
        return False
    return not (same(before, now) or same(now, before))


def _values(parameter: Tensor) -> Tensor:
    if parameter.is_meta:
        return torch.empty(0)
    values = whole(parameter)
    if hasattr(values, "qdata"):  # torchao's, which cannot be flattened
        values = values.dequantize()
    flat = values.flatten()
    # Spread by a multiplicative hash: with even steps, all of them could come out of one column.
    places = torch.arange(min(VALUES, flat.numel()), device=flat.device) * 2654435761 % max(flat.numel(), 1)
    return flat[places].cpu()
