"""Reads accelerate's `ParallelismConfig` before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import ParallelismConfig
from accelerate.utils import patch_environment


def launched(args: Any) -> ParallelismConfig:
    """The sizes that the options or the accelerate file ask for; all are 1 where neither does."""
    if args.parallelism_config is not None:
        return args.parallelism_config
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        return ParallelismConfig()  # which reads what the launcher has set
    return ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)


@contextmanager
def sharing_rows_ourselves(sizes: ParallelismConfig) -> Iterator[None]:
    """Hides sequence parallelism from accelerate and transformers, which would divide the rows of the dataset.

    For them all processes are data parallel while the context is open: each generates rows of its own.
    """
    if not sizes.sp_enabled:
        yield
        return
    with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false"):
        yield
