"""Linear layers that compute with what their weights become when torchao saves them quantised; knows no trainer.

O output features · I input features
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.sharding import whole_numel
from trl_opsd._compat.versions import bounds

NAMES = ("int4", "int8", "fp8", "nvfp4")
"""Formats by name. Of each the weights alone are quantised: for activations too, a `QATConfig` with a base config."""


def base_config(option: str, value: Any) -> Any:
    """The torchao config by which weights are saved, from the name of a format or a config; else `ValueError`."""
    try:
        from torchao.core.config import AOBaseConfig
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerGroup
        from torchao.quantization.qat import QATConfig
    except ImportError as error:
        wanted = f"torchao{bounds().get('torchao', '')}"
        raise ValueError(
            f'`{option}={value!r}` needs {wanted}, which cannot be imported ({error}): `pip install "{wanted}"`.'
        ) from error
    # Without side effects: by default some of them set options of torch's compiler for the whole process.
    named = {
        "int4": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32)),  # type: ignore[attr-defined]  # not in its stubs
        "int8": lambda: Int8WeightOnlyConfig(set_inductor_config=False),
        "fp8": lambda: Float8WeightOnlyConfig(set_inductor_config=False),
        "nvfp4": lambda: NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=True),
    }
    if isinstance(value, str) and value in named:
        return named[value]()
    if isinstance(value, QATConfig):
        value = value.base_config  # the one with which it would be converted
    if not isinstance(value, AOBaseConfig) or isinstance(value, QATConfig):
        raise ValueError(
            f"`{option}={value!r}`: expected one of {', '.join(map(repr, NAMES))}, a config of torchao such as "
            "`Int8WeightOnlyConfig()`, or a `QATConfig` with such a config as `base_config`, by which it is saved."
        )
    return value


@final
@dataclass(frozen=True, slots=True)
class FakeQuantizer:
    """A torchao config, and what it does to a linear layer."""

    config: Any
    activation: Callable[[Tensor], Tensor] | None = None
    """torchao's fake quantisation of a layer's input; `None` where inputs are not quantised."""

    @classmethod
    def of(cls, config: Any, layers: Mapping[str, nn.Linear], device: torch.device) -> FakeQuantizer:
        """What a config does to these layers on a device, tried on the first; torchao refuses what it cannot do."""
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        first, activation = next(iter(layers.values())), None
        # Few rows show as much as many, but as many beyond a multiple of what a kernel may ask for.
        rows = min(first.out_features, 256 + first.out_features % 128)
        how: Any = {"device": device, "dtype": first.weight.dtype}
        made = _quantized(torch.ones((rows, first.in_features), **how), config)
        if any(getattr(made, kind, None) is not None for kind in ("act_quant_kwargs", "activation_quantization")):
            model: Any = nn.Sequential(nn.Linear(first.in_features, rows, bias=False, **how))
            quantize_(model, QATConfig(config, step="prepare"))
            activation = model[0].activation_fake_quantizer
        return cls(config, activation)

    @torch.no_grad()
    def of_weight(self, weight_OI: Tensor) -> Tensor:
        """[O, I], what the weight is once it is saved and loaded, in its dtype; rows of FSDP2's as it shards them."""
        # Of all rows: a scale may be of the whole weight.
        full = weight_OI.full_tensor() if isinstance(weight_OI, DTensor) else weight_OI.detach()
        value: Tensor = _quantized(full, self.config).dequantize().to(weight_OI.dtype)
        if isinstance(weight_OI, DTensor):
            value = distribute_tensor(value, weight_OI.device_mesh, weight_OI.placements, src_data_rank=None)
        return value


def _quantized(weight_OI: Tensor, config: Any) -> Any:
    """The weight as torchao saves it."""
    from torchao.quantization import quantize_

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(weight_OI.size(1), weight_OI.size(0), bias=False))
    model[0].weight = nn.Parameter(weight_OI, requires_grad=False)
    quantize_(model, config)
    return model[0].weight


