"""Reads and writes tensors that ZeRO-3 or FSDP2 has sharded. Functions that gather are collective."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType, patch_environment, set_module_tensor_to_device
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from trl_opsd._compat.deepspeed import empty_twin, gathered
from trl_opsd.types import OutputHead


def is_split_model(model: nn.Module) -> bool:
    """Whether the weights of this model are gathered only inside its wrapper's own forward."""
    return isinstance(model, FSDPModule) or in_zero3_model(model)


def splits_student(accelerator: Accelerator) -> bool:
    """Whether this launch shards the student, possibly only when a training begins."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    is_zero3 = plugin is not None and plugin.zero_stage == 3
    return is_zero3 or accelerator.distributed_type == DistributedType.FSDP


def class_of(model: nn.Module) -> type[nn.Module]:
    """The class of a model before FSDP2 replaced it by a subclass."""
    if isinstance(model, FSDPModule):
        return next(one for one in type(model).__bases__ if one is not FSDPModule)
    return type(model)


def gathered_head(*heads: OutputHead | None) -> AbstractContextManager[Any]:
    """Gathers heads that ZeRO-3 has sharded while the context is open; a no-op otherwise."""
    from trl_opsd._compat.trl import maybe_gather_lm_head_ctx

    parts = [part for head in heads if head is not None for part in (head.weight, head.bias)]
    context: AbstractContextManager[Any] = maybe_gather_lm_head_ctx(
        *(part for part in parts if part is not None and in_zero3(part))
    )
    return context


@contextmanager
def whole_head(model: Any) -> Iterator[OutputHead]:
    """The head of a model, gathered while the context is open if ZeRO-3 or FSDP2 has sharded it. Collective."""
    layer = model.get_output_embeddings()
    # FSDP2 gathers before the layer's own forward, but the head's weight is used without calling it. Its gradient is
    # reduced together with those of all other layers.
    is_split = any(isinstance(one, DTensor) for one in layer.parameters()) and isinstance(layer, FSDPModule)
    if is_split:
        layer.unshard()
    try:
        head = OutputHead.of(model)
        with gathered_head(head):
            yield head
    finally:
        if is_split:
            layer.reshard()


def keep_float32(accelerator: Accelerator, accumulation: Mapping[str, Any]) -> None:
    """Makes a sharded student accumulate and reduce gradients in float32 and in shards, before it is wrapped."""
    # By default both use the compute dtype, and FSDP2 accumulates unsharded gradients in each process.
    state = accelerator.state
    if accelerator.distributed_type == DistributedType.FSDP:
        if policy := state.fsdp_plugin.mixed_precision_policy:
            # No cast of outputs either: the loss stays as it is.
            policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)
            state.fsdp_plugin.mixed_precision_policy = policy
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = accumulation.get("sync_each_batch", True)
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage >= 2 and accelerator.mixed_precision == "bf16":
        plugin.deepspeed_config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def reshard(model: nn.Module) -> None:
    """Reshards modules that FSDP2 left gathered after a forward; a no-op for other models."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            group = getattr(state, "_fsdp_param_group", None)
            if group is not None and group.is_unsharded:
                # torch 2.10 still waits for the forward of the group's other module, the head, which is never called.
                state._modules_to_run_forward.clear()
                group._to_sharded()


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's parameters by name, resharded first: FSDP2 replaces parameters, and leaves some gathered."""
    reshard(model)
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def plain_name(name: str) -> str:
    """The name of a module or parameter without the prefix that activation checkpointing under FSDP2 adds."""
    return name.replace(_CHECKPOINT_PREFIX, "")


@torch.no_grad()
def whole(parameter: Tensor) -> Tensor:
    """The unsharded value of a parameter; no copy if it is not sharded, collective if it is."""
    if isinstance(parameter, DTensor):
        value: Tensor = parameter.full_tensor()
        return value
    if in_zero3(parameter):
        with gathered([parameter]):
            return parameter.detach().clone()
    return parameter.detach()


def whole_copy(model: Any) -> Any:
    """A copy of a model in every process; with ZeRO-3 gathered in host memory, tensor by tensor. Collective."""
    if not in_zero3_model(model):
        return deepcopy(model)
    # `deepcopy` would copy empty shards.
    copied = empty_twin(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        set_module_tensor_to_device(copied, name, "cpu", whole(tensor))
    copied.tie_weights()
    return copied


def local(tensor: Tensor) -> Tensor:
    """The local shard, if FSDP2 has sharded the tensor; else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter: its shard, if FSDP2 or ZeRO-3 has sharded it; nothing is gathered."""
    return local(getattr(parameter, "ds_tensor", parameter).detach())


@torch.no_grad()
def write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Writes unsharded values, equal in all processes, into the parameters of the same names. Collective."""
    with gathered([parameters[name] for name in values if in_zero3(parameters[name])], written=True):
        for name, value in values.items():
            parameter = parameters[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.data.copy_(value)


def is_split(parameter: Tensor) -> bool:
    """Whether this process holds only a shard of the parameter."""
    return isinstance(parameter, DTensor) or in_zero3(parameter)


def in_zero3(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has sharded the tensor, which is then empty unless gathered."""
    return hasattr(tensor, "ds_id")


def in_zero3_model(model: nn.Module) -> bool:
    """Whether ZeRO-3 has sharded the parameters, so that none can be used outside the engine's own forward."""
    return any(map(in_zero3, model.parameters()))


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of a tensor before sharding."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def whole_numel(tensor: Tensor) -> int:
    """The number of elements of a tensor before sharding."""
    number: int = getattr(tensor, "ds_numel", tensor.numel())
    return number


@torch.no_grad()
def broadcast_from_first(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Overwrites the tensors of every process with those of the first. Collective."""
    # Randomly initialised weights may differ between processes until training begins, and with accelerate's
    # `fsdp_cpu_ram_efficient_loading` only the first process has loaded any.
    if not distributed.is_initialized():
        return
    for tensor in tensors.values():
        value = tensor.to(device)
        distributed.broadcast(value, src=0)
        tensor.copy_(value)


def launched(args: Any) -> ParallelismConfig:
    """The sizes of the options or else of the accelerate file; all are 1 where neither sets them."""
    if args.parallelism_config is not None:
        return args.parallelism_config
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        return ParallelismConfig()  # reads the launcher's environment variables
    return ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)


@contextmanager
def sharing_rows_ourselves(sizes: ParallelismConfig) -> Iterator[None]:
    """Hides sequence parallelism from accelerate and transformers, which would divide the rows of the dataset."""
    if not sizes.sp_enabled:
        yield
        return
    # For them all processes are data parallel while the context is open: each generates its own rows.
    with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false"):
        yield
