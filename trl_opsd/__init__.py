"""On-policy distillation for the Hugging Face ecosystem; this file only maps public names to their modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import trl_opsd._compat  # noqa: F401  # before other libraries: it drops what torchao and others log at their import

if TYPE_CHECKING:
    from trl_opsd.config import OPSDConfig
    from trl_opsd.data.completions import before_turn
    from trl_opsd.errors import NonFiniteError, OPSDError, ServerError, SyncError
    from trl_opsd.methods.base import Method
    from trl_opsd.rollout import FixedRollout, HFRollout, RolloutBackend
    from trl_opsd.teacher import FrozenTeacher, Teacher
    from trl_opsd.trainer import OPSDTrainer

__version__ = "0.1.0.dev0"

_HOME = {
    "FixedRollout": "trl_opsd.rollout",
    "FrozenTeacher": "trl_opsd.teacher",
    "HFRollout": "trl_opsd.rollout",
    "Method": "trl_opsd.methods.base",
    "NonFiniteError": "trl_opsd.errors",
    "OPSDConfig": "trl_opsd.config",
    "OPSDError": "trl_opsd.errors",
    "OPSDTrainer": "trl_opsd.trainer",
    "RolloutBackend": "trl_opsd.rollout",
    "ServerError": "trl_opsd.errors",
    "SyncError": "trl_opsd.errors",
    "Teacher": "trl_opsd.teacher",
    "before_turn": "trl_opsd.data.completions",
}

__all__ = [
    "FixedRollout",
    "FrozenTeacher",
    "HFRollout",
    "Method",
    "NonFiniteError",
    "OPSDConfig",
    "OPSDError",
    "OPSDTrainer",
    "RolloutBackend",
    "ServerError",
    "SyncError",
    "Teacher",
    "before_turn",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first access, so that importing the package stays cheap."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_HOME[name])
    except AttributeError as error:  # Python would report only "cannot import name", without the reason
        raise ImportError(f"{name} cannot be loaded from {_HOME[name]}: {error}") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
