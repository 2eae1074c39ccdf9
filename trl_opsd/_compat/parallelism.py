"""Reads accelerate's `ParallelismConfig` before anything is loaded."""

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
