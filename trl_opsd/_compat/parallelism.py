"""Reads accelerate's `ParallelismConfig`, and refuses what a trainer here cannot do, before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

from accelerate import ParallelismConfig


def launched(args: Any) -> ParallelismConfig:
    """The sizes that the options or the accelerate file ask for; all are 1 where neither does.

    Args:
        args ([`~transformers.TrainingArguments`]):
            The options.
    """
    if args.parallelism_config is not None:
        return args.parallelism_config
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        return ParallelismConfig()  # which reads what the launcher has set
    return ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)


def check_parallelism(args: Any) -> None:
    """Checks the sizes of a launch against what it shards with and its number of processes.

    Args:
        args ([`~transformers.TrainingArguments`]):
            The options, before transformers has read them.

    Raises:
        ValueError: They ask for what is not supported or does not go together.
    """
    sizes = launched(args)
    for name, what in _UNSUPPORTED.items():
        if (size := getattr(sizes, name)) > 1:
            raise ValueError(
                f"`parallelism_config`: `{name}={size}`: {what} is not supported, because completions are generated in "
                "the trainer and its processes would have to read the same ones: leave it at 1. `dp_replicate_size` "
                "and `dp_shard_size` are supported, with FSDP2."
            )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    replicas, shards = sizes.dp_replicate_size, sizes.dp_shard_size
    if replicas * shards == 1:
        return
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        if shards > 1:
            raise ValueError(
                f"`parallelism_config`: `dp_shard_size={shards}` in a launch without FSDP, where nothing would be "
                "sharded: launch with `distributed_type: FSDP` and `fsdp_version: 2` "
                "(`examples/accelerate_configs/hsdp.yaml`), or remove it; DeepSpeed shards by its `zero_stage`."
            )
    elif shards == 1 or replicas * shards != processes:
        raise ValueError(
            f"`parallelism_config`: {replicas} replicas (`dp_replicate_size`) of {shards} shards (`dp_shard_size`) on "
            f"{processes} processes: expected at least 2 shards, and a product equal to `num_processes`."
        )


_UNSUPPORTED = {"tp_size": "tensor parallelism", "cp_size": "context parallelism", "sp_size": "sequence parallelism"}
