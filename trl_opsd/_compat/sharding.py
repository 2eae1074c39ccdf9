"""Reads and writes what ZeRO-3 or FSDP2 has split over the processes; whatever one process calls here, all have to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from trl_opsd._compat.deepspeed import empty_twin, gathered


def is_split_model(model: nn.Module) -> bool:
    """Whether only the wrapper's own forward brings the weights of this model."""
    return isinstance(model, FSDPModule) or in_zero3_model(model)


@contextmanager
def unsharded(layer: nn.Module) -> Iterator[None]:
    """A layer's parameters are whole for as long as the context lasts, if it is FSDP2 that has split them.

    FSDP2 brings them before the layer's forward. This is for a layer whose weight is used without calling it; the
    gradient that reaches the weight is reduced with those of all other layers.
    """
    if not (isinstance(layer, FSDPModule) and any(isinstance(one, DTensor) for one in layer.parameters())):
        yield
        return
    split: FSDPModule = layer
    split.unshard()
    try:
        yield
    finally:
        split.reshard()


def leave_outputs(plugin: Any) -> None:
    """Has FSDP2 return what a forward returns. accelerate has it cast to the dtype it computes in, the loss too.

    Args:
        plugin ([`~accelerate.FullyShardedDataParallelPlugin`]):
            Of the launch, before the student is wrapped.
    """
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def reshard(model: nn.Module) -> None:
    """Splits again what FSDP2 has left whole after a forward; does nothing to other models."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            group = getattr(state, "_fsdp_param_group", None)
            if group is not None and group.is_unsharded:
                # torch 2.10 still waits for another module of the group: the head, which a loss does not call.
                state._modules_to_run_forward.clear()
                group._to_sharded()


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters as the optimizer has them, by name: FSDP2 replaces them, and leaves some whole after a forward."""
    reshard(model)
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def plain_name(name: str) -> str:
    """The name of a module or parameter as a checkpoint has it, where accelerate recomputes activations under FSDP2."""
    return name.replace(_CHECKPOINT_PREFIX, "")


@torch.no_grad()
def whole(parameter: Tensor) -> Tensor:
    """The value of a parameter. Where nothing is split it is not copied."""
    if isinstance(parameter, DTensor):
        value: Tensor = parameter.full_tensor()
        return value
    if in_zero3(parameter):
        with gathered([parameter]):
            return parameter.detach().clone()
    return parameter.detach()


def whole_copy(model: Any) -> Any:
    """A copy of a model in every process; one that ZeRO-3 has split is gathered in host memory, tensor by tensor."""
    if not in_zero3_model(model):
        return deepcopy(model)
    copied = empty_twin(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        set_module_tensor_to_device(copied, name, "cpu", whole(tensor))
    copied.tie_weights()
    return copied


def local(tensor: Tensor) -> Tensor:
    """The share of this process, if FSDP2 has split the tensor; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Writes whole values, the same in every process, into the parameters of their names."""
    with gathered([parameters[name] for name in values if in_zero3(parameters[name])], written=True):
        for name, value in values.items():
            parameter = parameters[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.data.copy_(value)


def is_split(parameter: Tensor) -> bool:
    """Whether this process has a share of the parameter only."""
    return isinstance(parameter, DTensor) or in_zero3(parameter)


def in_zero3(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has split the tensor, so that it is empty but where it is gathered."""
    return hasattr(tensor, "ds_id")


def in_zero3_model(model: nn.Module) -> bool:
    """Whether ZeRO-3 has split the parameters, so that none can be used outside of the engine's own forward."""
    return any(map(in_zero3, model.parameters()))


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of a tensor where nothing is split."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def whole_numel(tensor: Tensor) -> int:
    """The number of elements of a tensor where nothing is split."""
    number: int = getattr(tensor, "ds_numel", tensor.numel())
    return number


@torch.no_grad()
def spread(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Gives every process the first one's values.

    Weights made at random may differ between processes until training begins, and with accelerate's
    `fsdp_cpu_ram_efficient_loading` only the first process has read any.
    """
    if not distributed.is_initialized():
        return
    for tensor in tensors.values():
        value = tensor.to(device)
        distributed.broadcast(value, src=0)
        tensor.copy_(value)
