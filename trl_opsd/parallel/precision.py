"""The dtype in which a launch computes, and checks for dtypes that cannot be trained; knows no trainer.

Mixed precision is mostly applied elsewhere: accelerate wraps a model's `forward` in autocast, FSDP2 and DeepSpeed cast
its weights. But the loss does not go through `forward`, and no launcher casts a model besides the student.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.integrations import is_fsdp_enabled
from transformers.pytorch_utils import Conv1D

from trl_opsd._compat.peft import rewrites_base

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PLAIN = (nn.Linear.forward, Conv1D.forward)
"""Products that autocast rounds; a layer with one of its own, as a quantised one, may have scales for its weight."""


def autocast(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Autocast to the dtype of `bf16=True` or `fp16=True`, with every launcher.

    accelerate's own context does nothing under DeepSpeed, which casts the student's weights and leaves a teacher and
    its head in float32.
    """
    dtype = _HALF.get(accelerator.mixed_precision)
    if dtype is None or accelerator.native_amp:
        return accelerator.autocast()
    return torch.autocast(accelerator.device.type, dtype=dtype)


@contextmanager
def cast_weights(model: nn.Module, device_type: str) -> Iterator[None]:
    """Replaces float weights of linear layers by copies in autocast's dtype within the context, for reading only.

    Autocast would round them to the same values, but again in each call where they are frozen. Parameters stay the same
    objects, so optimizers, DDP and weight syncs see no change. The model has to be whole in this process, under
    `torch.no_grad`.
    """
    dtype, replaced = torch.get_autocast_dtype(device_type), []
    copies: dict[Tensor, nn.Parameter] = {}
    layers = [layer for layer in model.modules() if type(layer).forward in _PLAIN]
    try:
        for layer in layers if torch.is_autocast_enabled(device_type) else ():
            for name, weight in list(layer.named_parameters(recurse=False)):
                is_plain = type(weight) is nn.Parameter and weight.is_floating_point()  # no tensor with scales inside
                if is_plain and weight.dtype not in (dtype, torch.float64):
                    if weight not in copies:
                        copies[weight] = nn.Parameter(weight.to(dtype), requires_grad=False)
                    replaced.append((layer, name, weight))
                    setattr(layer, name, copies[weight])
        yield
    finally:
        for layer, name, weight in replaced:
            setattr(layer, name, weight)


def rounds_float32() -> bool:
    """Whether float32 products may be rounded, by TF32 or bfloat16, whichever of torch's settings says so."""
    backends: Any = torch.backends
    return any(one.matmul.fp32_precision not in ("none", "ieee") for one in (backends.cuda, backends.mkldnn))


def dtype_of_frozen_base(args: TrainingArguments, adapter: Any) -> torch.dtype | None:
    """The dtype to load a student in that only an adapter trains; `None` for TRL's default, float32.

    Frozen weights take no small steps: float32 costs memory, and a cast for each use, as autocast caches only casts of
    trained weights. But activations could overflow in float16, DeepSpeed and FSDP2 cast by themselves, and weights that
    an adapter trains or rewrites are better rounded later.
    """
    if adapter is None or args.mixed_precision != "bf16" or args.deepspeed_plugin is not None or is_fsdp_enabled():
        return None
    if adapter.is_prompt_learning or adapter.peft_type == "LN_TUNING":  # what they train is made in the base's dtype
        return None
    of_base = ("modules_to_save", "trainable_token_indices", "bias")  # whose weights, or copies of them, it trains
    trains_base = any(getattr(adapter, name, None) not in (None, [], "none") for name in of_base)
    return None if trains_base or rewrites_base(adapter) else torch.bfloat16


def check_trained_dtypes(model: nn.Module) -> None:
    """Rejects trainable float16 weights; frozen ones, under an adapter, are allowed."""
    names = [name for name, one in model.named_parameters() if one.requires_grad and one.dtype == torch.float16]
    if names:
        raise ValueError(
            f"{len(names)} trainable parameters of the student are float16 (the first is {names[0]!r}): AdamW's "
            "epsilon of 1e-8 is 0 in float16, and loss scalers do not support float16 gradients. Load it with "
            "`dtype='float32'` in `model_init_kwargs` (or `model.float()`); `bf16` or `fp16` sets the compute dtype."
        )


def warn_of_lost_updates(
    model: nn.Module, accelerator: Accelerator, rate: float, optimizer: Optimizer | None = None
) -> None:
    """Warns if the learning rate is too small for the dtype of the trained weights, so that most steps do not change
    them.

    Measured on the weights: the first step of AdamW moves each by the learning rate. Not with the user's `optimizer`,
    nor where a launcher keeps float32 copies to step on, as DeepSpeed does, and FSDP2 with mixed precision.
    """
    kind, mixed = accelerator.distributed_type, accelerator.mixed_precision != "no"
    steps_on_copies = kind == DistributedType.DEEPSPEED or (kind == DistributedType.FSDP and mixed)
    if optimizer is not None or steps_on_copies or not accelerator.is_main_process:
        return
    trained = [one.detach() for one in model.parameters() if one.requires_grad]
    halves = [one for one in trained if one.dtype in _HALF.values()]
    share = sum(one.numel() * _unmoved(one, rate) for one in halves) / max(sum(one.numel() for one in trained), 1)
    if share >= _LOST:
        dtype = str(halves[0].dtype).removeprefix("torch.")
        warnings.warn(
            f"{share:.0%} of the student's trainable weights would not change in a step of {rate:g}, the learning "
            f"rate: in {dtype} it is rounded away. Raise it, or load the student in float32 (`dtype='float32'` in "
            "`model_init_kwargs`, or `model.float()`); `bf16=True` computes in bfloat16.",
            stacklevel=4,
        )


_LOST = 0.1
"""Share of the weights that causes a warning; a bfloat16 model has about 0.1 at a rate of 1e-4, 0.98 at 1e-6."""


def _unmoved(weight: Tensor, rate: float) -> float:
    """Mean share of a weight's values that do not change when the rate is added, and when it is subtracted."""
    values = weight.flatten()[:: max(weight.numel() // 4096, 1)]  # enough of them, evenly spaced
    # Rounded to the nearest, as the weights are when the optimizer writes them.
    unmoved = [(values.float() + step).to(values.dtype) == values for step in (rate, -rate)]
    return float(torch.stack(unmoved).float().mean()) if values.numel() else 0.0


def least_precise(model: nn.Module) -> torch.dtype:
    """The dtype of a model's weights that rounds most; its outputs are no more precise, whatever their dtype."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