@final
class _StraightThrough(torch.autograd.Function):
    """The second of two tensors, with its gradient going to the first, unchanged."""

    # torchao's fake float8 has a gradient for the largest number of each row alone, through its scale (0.18).

    @staticmethod
    def forward(ctx: Any, latent: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        return *gradient, None


class FakeQuantizedLinear(nn.Linear):
    """A linear layer that computes with its quantised weight; made of one by [`prepare`], which sets its class.

    Its weight stays the latent one, in checkpoints and for the optimizer.
    """

    quantizer: FakeQuantizer
    is_on: bool = True
    kept: tuple[int, Tensor] | None = None
    """A version of the weight, and what it is quantised, while it is expected not to change."""

    def forward(self, states: Tensor) -> Tensor:
        if not self.is_on:
            return super().forward(states)
        # A compiled step would take the version for a constant, and be compiled again after each change.
        if self.kept is not None and (torch.compiler.is_compiling() or self.kept[0] == self.weight._version):
            value = self.kept[1]
        else:
            value = self.quantizer.of_weight(self.weight)
        weight = _StraightThrough.apply(self.weight, value)
        if self.quantizer.activation is not None:
            with torch.no_grad():
                quantized = self.quantizer.activation(states)
            states = _StraightThrough.apply(states, quantized)
        return nn.functional.linear(states, weight, self.bias)


def prepare(layers: Mapping[str, Any], quantizer: FakeQuantizer) -> None:
    """Makes linear layers compute with quantised weights, in place."""
    for layer in layers.values():
        # As torch's parametrizations do: the module stays the same for whoever holds it, PEFT's layers for one.
        layer.__class__ = FakeQuantizedLinear
        layer.quantizer, layer.kept = quantizer, None


def fake_quantized(model: nn.Module) -> dict[str, FakeQuantizedLinear]:
    """The layers of [`prepare`], by name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, FakeQuantizedLinear)}


def copy_quantizers(model: nn.Module, copied: nn.Module) -> None:
    """Makes the layers of a copy compute as the model's do; ZeRO-3's is a model of its own."""
    for name, layer in fake_quantized(model).items():
        prepare({name: copied.get_submodule(name)}, layer.quantizer)


def restore(model: nn.Module) -> None:
    """Makes the layers plain again, in place; their weights are the latent ones."""
    for layer in fake_quantized(model).values():
        layer.__class__ = nn.Linear  # type: ignore[assignment]


@contextmanager
def unquantized(model: nn.Module) -> Iterator[None]:
    """Has the model compute with its latent weights while the context is open."""
    layers = [one for one in fake_quantized(model).values() if one.is_on]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


@contextmanager
def kept_quantized(model: nn.Module) -> Iterator[None]:
    """Quantises each whole weight once, while the context is open, in which weights must not change."""
    found = [one for one in fake_quantized(model).values() if one.kept is None and not isinstance(one.weight, DTensor)]
    layers = [one for one in found if one.weight.numel() == whole_numel(one.weight)]  # under ZeRO-3 it may be gathered
    try:
        for layer in layers:
            layer.kept = layer.weight._version, layer.quantizer.of_weight(layer.weight)
        yield
    finally:
        for layer in layers:
            layer.kept = None


def save_quantized(
    model_class: Any,
    checkpoint: str | Path,
    folder: str | Path,
    config: Any,
    kept: list[str],
    device: torch.device,
    packs: bool = True,
    **place: Any,
) -> None:
    """Writes a checkpoint again, quantised but for the layers `kept`; `packs` int4 as engines read it.

    `place` are options of transformers' by which it is found and loaded.
    """
    from torchao.quantization import IntxUnpackedToInt8Tensor
    from transformers import TorchAoConfig
    from transformers.core_model_loading import WeightConverter

    how = TorchAoConfig(config, modules_to_not_convert=kept)
    with loading(None):
        others = {"dtype": "auto", "device_map": {"": device}, "use_safetensors": True, **place}
        model = model_class.from_pretrained(checkpoint, quantization_config=how, **others)
    # Of a packed model, transformers takes what it joins, experts of a layer for one, for packed too, and loads noise.
    packs &= not any(isinstance(one, WeightConverter) for one in model._weight_conversions or ())
    state, sizes = dict(model.state_dict()), set[int]()
    for name, tensor in model.state_dict().items():
        # torchao would write four bits in eight, and no engine has kernels for that.
        if packs and isinstance(tensor, IntxUnpackedToInt8Tensor) and _is_plain_int4(tensor):
            del state[name]
            state |= {f"{name}_packed": _packed(tensor.qdata), f"{name}_shape": torch.tensor(tensor.shape)}
            state[f"{name}_scale"] = tensor.scale.to(tensor.dtype)
            sizes.add(tensor.block_size[1])
    if not sizes:
        model.save_pretrained(folder)
        return
    model.hf_quantizer, model.config.quantization_config = None, _as_compressed_tensors(sizes, kept)
    model.save_pretrained(folder, state_dict=state)


def _is_plain_int4(tensor: Any) -> bool:
    """Whether a weight is four bits and a scale in the sense of compressed-tensors."""
    return (
        tensor.target_dtype == torch.int4  # type: ignore[attr-defined]
        and tensor.activation_quantization is None
        and not tensor.zero_point.any()
    )


def _packed(values_OI: Tensor) -> Tensor:
    """[O, I / 8], int32: eight numbers from -8 to 7 in each, the first in the lowest bits."""
    filled = nn.functional.pad(values_OI.long() + 8, (0, -values_OI.size(1) % 8)).unflatten(1, (-1, 8))
    both = (filled << torch.arange(0, 32, 4, device=values_OI.device)).sum(-1)
    return torch.where(both >= 2**31, both - 2**32, both).int()


def _as_compressed_tensors(sizes: set[int], kept: list[str]) -> dict[str, Any]:
    """How the checkpoint says what it is, to transformers and to engines; `sizes` of the groups that share a scale."""
    groups = {"strategy": "group", "group_size": min(sizes)} if len(sizes) == 1 else {"strategy": "channel"}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, **groups}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": kept,
    }
