"""Has every process group wait for as long as `ddp_timeout` says; nobody else says it to all of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import constants
from torch.distributed import distributed_c10d as c10d


def wait_for(time: timedelta) -> None:
    """Sets how long the groups of this process wait for a process that does not come.

    transformers hands `ddp_timeout` to the first group, but not on a CPU. A group that a library makes later, such as
    DeepSpeed's, has torch's default: 10 minutes with NCCL, less than a rollout may take, and 30 with gloo. Groups that
    were given a time of their own keep it.

    Args:
        time (`datetime.timedelta`):
            From now on, for collectives that have not begun.
    """
    if not distributed.is_initialized():
        return
    for group in c10d._world.pg_map:
        for backend in _backends(group):
            if backend.options._timeout in (constants.default_pg_timeout, constants.default_pg_nccl_timeout):
                backend._set_default_timeout(time)


def _backends(group: Any) -> list[Any]:
    """The libraries a group uses, one for each kind of device, that can be told."""
    found = [group._get_backend(torch.device(device)) for device in {one.type for one in group._device_types}]
    return [one for one in found if hasattr(one, "_set_default_timeout")]
