"""The final norm of a model, examined by running it: states that it made can be distinguished from all others.

N tokens · H hidden width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import hidden_states
from trl_opsd.teacher.parts import layer_list

_LARGE = 1e3
"""Size of inputs that makes a norm's epsilon negligible."""
_AT_ONCE = 1 << 15
"""Numbers of a block: they fit a CPU cache, and torch starts no threads for so few."""
_EXACT = 1e-3
"""Tolerance of the root mean square of a float32 norm's normalised input, which is 1."""


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """A norm's affine map: it returns `unit * scale + bias`, where `unit` has a mean square of 1."""

    scale: Tensor
    """[H], float32 in host memory."""
    bias: Tensor
    """[H], likewise; 0 without one."""

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, width: int) -> FinalNorm | None:
        """Measures the map of a module from [N, H] to [N, H], whatever its weight means; `None` if it is no norm."""
        # The module has float32 weights in host memory.
        signs_H = torch.ones(width)
        signs_H[1::2] = -1  # mean 0, so that subtracting the mean changes nothing
        if width % 2:
            signs_H[-1] = 0
        one_H, other_H = module(_LARGE * torch.stack([signs_H, -signs_H]))
        # An affine map after a normalisation: opposite inputs give bias plus and minus scale.
        scale_H, bias_H = (one_H - other_H) / 2 * signs_H, (one_H + other_H) / 2
        if width % 2:
            scale_H[-1] = 0
        found = cls(scale_H * (signs_H.square().mean().sqrt()), bias_H)
        # A norm maps any input to unit mean square; another module does not.
        probe_NH = _LARGE * torch.randn(4, width, generator=torch.Generator().manual_seed(0))
        return found if ((found.rms(module(probe_NH)) - 1).abs() < _EXACT + 2 / width * (width % 2)).all() else None

    def rms(self, states_NH: Tensor) -> Tensor:
        """[N], the root mean square of the map's input: 1 for states of this norm, up to rounding."""
        # Channels with a scale of 0 add 0, but NaN if they are not finite, so that each number counts.
        read_H, width = self.scale != 0, len(self.scale)
        inverse_H = (1 / self.scale).masked_fill_(~read_H, 0.0)
        rows = max(1, _AT_ONCE // width)
        found = []
        for states_RH in states_NH.split(rows):
            units_RH = states_RH.to(torch.float32, copy=True).sub_(self.bias).mul_(inverse_H)
            found.append(torch.linalg.vector_norm(units_RH, dim=-1))
        return torch.cat(found) / read_H.sum().sqrt()


def find_last_norm(model: CausalLM) -> str | None:
    """The name of the module whose output is the last hidden state; `None` if none is, or it cannot be seen."""
    # The model is on the meta device, where layers may need values: they are replaced by ones that copy their input.
    layers = layer_list(model)
    last: dict[StorageWeakRef, str] = {}

    def note(name: str, found: Any) -> None:
        if isinstance(found, Tensor):
            last[_memory(found)] = name

    inside = {id(module) for module in layers.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside:
            module.register_forward_hook(lambda module, _, found, name=name: note(name, found))
    for wrap in (lambda hidden: hidden, lambda hidden: (hidden,)):  # some families' layers return tuples
        for layer in layers:
            layer.forward = lambda *given, wrap=wrap, **named: wrap(next(iter((*given, *named.values()))).clone())
        last.clear()
        try:
            # transformers knows fake tensors, but asks plain meta tensors for values.
            with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
                ids_BL = torch.zeros(1, 4, dtype=torch.long, device="meta")
                return last.get(_memory(hidden_states(model, ids_BL, torch.ones_like(ids_BL))))
        except Exception:  # a family that needs values
            continue
    return None


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Identifies the storage that a tensor shares with its views."""
    return StorageWeakRef(tensor.untyped_storage())
