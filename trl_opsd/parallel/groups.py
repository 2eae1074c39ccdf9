"""Applies `ddp_timeout` to every process group; transformers sets it for the first one only."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import constants
from torch.distributed import distributed_c10d as c10d


def set_group_timeout(time: timedelta) -> None:
    """Sets the timeout of later collectives in all process groups of this process that still have torch's default.

    transformers passes `ddp_timeout` to the first group, but not on a CPU. A group that a library creates later, such
    as DeepSpeed's, has torch's default: 10 minutes with NCCL, less than a rollout may take, and 30 with gloo.
    """
    if not distributed.is_initialized():
        return
    for group in c10d._world.pg_map:  # torch has no public list of all groups
        for backend in _backends(group):
            if backend.options._timeout in (constants.default_pg_timeout, constants.default_pg_nccl_timeout):
                backend._set_default_timeout(time)


def _backends(group: Any) -> list[Any]:
    """The backends of a group, one for each device type, whose timeout can be set."""
    found = [group._get_backend(torch.device(device)) for device in {one.type for one in group._device_types}]
    return [one for one in found if hasattr(one, "_set_default_timeout")]
