"""Gives accelerate's FSDP2 to processes without an accelerator; sharding, gathering and reducing are the real ones.

accelerate 1.15 looks for FSDP only where there is an accelerator, and starts plain data parallelism on a CPU without a
word. Nothing after that question needs one.
"""

from __future__ import annotations

import os

from accelerate import PartialState
from accelerate.utils import DistributedType


def allow() -> None:
    """Called when the config has been built and the trainer has not; does nothing in a launch without FSDP."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
