"""One weight of a checkpoint, as it is sent to an engine or saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A named checkpoint tensor, computed on demand (`materialize`)."""

    name: str
    """Its name in the checkpoint."""
    base: Tensor
    """The student's own tensor, without adapters."""
    parts: tuple[Tensor, ...]
    """Tensors that must be gathered while it is materialised."""
    materialize: Callable[[], Tensor]
    """Returns the tensor, which is read-only: it may share memory with the student's."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Weight:
        """A tensor sent unchanged."""
        return cls(name, tensor, (tensor,), tensor.detach)
