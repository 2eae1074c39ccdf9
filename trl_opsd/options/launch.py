"""The launch: sizes of parallelism that do not go together, and keys of the accelerate file that accelerate ignores."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainingArguments

from trl_opsd._compat.sharding import launched
from trl_opsd.losses.token_selection import LATE
from trl_opsd.options.names import did_you_mean
from trl_opsd.options.rules import Rule, refuse

_INSTEAD = (
    "is not supported: leave it at 1. Long rows are divided by `sp_size`, with DeepSpeed, and weights by "
    "`dp_shard_size`, with FSDP2."
)
_SIZES = (
    Rule(
        lambda launch: launch.sizes.tp_size > 1,
        f"`parallelism_config`: `tp_size={{0.sizes.tp_size}}`: tensor parallelism {_INSTEAD}",
    ),
    Rule(
        lambda launch: launch.sizes.cp_size > 1,
        f"`parallelism_config`: `cp_size={{0.sizes.cp_size}}`: context parallelism {_INSTEAD}",
    ),
)

_SHARED = "`parallelism_config`: `sp_size={0.sizes.sp_size}`"
_FINE = (("padding_free", False), ("pad_to_multiple_of", None, "auto"), ("torch_compile", False))
"""Options that have to be left as they are, and their values then."""


def _not_with(name: str, *fine: Any) -> Rule:
    return Rule(
        lambda launch: getattr(launch.args, name) not in fine,
        f"{_SHARED} with `{name}={{0.args.{name}}}` is not supported: remove one of them.",
    )


_SHARED_ROWS = (
    Rule(
        lambda launch: launch.args.parallelism_config is not None,
        f"{_SHARED} as an option: TRL refuses it; put it into the accelerate file (`sp.yaml`).",
    ),
    Rule(
        lambda launch: not launch.has_deepspeed,
        f"{_SHARED} in a launch without DeepSpeed, whose Ulysses divides the rows: launch with `distributed_type: "
        "DEEPSPEED` (`trl_opsd/accelerate_configs/sp.yaml`), or remove it.",
    ),
    Rule(
        lambda launch: (
            launch.processes % launch.sizes.sp_size
            or launch.sizes.data_parallel_size not in (1, launch.processes // launch.sizes.sp_size)
        ),
        f"{_SHARED} on {{0.processes}} processes, with a data parallel size of {{0.sizes.data_parallel_size}}: "
        "expected a divisor of `num_processes`; leave `dp_replicate_size` and `dp_shard_size` out.",
    ),
    Rule(
        lambda launch: not launch.sizes.sp_handler.sp_seq_length_is_variable,
        f"{_SHARED} with `sp_seq_length`: completions differ in length: leave it out.",
    ),
    Rule(
        lambda launch: launch.args.token_selection in LATE,
        f"{_SHARED} with `token_selection={{0.args.token_selection!r}}`: the tokens of a row lie on several processes, "
        "none of which knows the scores of all: set 'prefix' or 'random', or remove `sp_size`.",
    ),
    *(_not_with(name, *fine) for name, *fine in _FINE),
)

_SHARDED = (
    Rule(
        lambda launch: launch.sizes.dp_shard_size > 1 and not launch.has_fsdp,
        "`parallelism_config`: `dp_shard_size={0.sizes.dp_shard_size}` in a launch without FSDP, where nothing would "
        "be sharded: launch with `distributed_type: FSDP` and `fsdp_version: 2` "
        "(`trl_opsd/accelerate_configs/hsdp.yaml`), or remove it; DeepSpeed shards by its `zero_stage`.",
    ),
    Rule(
        lambda launch: (
            launch.has_fsdp and (launch.sizes.dp_shard_size == 1 or launch.sizes.data_parallel_size != launch.processes)
        ),
        "`parallelism_config`: {0.sizes.dp_replicate_size} replicas (`dp_replicate_size`) of {0.sizes.dp_shard_size} "
        "shards (`dp_shard_size`) on {0.processes} processes: expected at least 2 shards, and a product equal to "
        "`num_processes`.",
    ),
)


class Launch:
    """What is sharded by what, and over how many processes, before accelerate is started."""

    def __init__(self, args: TrainingArguments) -> None:
        self.args, self.sizes = args, launched(args)
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))
        self.has_deepspeed, self.has_fsdp = (
            os.environ.get(f"ACCELERATE_USE_{plugin}") == "true" for plugin in ("DEEPSPEED", "FSDP")
        )

    def check(self) -> None:
        """Raises `ValueError` for sizes that are not supported, or do not go together."""
        refuse(_SIZES, self)
        if self.sizes.sp_enabled:
            refuse(_SHARED_ROWS, self)
        elif self.sizes.data_parallel_size > 1:
            refuse(_SHARDED, self)


def check_nested_keys() -> None:
    """Raises `ValueError` for keys of `deepspeed_config` in the accelerate file that accelerate does not know.

    Unknown ones at the top it refuses itself; it does not tell its processes which keys `fsdp_config` had.
    """
    given = [name for name in os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",") if name]
    if not given:
        return
    from accelerate.commands.launch import launch_command_parser  # which says what accelerate reads

    known = vars(launch_command_parser().parse_args(["script"]))
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or "remove it, or write a file for `deepspeed_config_file`."
            raise ValueError(
                f"`deepspeed_config` in the accelerate file has the key '{name}', which accelerate ignores: {hint}"
            )
