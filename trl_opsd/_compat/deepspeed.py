"""DeepSpeed: a second engine, for a frozen model, and helpers for the student's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import patch_environment
from torch import Tensor, nn
from transformers.integrations import deepspeed as integration

Config = dict[str, Any]


def reader_config(dtype: torch.dtype, width: int, device: torch.device, layer: int = 0) -> Config:
    """A ZeRO-3 config for a frozen model: sharded over the processes, in host memory, gathered layer by layer."""
    # `layer` has the elements of the largest layer: the next is gathered while one computes. DeepSpeed's default
    # prefetches a fraction of a large model's layer.
    ahead = {"stage3_prefetch_bucket_size": layer, "stage3_max_live_parameters": 2 * layer} if layer else {}
    return {
        # Nothing of the student's config: its optimizer, scheduler, accumulation or batch size would be set up for the
        # teacher too, or be refused.
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**62,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": device.type != "cpu"},
            # Smaller tensors, norms and biases, stay gathered.
            "stage3_param_persistence_threshold": 10 * width,
            # No layer is needed again before all others have been used: keep none gathered.
            "stage3_max_reuse_distance": 0,
            **ahead,
        },
    }


def settings_without_gradient_check(config: Config) -> list[str]:
    """Names of settings with which DeepSpeed does not check gradients before a step, and so cannot skip it."""
    zero = config.get("zero_optimization", {})
    checks = {
        "zero_optimization.stage": zero.get("stage", 0) != 0,
        "zero_optimization.compute_grad_norm": zero.get("compute_grad_norm", True),
        "bf16.check_grad_overflow": config.get("bf16", {}).get("check_grad_overflow", True),
    }
    return [name for name, is_checked in checks.items() if not is_checked]


def setting_without_loss_scale(config: Config) -> str | None:
    """The name of a setting with which DeepSpeed's optimizer does not support [`rescaled`], or `None`."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage == 0:
        return "zero_optimization.stage"
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled") and "float16" in str(autocast.get("dtype")).replace("bfloat16", ""):
        return "torch_autocast.dtype"  # a loss scale of another kind
    accumulates = config.get("data_types", {}).get("grad_accum_dtype")
    return "data_types.grad_accum_dtype" if stage == 1 and accumulates is not None else None


@contextmanager
def rescaled(optimizer: Any, before: float, after: float) -> Iterator[float]:
    """Makes the next step divide the gradient by `after`, though losses were divided by `before`; yields `after`."""
    # A ZeRO optimizer holds the gradient times its loss scale, and divides by the scale when it steps.
    optimizer.override_loss_scale(optimizer.loss_scale * after / before)
    try:
        yield after
    finally:
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = False, None


@contextmanager
def gathered(parameters: Sequence[Tensor], written: bool = False) -> Iterator[None]:
    """Gathers parameters that ZeRO-3 has sharded while the context is open; `written` keeps changes to them."""
    if not parameters:
        yield
        return
    from deepspeed import zero  # slow to import, and optional

    with zero.GatheredParameters(parameters, modifier_rank=0 if written else None):
        yield


@contextmanager
def forwards_apart(model: Any) -> Iterator[None]:
    """Lets each process call a gathered model as often as it needs."""
    # DeepSpeed compares all processes at the start of the first two forwards. TRL removes its other hooks meanwhile.
    optimizer = getattr(model, "optimizer", None)
    coordinator = getattr(getattr(optimizer, "parameter_offload", optimizer), "param_coordinator", None)
    if coordinator is None:
        yield
        return
    # Shadowed on the instance, so that deleting it restores the method.
    coordinator.reset_step = lambda: None
    try:
        yield
    finally:
        del coordinator.reset_step


