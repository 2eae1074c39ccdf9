"""Divides a decoder by the shape of its module tree; no architecture is known by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import whole_numel
from trl_opsd.types import OutputHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Each parameter and buffer of a causal language model, in exactly one list."""

    head: list[Tensor]
    """Weight and, if there is one, bias of the output head; tied embeddings are here too."""
    embedding: list[Tensor]
    """The input embeddings, if they are not the head's."""
    layers: list[tuple[nn.Module, list[Tensor]]]
    """The decoder layers in calling order, each with the tensors that only it holds."""
    rest: list[Tensor]
    """Tensors that belong to no layer, or to several: the last norm, positions."""


def parts_of(model: CausalLM) -> Parts:
    """Divides the tensors of a causal language model into the groups that are moved together."""
    output = OutputHead.of(model)
    head = [tensor for tensor in (output.weight, output.bias) if tensor is not None]
    taken = {id(tensor) for tensor in head}
    layers = _distinct(layer_list(model))
    # A tensor shared by several layers must be on the device for all of them: it goes with the rest.
    holders = Counter(id(tensor) for layer in layers for tensor in tensors_of(layer))
    own = [[one for one in tensors_of(layer) if holders[id(one)] == 1 and id(one) not in taken] for layer in layers]
    taken |= {id(tensor) for tensor in chain.from_iterable(own)}
    embedding = [tensor for tensor in tensors_of(model.get_input_embeddings()) if id(tensor) not in taken]
    if len(embedding) < len(tensors_of(model.get_input_embeddings())):
        embedding = []  # tied to the head, which stays on the device
    taken |= {id(tensor) for tensor in embedding}
    rest = [tensor for tensor in tensors_of(model) if id(tensor) not in taken]
    return Parts(head=head, embedding=embedding, layers=list(zip(layers, own, strict=True)), rest=rest)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module and of those inside it, each once."""
    return _distinct(chain(module.parameters(), module.buffers()))


def layer_list(model: nn.Module) -> nn.ModuleList:
    """The `ModuleList` with the most numbers, which is that of the decoder layers; empty if there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=numbers_in, default=nn.ModuleList())  # if lists tie, the first is the outer one


def numbers_in(module: nn.Module) -> int:
    """Elements of all parameters and buffers inside a module, unsharded."""
    return sum(map(whole_numel, tensors_of(module)))


def _distinct(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())
