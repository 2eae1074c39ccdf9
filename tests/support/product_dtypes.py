"""Records the dtypes of a trainer's matrix products by phase, in torch's dispatcher, where none can be missed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trl_opsd import OPSDTrainer

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mkldnn_linear")
ATTENTION = "_scaled_dot_product"
PHASES = ("complete", "teach", "student", "loss", "backward")


class Products(TorchDispatchMode):
    """The dtypes of the factors of every product, by phase of training.

    On a CPU, where no low-precision product ends in float32, the loss widens its factors. Each of them counts as the
    smallest dtype that holds its values; the gradient of the logits, which stays float32 there, is not counted. No
    other product than the head's has a dimension of the size `vocabulary`.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = defaultdict(set)
        self.rounded_weights = 0
        """Copies of parameters in another dtype."""
        self._vocabulary = vocabulary
        self._phase: list[str] = []

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the products inside for a phase, except those of a phase nested in it."""
        self._phase.append(phase)
        try:
            yield
        finally:
            self._phase.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        tensors = [one for one in args if isinstance(one, Tensor)]
        if name in PRODUCTS and tensors[-1].shape[-2] > 1:  # else rotary positions times frequencies
            self._note(tensors[-2:])
        elif name in ("_to_copy", "copy_") and isinstance(args[-1], torch.nn.Parameter) and args[-1].dim() > 1:
            self.rounded_weights += 1
        elif name.startswith(ATTENTION):
            self.found[self._phase[-1]] |= {_named(one.dtype) for one in tensors[:3]}
        return function(*args, **(kwargs or {}))

    def _note(self, factors: list[Tensor]) -> None:
        phase = self._phase[-1]
        if phase == "student" and any(self._vocabulary in one.shape for one in factors):
            makes_logits = factors[1].shape[-1] == self._vocabulary
            self.found["loss"] |= {_held_by(one) for one in (factors if makes_logits else factors[1:])}
        else:
            self.found[phase] |= {_named(one.dtype) for one in factors}


class WatchedTrainer(OPSDTrainer):
    """The trainer, with the dtypes of its products in `products`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.products = Products(self.limits.vocabulary)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.products, self.products.during("backward"):
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self.products, self.products.during("elsewhere"):
            return super().evaluate(*args, **kwargs)

    def complete(self, *args: Any) -> Any:
        with self.products.during("complete"):
            return super().complete(*args)

    def teach(self, *args: Any) -> Any:
        with self.products.during("teach"):
            return super().teach(*args)

    def compare(self, *args: Any) -> Any:
        with self.products.during("student"):
            return super().compare(*args)

    def dtypes(self) -> dict[str, list[str]]:
        """Dtypes found since the last call, sorted, by phase."""
        found = {phase: sorted(dtypes) for phase, dtypes in self.products.found.items()}
        self.products.found.clear()
        return found


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _held_by(tensor: Tensor) -> str:
    half = (dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(tensor.to(dtype).to(tensor), tensor))
    return _named(next(half, tensor.dtype))
