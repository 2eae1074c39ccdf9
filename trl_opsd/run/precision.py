"""In which dtype a launch multiplies, and which dtypes cannot be multiplied or trained; it knows no trainer.

What rounds is mostly somebody else: accelerate gives a model autocast in its `forward`, FSDP2 and DeepSpeed cast its
weights. The loss does not go through `forward`, and a model beside the student is cast by nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def autocast(accelerator: Accelerator) -> Iterator[None]:
    """Whatever is multiplied inside is rounded to what `bf16=True` or `fp16=True` says, on every launch.

    accelerate's own context does the same, but nothing under DeepSpeed, which casts the student's weights and leaves
    a teacher, and the head of one, in float32.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Of the launch.
    """
    dtype = _HALF.get(accelerator.mixed_precision)
    if dtype is None or accelerator.native_amp:
        with accelerator.autocast():
            yield
    else:
        with torch.autocast(accelerator.device.type, dtype=dtype):
            yield


def check_scaler(args: TrainingArguments) -> None:
    """Refuses float16 where nothing scales its loss: its gradients overflow, and the weights become NaN.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Of the student.

    Raises:
        ValueError: The launch computes in float16 on a CPU, without DeepSpeed, which scales itself.
    """
    if args.mixed_precision == "fp16" and args.device.type == "cpu" and args.deepspeed_plugin is None:
        raise ValueError(
            "`fp16=True` (or `mixed_precision: fp16` in the accelerate file) on a CPU, where there is no loss scaler "
            "for float16: set `bf16=True`, or neither for float32."
        )


def check_trained_dtypes(model: nn.Module) -> None:
    """Refuses to train float16 weights themselves; frozen ones, below an adapter, are no matter.

    Raises:
        ValueError: Parameters that are trained are float16.
    """
    names = [name for name, one in model.named_parameters() if one.requires_grad and one.dtype == torch.float16]
    if names:
        raise ValueError(
            f"{len(names)} trained parameters of the student are float16, {names[0]!r} first: a step of AdamW divides "
            "by an epsilon of 1e-8, which is 0 in float16, and no loss scaler takes float16 gradients. Load it with "
            "`dtype='float32'` in `model_init_kwargs` (or `model.float()`); what it computes in, `bf16` or `fp16` says."
        )


def dtypes_of(model: nn.Module) -> str:
    """The dtypes of a model's weights, each with a parameter that has it: for a message."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters():
        names[str(parameter.dtype).removeprefix("torch.")].append(name)
    return ", ".join(f"{len(those)} in {dtype} ({those[-1]!r})" for dtype, those in sorted(names.items()))


def least_precise(model: nn.Module) -> torch.dtype:
    """The dtype of a model's weights that rounds most; what it computes is no more precise, whatever dtype that has."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
