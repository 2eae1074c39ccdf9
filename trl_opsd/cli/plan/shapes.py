"""Sizes of a model for the plan: counted on the meta device, from a config, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from trl_opsd.models.backbone import context_of
from trl_opsd.models.key_value_cache import cached_numbers
from trl_opsd.models.unloaded import without_weights
from trl_opsd.teacher.forward import bytes_per_token


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its numbers: counts of parameters, not bytes, unless stated."""

    config: PretrainedConfig
    tensors: tuple[int, ...]
    """Parameters of each."""
    head: int
    layer: int
    """Parameters of the largest layer."""
    embeddings: int
    """Parameters of input embeddings that are not tied to the head."""
    vocabulary: int
    context: int | None
    """Maximum tokens of a row; `None` where the config has no limit."""
    width: int
    linear: int
    """Inputs and outputs of all linear layers but the head: the size of a LoRA adapter of rank 1."""
    cached: Callable[[int], int]
    """Numbers in the key-value cache of a row, by its tokens."""
    half_bytes_per_token: int
    """Bytes of activations per token in a forward pass without a graph, in half precision, without the mask."""

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(self.tensors)


def load_config(source: str) -> PretrainedConfig:
    """The config in a local folder, a `config.json` file, or of a Hub id."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(Path(source) if Path(source).exists() else source)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{source!r} has no model config that can be read ({reason}): pass a folder with a `config.json`, the file "
            "itself, or an id of the Hub."
        ) from None
    return config


def shape_of(source: str) -> Shape:
    """Counts the parameters of a causal language model on the meta device."""
    config = load_config(source)
    try:
        with torch.device("meta"):
            model = without_weights(config, torch.bfloat16)
    except (ValueError, AttributeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{source!r}: no causal language model can be built from its config ({reason[:200]})."
        ) from None
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{source!r} is a {type(model).__name__}, which has no output head: pass a causal language model, as its "
            "`architectures` name it."
        )
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    return Shape(
        config=config,
        tensors=tuple(one.numel() for one in model.parameters()),
        head=head.numel(),
        layer=max((_count(layer) for layer in _layers(model)), default=_count(model)),
        embeddings=0 if embeddings is head else embeddings.numel(),
        vocabulary=head.size(0),
        context=context_of(model),
        width=head.size(1),
        linear=sum(
            one.in_features + one.out_features
            for one in model.modules()
            if isinstance(one, nn.Linear) and one is not model.get_output_embeddings()
        ),
        cached=cache(partial(cached_numbers, model)),
        half_bytes_per_token=bytes_per_token(model, 0),
    )


def _count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _layers(model: nn.Module) -> list[nn.Module]:
    lists = (list(module) for module in model.modules() if isinstance(module, nn.ModuleList))
    return max(lists, key=lambda layers: sum(map(_count, layers)), default=[])
