"""Peak memory of a student's forward and backward pass, found by running it on tensors without data.

B rows · L tokens of a row
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from trl_opsd.models.backbone import hidden_states


class _Live(TorchDispatchMode):
    """Follows the bytes of all storages that operations create, until they are freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, object] = {id(one.untyped_storage()): one.untyped_storage() for one in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts what the operation returns."""
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._count(one)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._seen:
            return
        size = storage.nbytes()
        self._seen[id(storage)] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, id(storage), size)

    def _free(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.now -= size


def traced_activations(config: PretrainedConfig, rows: int, tokens: int, products: str, checkpointing: bool) -> int:
    """Peak bytes of activations of a training pass, beside weights and gradients, which exist already.

    Includes copies of weights that autocast makes, the gradient of the largest weight before it is added, and what the
    backward pass holds for a moment; the head is not applied.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Of the student.
        rows (`int`):
            B.
        tokens (`int`):
            L.
        products (`str`):
            `"float32"`; `"autocast"`, bfloat16 with weights in float32; or `"bfloat16"`, with weights in it too.
        checkpointing (`bool`):
            Whether each layer keeps its input only.
    """
    dtype = torch.bfloat16 if products == "bfloat16" else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        parameters = list(model.parameters())
        for one in parameters:
            one.grad = torch.empty_like(one)
        known = [*parameters, *(one.grad for one in parameters), *model.buffers()]
        ids_BL, mask_BL = torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, tokens, dtype=torch.long)
        with _Live(known) as live:
            with torch.autocast("cpu", torch.bfloat16, enabled=products == "autocast"):
                states_BLH = hidden_states(model, ids_BL, mask_BL)
            states_BLH.backward(torch.empty_like(states_BLH))
        return live.peak
