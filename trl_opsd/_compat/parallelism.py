"""Reads accelerate's `ParallelismConfig`, and refuses unsupported settings before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import ParallelismConfig
from accelerate.utils import patch_environment


def launched(args: Any) -> ParallelismConfig:
    """The sizes of the options or else of the accelerate file; all are 1 where neither sets them."""
    if args.parallelism_config is not None:
        return args.parallelism_config
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        return ParallelismConfig()  # reads the launcher's environment variables
    return ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)


@contextmanager
def sharing_rows_ourselves(sizes: ParallelismConfig) -> Iterator[None]:
    """Hides sequence parallelism from accelerate and transformers, which would divide the rows of the dataset."""
    if not sizes.sp_enabled:
        yield
        return
    # For them all processes are data parallel while the context is open: each generates its own rows.
    with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false"):
        yield


def check_parallelism(args: Any) -> None:
    """Refuses sizes that are not supported, or do not fit the launch's sharding and number of processes."""
    sizes = launched(args)
    for name, what in {"tp_size": "tensor parallelism", "cp_size": "context parallelism"}.items():
        if (size := getattr(sizes, name)) > 1:
            raise ValueError(
                f"`parallelism_config`: `{name}={size}`: {what} is not supported: leave it at 1. Long rows are divided "
                "by `sp_size`, with DeepSpeed, and weights by `dp_shard_size`, with FSDP2."
            )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if sizes.sp_enabled:
        _check_sequences(sizes, args, processes)
    elif sizes.data_parallel_size > 1:
        _check_replicas(sizes.dp_replicate_size, sizes.dp_shard_size, processes)


def _check_sequences(sizes: ParallelismConfig, args: Any, processes: int) -> None:
    asked = f"`parallelism_config`: `sp_size={sizes.sp_size}`"
    if args.parallelism_config is not None:
        raise ValueError(f"{asked} as an option: TRL refuses it; put it into the accelerate file (`sp.yaml`).")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        raise ValueError(
            f"{asked} in a launch without DeepSpeed, whose Ulysses divides the rows: launch with `distributed_type: "
            "DEEPSPEED` (`trl_opsd/accelerate_configs/sp.yaml`), or remove it."
        )
    if processes % sizes.sp_size or sizes.data_parallel_size not in (1, processes // sizes.sp_size):
        raise ValueError(
            f"{asked} on {processes} processes, with a data parallel size of {sizes.data_parallel_size}: expected a "
            "divisor of `num_processes`; leave `dp_replicate_size` and `dp_shard_size` out."
        )
    if not sizes.sp_handler.sp_seq_length_is_variable:
        raise ValueError(f"{asked} with `sp_seq_length`: completions differ in length: leave it out.")
    if args.padding_free:
        raise ValueError(f"{asked} with `padding_free=True` is not supported: remove one of them.")
    if args.pad_to_multiple_of not in (None, "auto"):
        raise ValueError(
            f"{asked} with `pad_to_multiple_of={args.pad_to_multiple_of}` is not supported: remove one of them."
        )
    if args.torch_compile:
        raise ValueError(f"{asked} with `torch_compile=True` is not supported: remove one of them.")


def _check_replicas(replicas: int, shards: int, processes: int) -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        if shards > 1:
            raise ValueError(
                f"`parallelism_config`: `dp_shard_size={shards}` in a launch without FSDP, where nothing would be "
                "sharded: launch with `distributed_type: FSDP` and `fsdp_version: 2` "
                "(`trl_opsd/accelerate_configs/hsdp.yaml`), or remove it; DeepSpeed shards by its `zero_stage`."
            )
    elif shards == 1 or replicas * shards != processes:
        raise ValueError(
            f"`parallelism_config`: {replicas} replicas (`dp_replicate_size`) of {shards} shards (`dp_shard_size`) on "
            f"{processes} processes: expected at least 2 shards, and a product equal to `num_processes`."
        )
