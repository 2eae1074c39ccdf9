"""Samples a few values of every weight of a model, to detect later whether the model has changed."""

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
"""Maximum number of values sampled from one weight."""

Samples: TypeAlias = dict[str, Tensor]
"""Tensors of at most `VALUES` elements in host memory, by the weight's name in a checkpoint of the base model."""


def sampled(model: CausalLM) -> Samples:
    """Samples each weight of a model without its adapters; every process gets the main process's values. Collective."""
    # A weight on the meta device yields no values.
    samples = {name: sample(parameter) for name, parameter in base_parameters(model).items()}
    # With accelerate's `fsdp_cpu_ram_efficient_loading` only the main process has loaded the checkpoint.
    of_the_main_process: list[Samples] = broadcast_object_list([samples])
    return of_the_main_process[0]


def digest(samples: Samples) -> str:
    """A short hash of the values, rounded to bfloat16 so that the dtype they were loaded in does not matter."""
    summed = sha256()
    for name, values in sorted(samples.items()):
        rounded = values.bfloat16() if values.is_floating_point() else values
        summed.update(f"{name} {rounded.numel()} ".encode())
        summed.update(rounded.view(torch.uint8).numpy().tobytes())
    return f"sha256 {summed.hexdigest()[:16]}"


def first_change(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> str | None:
    """The name of the first weight that has changed, or `None`; a cast by the launcher does not count as a change."""
    return next((name for name, values in before.items() if name not in now or _differ(values, now[name])), None)


def _differ(before: Tensor, now: Tensor) -> bool:
    def same(one: Tensor, other: Tensor) -> bool:
        # Compared in the coarser dtype: a launcher may cast weights either way.
        return torch.equal(one.nan_to_num(), other.to(one.dtype).nan_to_num())

    # Integers are quantised weights, which bitsandbytes reorders on first use on a CPU: they cannot be compared.
    if not (before.is_floating_point() and now.is_floating_point()):
        return False
    return not (same(before, now) or same(now, before))


def sample(parameter: Tensor) -> Tensor:
    """At most `VALUES` values of a weight, in host memory; none if it is on the meta device. Collective if sharded."""
    if parameter.is_meta:
        return torch.empty(0)
    values = whole(parameter)
    if hasattr(values, "qdata"):  # torchao tensors cannot be flattened
        values = values.dequantize()
    flat = values.flatten()
    # Spread by a multiplicative hash: with even steps, all values could come from one column.
    places = torch.arange(min(VALUES, flat.numel()), device=flat.device) * 2654435761 % max(flat.numel(), 1)
    return flat[places].cpu()
