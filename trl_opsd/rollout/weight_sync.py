"""Determines the weights to send to an engine, without changing the student.

A LoRA factor [r, in] · B LoRA factor [out, r] · P parameters
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_opsd._compat.peft import (
    CausalLM,
    Weight,
    is_peft,
    lora_factors,
    merged_weights,
    why_not_plain_lora,
    without_peft,
)
from trl_opsd._compat.sharding import in_zero3, whole, whole_numel, whole_shape
from trl_opsd._compat.torchao import fake_quantized
from trl_opsd.models.weights import as_saved

T = TypeVar("T")
Gathered: TypeAlias = Callable[[list[Tensor]], AbstractContextManager[Any]]
Layers: TypeAlias = dict[str, tuple[Tensor, Tensor, float]]
"""LoRA factors A, [r, in], and B, [out, r], and the scaling of B A, by the name of the layer in a checkpoint."""
Saved: TypeAlias = Callable[[str, Tensor], list[tuple[str, Tensor]]]

BUCKET_BYTES = 2**28
"""Weights that ZeRO-3 gathers at once, in bytes: few enough to fit, enough that latency does not dominate."""


@dataclass(slots=True)
class Stream:
    """Weights by the names of a checkpoint, which a `with` block iterates over, and their bytes.

    Every process has to iterate over all of them, because gathering is collective: under ZeRO-3 by bucket, under FSDP2
    by weight, after it was computed on the shards. So the block exhausts the iterator at its end, also after an error.
    """

    weights: list[Weight]
    dtype: torch.dtype
    device: torch.device
    gathered: Gathered
    saved: Saved = field(default=lambda name, tensor: [(name, tensor)])
    """Splits or renames a weight as a checkpoint does; see [`saved_by`]."""
    bytes: int = field(default=0, init=False)
    _drawn: Iterator[tuple[str, Tensor]] = field(default=iter(()), init=False, repr=False)

    def __enter__(self) -> Iterator[tuple[str, Tensor]]:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a tensor's last write may be on another stream than the sending
        self._drawn = self._draw()
        return self._drawn

    def __exit__(self, *exception: object) -> None:
        for _ in self._drawn:
            pass

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._drawn

    def announced(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each, in order; nothing is computed or gathered."""
        found = []
        for weight in self.weights:
            base = weight.base
            empty = torch.empty(whole_shape(base), dtype=self._dtype_of(base), device="meta")
            for name, part in self.saved(weight.name, empty):
                found.append((name, str(part.dtype).removeprefix("torch."), list(part.shape)))
        return found

    def _draw(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets(self.weights, lambda one: sum(part.itemsize * whole_numel(part) for part in one.parts)):
            parts = {id(part): part for weight in bucket for part in weight.parts if in_zero3(part)}
            split = list(parts.values())  # each once
            with self.gathered(split):
                for weight in bucket:
                    # Adapters are merged here, one weight at a time, so the student is not changed or copied.
                    made = weight.materialize()
                    # Cast before gathering: fewer bytes. A copy, as an engine may keep the tensor for a while.
                    tensor = whole(made.to(self.device, self._dtype_of(made), copy=bool(split)))
                    self.bytes += tensor.nbytes
                    for name, part in self.saved(weight.name, tensor):
                        yield name, part.contiguous()
                if split and torch.accelerator.is_available():
                    torch.accelerator.synchronize()  # the copies may be on another stream than the gathers

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype


def weights_of(model: CausalLM) -> list[Weight]:
    """All weights of a checkpoint of the student, with adapters merged, and a tied head also under its own name.

    Of a student that computes with quantised weights, these.
    """
    plain = (Weight.of(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items())
    quantizers = {id(layer.weight): layer.quantizer for layer in fake_quantized(model).values()}
    return [
        replace(one, quantize=quantizers[id(one.base)].of_weight) if id(one.base) in quantizers else one
        for one in (merged_weights(model) if is_peft(model) else plain)
    ]


def saved_by(model: CausalLM) -> Saved:
    """A function that splits or renames a weight as the student's checkpoint does, such as experts one by one."""
    return partial(as_saved, without_peft(model))


def base_weights_of(model: CausalLM) -> list[Weight]:
    """As [`weights_of`], without adapters."""
    return [replace(one, parts=(one.base,), merge=Tensor.detach) for one in weights_of(model)]


def adapter_of(model: CausalLM, dtype: torch.dtype, device: torch.device, gathered: Gathered) -> tuple[Layers, int]:
    """The student's LoRA factors A, B and the scaling of B A, by the name of the layer; and their bytes."""

    def copied(part: Tensor) -> Tensor:
        return whole(part.detach().to(device, dtype, copy=True))

    factors = lora_factors(model)
    with gathered([part for a, b, _ in factors.values() for part in (a, b) if in_zero3(part)]):
        layers = {name: (copied(a), copied(b), scaling) for name, (a, b, scaling) in factors.items()}
    return layers, sum(a.nbytes + b.nbytes for a, b, _ in layers.values())


def as_saved_by_peft(layers: Layers) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and config of an adapter as peft saves them: all of the largest rank, scalings in the factors B."""
    tensors, rank = {}, max(len(a) for a, _, _ in layers.values())
    for name, (a, b, scaling) in layers.items():
        # Zeros add nothing; SGLang takes one rank alone.
        tensors[f"base_model.model.{name}.lora_A.weight"] = pad(a, (0, 0, 0, rank - len(a))).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = pad(b * scaling, (0, rank - len(a))).contiguous()
    modules = sorted({name.rpartition(".")[2] for name in layers})
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}


def adapter_rank(model: CausalLM) -> int:
    """The largest rank of the student's adapter."""
    return max(whole_shape(a)[0] for a, _, _ in lora_factors(model).values())


def adapter_layers(model: CausalLM) -> list[str]:
    """The layers with an adapter, by the names of a checkpoint; empty if it cannot be sent separately."""
    return list(lora_factors(model)) if is_peft(model) and not why_not_plain_lora(model) else []


def chosen_sync(requested: str, model: CausalLM, ranks: Collection[int], against: str | None = None) -> tuple[str, str]:
    """Whether `"adapter"` or `"full"` weights are sent, and why; `against` is why the engine takes no adapter."""
    if requested == "full":
        return "full", "`vllm_weight_sync='full'`"
    if not is_peft(model):
        against = "the student has no adapter"
    elif reason := why_not_plain_lora(model):
        against = reason
    elif (rank := adapter_rank(model)) > max(ranks):
        against = f"the adapter's rank {rank} exceeds the engine's maximum of {max(ranks)}"
    if against is None:
        return "adapter", "only the student's LoRA adapter changes"
    if requested == "adapter":
        raise ValueError(f"`vllm_weight_sync='adapter'`: {against}; use 'auto' or 'full'.")
    return "full", against


def buckets(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups weights so that few are held besides a model's own: at most `BUCKET_BYTES`, or a single larger one."""
    bucket: list[T] = []
    size = 0
    for item in items:
        here = size_of(item)
        if bucket and size + here > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += here
    if bucket:
        yield bucket
