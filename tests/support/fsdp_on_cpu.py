"""Enables accelerate's FSDP2 on a CPU; sharding, gathering and reducing are the real ones.

accelerate 1.15 enables FSDP only with an accelerator, and silently starts plain data parallelism on a CPU. Nothing
after that check needs an accelerator.
"""

from __future__ import annotations

import os

from accelerate import PartialState
from accelerate.utils import DistributedType


def allow() -> None:
    """Call it after building the config and before building the trainer; does nothing in a launch without FSDP."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
