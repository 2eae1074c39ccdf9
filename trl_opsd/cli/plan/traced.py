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
from transformers import PretrainedConfig, PreTrainedModel

from trl_opsd._compat.transformers import CHECKPOINTING
from trl_opsd.models.backbone import hidden_states
from trl_opsd.models.head import model_shape
from trl_opsd.models.unloaded import without_weights
from trl_opsd.teacher.forward import bytes_per_token


def _grouped_product(first: Tensor, second: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of the products of a mixture of experts; torch supports only bfloat16."""
    if second.dim() == 3:
        return first.new_empty(*first.shape[:-1], second.size(-1))
    assert offsets is not None, "two matrices are multiplied group by group"
    return first.new_empty(offsets.size(0), first.size(0), second.size(1))


_SHAPES = {"aten._grouped_mm.default": _grouped_product}
"""Operations, by name, whose result is only allocated, as its values are not needed."""


class _Live(TorchDispatchMode):
    """Tracks the bytes of all storages that operations create, until they are freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, object] = {id(one.untyped_storage()): one.untyped_storage() for one in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the results of the operation."""
        result = _SHAPES.get(str(function), function)(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._count(one)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # views share a storage, which is counted once
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
    """Peak bytes of activations of a training pass, besides weights and gradients, which exist already.

    Includes copies of weights that autocast makes, the gradient of the largest weight before it is added, and what the
    backward pass holds for a moment; the head is not applied. `products` is `"float32"`; `"autocast"`, bfloat16 with
    float32 weights; or `"bfloat16"` with bfloat16 weights.
    """
    dtype = torch.bfloat16 if products == "bfloat16" else torch.float32
    with torch.device("meta"):
        model = without_weights(config, dtype).train()
    try:
        return _traced(model, rows, tokens, products, checkpointing)
    except Exception:  # some families read values while they run, and cannot be traced
        return _estimated(model, rows * tokens, checkpointing)


def _estimated(model: PreTrainedModel, tokens: int, checkpointing: bool) -> int:
    """What each layer keeps, or with checkpointing its input, and twice that of one layer for its gradients."""
    layer = bytes_per_token(model, 0)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1
    inputs = model_shape(model)[1] * model.dtype.itemsize
    return int(tokens * (layers * (inputs if checkpointing else layer) + 2 * layer))


def _traced(model: PreTrainedModel, rows: int, tokens: int, products: str, checkpointing: bool) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        if checkpointing:
            getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
        parameters = list(model.parameters())
        for one in parameters:
            one.grad = torch.empty_like(one)  # exists already, so that only activations are counted
        known = [*parameters, *(one.grad for one in parameters), *model.buffers()]
        ids_BL, mask_BL = torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, tokens, dtype=torch.long)
        with _Live(known) as live:
            with torch.autocast("cpu", torch.bfloat16, enabled=products == "autocast"):
                states_BLH = hidden_states(model, ids_BL, mask_BL)
            states_BLH.backward(torch.empty_like(states_BLH))
        return live.peak
