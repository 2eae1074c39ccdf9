"""Adapters as teachers: those of a base share its weights, perhaps with the student; one is active while it scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from trl_opsd._compat.peft import CausalLM, activate, adapter_weights, base_parameters
from trl_opsd.models.backbone import Run
from trl_opsd.models.weights import Samples, sample
from trl_opsd.teacher.frozen import Placement, Resident
from trl_opsd.types import OutputHead


class Adapted(Placement):
    """One adapter of a model that another placement keeps with all of them; `owners` says who else uses its base."""

    def __init__(self, shared: Placement, name: str, path: str, owners: str) -> None:
        self.model, self.device, self.adapter = shared.model, shared.device, path
        self.is_whole, self.passes_are_costly = shared.is_whole, shared.passes_are_costly
        self._shared, self._name, self._owners = shared, name, owners
        with self.model.disable_adapter():
            of_base = OutputHead.of(self.model).weight
        activate(self.model, name)
        head = OutputHead.of(self.model)
        self._head: OutputHead | None = head
        if not isinstance(shared, Resident):
            # A head of its own comes and goes with the layers, but the loss needs it after that, as it does the base's.
            bias = None if head.bias is None else head.bias.detach().to(self.device, copy=True)
            own = replace(head, weight=head.weight.detach().to(self.device, copy=True), bias=bias)
            self._head = None if head.weight is of_base else own

    @property
    def where(self) -> str:
        return f"{self._shared.where}, with the adapter {self.adapter!r}{self._owners}"

    @property
    def head(self) -> OutputHead:
        return self._shared.head if self._head is None else self._head

    @contextmanager
    def loaded(self, passes: int) -> Iterator[Run]:
        activate(self.model, self._name)
        with self._shared.loaded(passes) as run:
            yield run

    def samples(self) -> Samples:
        own = adapter_weights(self.model, self._name)
        return {**super().samples(), **{name: sample(tensor) for name, tensor in own.items()}}


def borrow(model: nn.Module, lenders: Sequence[CausalLM]) -> dict[str, Tensor]:
    """Replaces weights of a model by frozen ones of others that have the same values; returns those, by name."""
    theirs = [base_parameters(one) for one in lenders]
    found: dict[str, Tensor] = {}
    for name, own in list(model.named_parameters(remove_duplicate=False)):
        for one in (weights[name] for weights in theirs if name in weights):
            alike = type(one) is type(own) is nn.Parameter and one.dtype == own.dtype and one.shape == own.shape
            if alike and not one.requires_grad and torch.equal(one, own.to(one.device)):
                layer, _, part = name.rpartition(".")
                setattr(model.get_submodule(layer), part, one)
                found[name] = one
                break
    return found
