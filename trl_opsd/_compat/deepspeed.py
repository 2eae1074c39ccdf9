"""A second DeepSpeed beside the student's, for a model that is only read, and what to know of the student's own."""

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


def reader_config(dtype: torch.dtype, width: int, device: torch.device) -> Config:
    """ZeRO-3 for a frozen model: split over the processes, in host memory, gathered layer by layer while it reads.

    Nothing of the student's config is in it. An optimizer, a scheduler, an accumulation or a batch size of the
    student's would be built for the teacher too, or be refused.

    Args:
        dtype (`torch.dtype`):
            Of the weights; DeepSpeed would read them in float32 otherwise.
        width (`int`):
            Hidden width. Tensors of up to ten times as many elements, norms and biases, stay gathered.
        device (`torch.device`):
            Where the model reads.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**62,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": device.type != "cpu"},
            "stage3_param_persistence_threshold": 10 * width,
            # A layer is not needed again before all others were: keep none.
            "stage3_max_reuse_distance": 0,
        },
    }


def blind_settings(config: Config) -> list[str]:
    """Names of settings with which a student's engine steps without a look at its gradient; it can skip otherwise.

    Args:
        config (`dict`):
            Of DeepSpeed, for a student.
    """
    zero = config.get("zero_optimization", {})
    settings = {
        "zero_optimization.stage": zero.get("stage", 0) != 0,
        "zero_optimization.compute_grad_norm": zero.get("compute_grad_norm", True),
        "bf16.check_grad_overflow": config.get("bf16", {}).get("check_grad_overflow", True),
    }
    return [name for name, looks in settings.items() if not looks]


@contextmanager
def gathered(parameters: Sequence[Tensor], written: bool = False) -> Iterator[None]:
    """Parameters that ZeRO-3 has split are whole for as long as the context lasts; if `written`, to be changed too."""
    if not parameters:
        yield
        return
    from deepspeed import zero  # slow, and not everybody has it

    with zero.GatheredParameters(parameters, modifier_rank=0 if written else None):
        yield


def announce(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Tells ZeRO-3 that a module's forward also reads what belongs to another one.

    DeepSpeed would find out by itself, but not before it has written down in which order a forward reads; one without a
    gradient then fails the next time.
    """
    split = [one for one in parameters if hasattr(one, "ds_id")]
    if split:
        from deepspeed import zero  # slow, and not everybody has it

        for parameter in split:
            zero.register_external_parameter(module, parameter)


def carried(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function that multiplies as it would here, wherever it is called: DeepSpeed ends autocast in its forward."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def run(*args: Any) -> Any:
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return function(*args)

    return run


@contextmanager
def loading(config: Config | None) -> Iterator[None]:
    """What `from_pretrained` sees of the launch: this config of DeepSpeed, or nothing, whatever the student's is.

    While a ZeRO-3 config is alive, `transformers` splits every model it loads by that config; and with accelerate's
    `fsdp_cpu_ram_efficient_loading` it fills all but the first process's with zeros, for FSDP to replace. Both are back
    afterwards, also after an exception.
    """
    students = integration._hf_deepspeed_config_weak_ref  # it can be set and unset in public, but not read
    ours = None
    try:
        if config is None:
            integration.unset_hf_deepspeed_config()
        else:
            ours = integration.HfDeepSpeedConfig(config)  # sets itself, and counts for as long as it lives
        with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            yield
    finally:
        integration._hf_deepspeed_config_weak_ref = students
        del ours


def put_back(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Gives a model its buffers again, in the dtype they had.

    ZeRO-3 makes them in the dtype of the weights; rotary frequencies in half precision turn late positions wrongly.
    """
    for name, buffer in buffers.items():
        model.get_buffer(name).data = buffer


def empty_twin(model: Any) -> Any:
    """A model of `transformers` of the same kind, not split, with no weights yet and the buffers it computes."""
    with loading(None), init_empty_weights():
        return type(model)._from_config(deepcopy(model.config), dtype=model.dtype)


def recompute_buffers(model: Any) -> None:
    """Has a model of `transformers` that was loaded under ZeRO-3 compute its buffers again, as it does without."""
    saved = set(model.state_dict(keep_vars=True))
    places = {name: buffer.device for name, buffer in model.named_buffers() if name not in saved}
    fresh = dict(empty_twin(model).named_buffers())
    put_back(model, {name: fresh[name].to(places[name]) for name in places.keys() & fresh})


class SplitReader:
    """Runs functions of a frozen model that DeepSpeed has split, or splits now.

    Args:
        model (`nn.Module`):
            The model, whole or loaded under [`loading`].
        config (`dict`):
            From [`reader_config`].
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        from deepspeed import initialize, zero  # slow, and not everybody has it

        self._stage = _Stage(model)
        buffers = dict(model.named_buffers())
        if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            # The engine would move all of a whole model to the device before it splits it; this moves one by one.
            zero.Init(self._stage, mem_efficient_linear=False, config_dict_or_path=config)
        self._engine, *_ = initialize(model=self._stage, config=config)
        self._engine.eval()
        put_back(model, {name: buffer.to(self._engine.device) for name, buffer in buffers.items()})

    def __call__(self, function: Any, *args: Any) -> Any:
        """`function(model, *args)`, in the engine's own forward: only there does DeepSpeed bring the weights."""
        device = self._engine.device
        self._stage.task = carried(partial(function, self._stage.model, *args), device)
        try:
            with torch.autocast(device.type, enabled=False):  # DeepSpeed would warn of it
                return self._engine()
        finally:
            self._stage.task = None


class _Stage(nn.Module):
    """The module the engine wraps. Its forward is whatever is to be done next."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.task: Any = None

    def forward(self) -> Any:
        return self.task()
