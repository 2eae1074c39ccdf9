"""Starts pairs of processes as `accelerate launch` does, but by forking this one, which has imported everything.

The launcher's elastic agent is torch's own: it connects the processes, and when one dies it ends the other. Each pair
only skips the imports and DeepSpeed's check whether to compile its extension.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate.commands.launch import launch_command, launch_command_parser
from deepspeed.comm.torch import build_shm_op
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import trl_opsd

CONFIGS = Path(trl_opsd.__file__).parent / "accelerate_configs"
PROCESSES = 2


def launch(strategy: str, function: Callable[..., Any], *args: Any, processes: int = PROCESSES) -> dict[int, Any]:
    """Runs a function in several processes and returns its results by rank.

    Args:
        strategy (`str`):
            A file of `trl_opsd/accelerate_configs` for the CPU, or "ddp": that is how `torchrun` starts processes, as
            accelerate has no file for it that works on a CPU.
        function (`Callable`):
            Runs in every process.
        *args (`Any`):
            Its arguments.
        processes (`int`, *optional*, defaults to 2):
            Number of processes.
    """
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=strategy,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    results: dict[int, Any] = {}

    def child(*args: Any) -> Any:
        gc.freeze()  # what was inherited: accelerate collects in each training, and would walk it all
        return function(*args)

    def run(_: Any = None) -> None:
        results.update(elastic_launch(agent, child)(*args))

    build_shm_op()  # once: a fork finds it loaded
    if strategy == "ddp":
        run()
    else:
        config = str(CONFIGS / f"{strategy}.yaml")
        with mock.patch("torch.distributed.run.run", run):
            given = ["--config_file", config, "--num_processes", str(processes), __file__]
            launch_command(launch_command_parser().parse_args(given))
    assert len(results) == processes
    return results
