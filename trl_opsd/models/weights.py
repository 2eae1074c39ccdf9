"""Weights by name: samples, names in a checkpoint; a model from its config alone, and the memory that it will need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trl_opsd._compat.peft import CausalLM, base_parameters
from trl_opsd._compat.sharding import shard, whole
from trl_opsd._compat.versions import CACHE
from trl_opsd.models.backbone import model_shape
from trl_opsd.models.grouping import bytes_per_token

VALUES = 64
"""Maximum number of values sampled from one weight."""

_BATCHED_TOKENS, _OWN = 4096, 2_000_000_000
"""Of an engine: maximum tokens in a forward pass, and bytes of CUDA graphs and workspace, an assumption."""
SHARE = 0.9
"""Share of a device that may be used; the rest is for the CUDA context, buffers and fragmentation."""

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


def state_of(parameters: Iterable[Tensor]) -> tuple[Any, ...]:
    """Equal as long as weights have not changed: their versions, and a few values of each. Nothing is gathered.

    Operations in place raise a version, unless they go through `.data`: those are found by the values, of dense floats.
    """
    shards = [shard(one) for one in parameters]
    versions = tuple(0 if one.is_inference() else one._version for one in shards)
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in shards:
        if type(one) is Tensor and one.is_floating_point() and one.numel() and not one.is_meta:
            # An odd step, or all values could come from one column.
            few = one.flatten()[:: one.numel() // VALUES | 1]
            by_device.setdefault(one.device, []).append(few.float())
    return versions, tuple(torch.cat(few).cpu().numpy().tobytes() for few in by_device.values())


def as_saved(model: CausalLM, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Names and values that `save_pretrained` writes for one weight, such as the experts of a layer one by one."""
    if getattr(model, "_weight_conversions", None) == []:  # saved under the same names; skips a slow conversion
        return [(name, tensor)]
    # The tensor is unsharded, or on the meta device where only the names are needed.
    return list(revert_weight_conversion(model, {name: tensor}).items())


def load_renamed(model: CausalLM, folder: str) -> None:
    """Loads a checkpoint that has other names than the model: of those, transformers' trainer loads none, and warns."""
    saved = set[str]()
    for file in Path(folder).glob("model*.safetensors"):  # no adapter's
        with safe_open(file, "pt") as weights:
            saved.update(weights.keys())
    if saved <= model.state_dict().keys():
        return
    model.load_state_dict(type(model).from_pretrained(folder, dtype="auto").state_dict())


def without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model as its config initialises it, on the default device."""
    # The class that TRL loads: the first architecture, which of a multimodal checkpoint is the whole model; without a
    # name, the causal language model of the config's kind.
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if named is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    model: PreTrainedModel = named(config)
    return model.to(dtype)


def cached_per_token(config: PretrainedConfig) -> int:
    """Numbers (keys and values) per token over all layers, as an upper bound; 0 where the config states no heads."""
    # Windows and layers that share another's cache are not subtracted.
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if not isinstance(layers, int):
        return 0
    each = getattr(text, "per_layer_config", None)  # where layers differ, the whole config has no value
    return sum(_of_layer(each[layer] if each is not None else text) for layer in range(layers))


def _of_layer(config: PretrainedConfig) -> int:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    heads, pairs, size, width = (one if isinstance(one := getattr(config, name, None), int) else 0 for name in names)
    return 2 * (pairs or heads) * (size or width // heads) if heads else 0


def cached_numbers(model: PreTrainedModel, tokens: int) -> int:
    """Numbers that a row of so many tokens caches, recurrent states included; `model` is on the meta device."""
    try:
        with torch.no_grad():
            output = model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"), use_cache=True)
        parts = tree_leaves([vars(layer) for layer in output[CACHE].layers])
        found = sum(one.numel() for one in parts if isinstance(one, Tensor) and one.dim() > 1)
    except Exception:  # a family that reads tensor values, which meta tensors lack, or keeps its cache elsewhere
        found = 0
    return found or tokens * cached_per_token(model.config)


def training_pass_bytes(model: CausalLM, tokens: int, checkpointing: bool) -> int:
    """Bytes of activations of a training pass, estimated from the config alone."""
    # What each layer keeps, or with checkpointing its input, and twice that of one layer for its gradients.
    layer, inputs = bytes_per_token(model)[0], model_shape(model)[1] * model.dtype.itemsize
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1
    return int(tokens * (layers * (inputs if checkpointing else layer) + 2 * layer))


def engine_bytes(parameters: int, cached: int, of_token: int, logits: int, itemsize: int) -> dict[str, int]:
    """Memory of an engine on a device, from numbers of `itemsize` bytes that it keeps there, and logits of all rows."""
    activations = _BATCHED_TOKENS * of_token + 12 * logits + _OWN
    return {"weights": itemsize * parameters, "cache": itemsize * cached, "activations": activations}
