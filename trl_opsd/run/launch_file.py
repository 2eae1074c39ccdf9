"""Rejects nested keys of the accelerate file that accelerate ignores; it rejects unknown top-level keys itself.

Of `deepspeed_config` only: accelerate passes the keys of that to its processes, but not those of `fsdp_config`.
"""

from __future__ import annotations

import os

from trl_opsd.run.nearest import nearest


def check_nested_keys() -> None:
    """Rejects keys of `deepspeed_config` that accelerate does not know, with the nearest known name."""
    given = [name for name in os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",") if name]
    if not given:
        return
    from accelerate.commands.launch import launch_command_parser  # which says what accelerate reads

    known = vars(launch_command_parser().parse_args(["script"]))
    for name in given:
        if name not in known:
            close = nearest(name, known)
            hint = (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else "remove it, or write a file for `deepspeed_config_file`."
            )
            raise ValueError(
                f"`deepspeed_config` in the accelerate file has the key '{name}', which accelerate ignores: {hint}"
            )
