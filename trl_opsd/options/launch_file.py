"""Refuses nested keys of the accelerate file that accelerate ignores; unknown ones at the top it refuses itself.

Of `deepspeed_config` only: accelerate tells its processes which keys that had, but not which `fsdp_config` had.
"""

from __future__ import annotations

import os

from trl_opsd.options.names import did_you_mean


def check_nested_keys() -> None:
    """Refuses keys of `deepspeed_config` that accelerate does not know.

    Raises:
        ValueError: There are some; the message has the nearest known name of each.
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
