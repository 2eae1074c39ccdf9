"""The norm that a model ends with, examined by running it: states that it made can be told from all others.

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
"""Size of inputs beside which the epsilon of a norm is nothing."""
_AT_ONCE = 1 << 15
"""Numbers that go through all steps before the next: they fit a cache, and torch starts no threads for so few."""
_EXACT = 1e-3
"""By how much the root mean square of what a norm in float32 was given may be off 1."""


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """A norm's affine map, float32 in host memory.

    What the norm makes of any state is `unit * scale + bias`, and `unit` has a root mean square of 1.
    """

    scale: Tensor
    """[H]."""
    bias: Tensor
    """[H], 0 without one."""

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, width: int) -> FinalNorm | None:
        """Reads the map from what a module does, whatever its weight means; `None` if it is no norm.

        Args:
            module (`torch.nn.Module`):
                Any module from [N, H] to [N, H], with its weights in float32 in host memory.
            width (`int`):
                H.
        """
        signs_H = torch.ones(width)
        signs_H[1::2] = -1  # mean 0, so that subtracting the mean changes nothing
        if width % 2:
            signs_H[-1] = 0
        one_H, other_H = module(_LARGE * torch.stack([signs_H, -signs_H]))
        scale_H, bias_H = (one_H - other_H) / 2 * signs_H, (one_H + other_H) / 2
        if width % 2:
            scale_H[-1] = 0
        found = cls(scale_H * (signs_H.square().mean().sqrt()), bias_H)
        probe_NH = _LARGE * torch.randn(4, width, generator=torch.Generator().manual_seed(0))
        return found if ((found.rms(module(probe_NH)) - 1).abs() < _EXACT + 2 / width * (width % 2)).all() else None

    def rms(self, states_NH: Tensor) -> Tensor:
        """[N], the root mean square of what the map was applied to: 1 for states of this norm, but for rounding.

        Channels with a scale of 0 add nothing, but NaN if they are not finite: each number of each token is looked at.
        """
        read_H, width = self.scale != 0, len(self.scale)
        inverse_H = (1 / self.scale).masked_fill_(~read_H, 0.0)
        rows = max(1, _AT_ONCE // width)
        found = []
        for states_RH in states_NH.split(rows):
            units_RH = states_RH.to(torch.float32, copy=True).sub_(self.bias).mul_(inverse_H)
            found.append(torch.linalg.vector_norm(units_RH, dim=-1))
        return torch.cat(found) / read_H.sum().sqrt()


def find_last_norm(model: CausalLM) -> str | None:
    """The name of the module whose output is the last hidden state; `None` if there is none, or it cannot be seen.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            On the meta device. Its layers hand on what they are given afterwards, as what they compute may need values.
    """
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
            # Fake tensors are known to transformers, which asks those on the meta device for values.
            with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
                ids_BL = torch.zeros(1, 4, dtype=torch.long, device="meta")
                return last.get(_memory(hidden_states(model, ids_BL, torch.ones_like(ids_BL))))
        except Exception:  # whatever a family needs that tensors without values do not give
            continue
    return None


def _memory(tensor: Tensor) -> StorageWeakRef:
    """What a tensor and its views have in common."""
    return StorageWeakRef(tensor.untyped_storage())