def register_external_parameters(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Tells ZeRO-3 that a module's forward also reads parameters of another module."""
    # DeepSpeed detects that itself, but only after it has traced the order in which a forward uses parameters; the next
    # forward without gradients then fails.
    split = [one for one in parameters if hasattr(one, "ds_id")]
    if split:
        from deepspeed import zero  # slow to import, and optional

        for parameter in split:
            zero.register_external_parameter(module, parameter)


def with_current_autocast(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Wraps a function to run under the autocast state of this call, which DeepSpeed disables in its forward."""
    kind = device.type
    return torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))(function)


@contextmanager
def loading(config: Config | None) -> Iterator[None]:
    """Makes `from_pretrained` use this DeepSpeed config, or none, instead of the student's, while it is open."""
    # While a ZeRO-3 config is alive, `transformers` shards every model it loads by that config; and with accelerate's
    # `fsdp_cpu_ram_efficient_loading` it fills the model with zeros, for FSDP to replace, in all processes but one.
    students = integration._hf_deepspeed_config_weak_ref  # there are public functions to set and unset it, not to read
    ours = None
    try:
        if config is None:
            integration.unset_hf_deepspeed_config()
        else:
            ours = integration.HfDeepSpeedConfig(config)  # registers itself, and is in effect while it is referenced
        with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            yield
    finally:
        integration._hf_deepspeed_config_weak_ref = students
        del ours


def restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Restores a model's buffers in their original dtype."""
    # ZeRO-3 casts them to the dtype of the weights; rotary frequencies in half precision are wrong at late positions.
    for name, buffer in buffers.items():
        model.get_buffer(name).data = buffer


def empty_twin(model: Any) -> Any:
    """An unsharded `transformers` model of the same class and config, with weights on the meta device and buffers."""
    with loading(None), init_empty_weights():
        return type(model)._from_config(deepcopy(model.config), dtype=model.dtype)


def recompute_buffers(model: Any) -> None:
    """Recomputes the non-persistent buffers of a `transformers` model loaded under ZeRO-3, as without ZeRO-3."""
    saved = set(model.state_dict(keep_vars=True))
    places = {name: buffer.device for name, buffer in model.named_buffers() if name not in saved}
    fresh = dict(empty_twin(model).named_buffers())
    restore_buffers(model, {name: fresh[name].to(places[name]) for name in places.keys() & fresh})


def exchanging_attention(attend: Callable[..., Any], query_BHLD: Tensor, key_BHLD: Tensor, group: Any) -> Any:
    """A causal attention function for rows that a group of processes shares, by DeepSpeed's Ulysses."""
    # Before it attends, every process gives its part of the positions and gets all positions of its part of the heads;
    # afterwards the reverse. `attend` is the attention within a process.
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # slow to import, and optional

    return UlyssesSPAttentionHF(
        attn=attend,
        batch_size=query_BHLD.size(0),
        attn_head_count=query_BHLD.size(1),
        attn_head_size=query_BHLD.size(3),
        kv_head_count=key_BHLD.size(1),
        num_hidden_layers=1,  # read by its debug mode alone
        process_group=group,
        seq_length_is_variable=True,
    )


class SplitReader:
    """Runs functions of a frozen model sharded by DeepSpeed; shards it unless it was loaded under [`loading`]."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        from deepspeed import initialize, zero  # slow to import, and optional

        self._stage = _Stage(model)
        buffers = dict(model.named_buffers())
        if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            # The engine would move the whole model to the device before sharding; this moves one parameter at a time.
            zero.Init(self._stage, mem_efficient_linear=False, config_dict_or_path=config)
        self._engine, *_ = initialize(model=self._stage, config=config)
        self._engine.eval()
        restore_buffers(model, {name: buffer.to(self._engine.device) for name, buffer in buffers.items()})

    def __call__(self, function: Any, *args: Any) -> Any:
        """`function(model, *args)`, in the engine's own forward: only there does DeepSpeed gather the weights."""
        device = self._engine.device
        self._stage.task = with_current_autocast(partial(function, self._stage.model, *args), device)
        try:
            with torch.autocast(device.type, enabled=False):  # otherwise DeepSpeed warns
                return self._engine()
        finally:
            self._stage.task = None


class _Stage(nn.Module):
    """The module that the engine wraps, whose forward calls `task`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.task: Any = None

    def forward(self) -> Any:
        return self.task()
