"""Starts a training script in the processes of `accelerate launch`; knows nothing of what it trains."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.resources import files
from itertools import chain
from logging import getLogger
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any

import torch
from accelerate.commands import launch as launching
from accelerate.commands.config import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trl_opsd._compat.versions import replaced
from trl_opsd.cli.options import GROUPS, OptionParser

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

_CONFIG = "accelerate_config"
_OF_A_PROCESS = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Variables of processes that a launcher started; only `accelerate launch` sets the second, and always."""
_NOT_HERE = {"help", "module", "no_python", "env", "vm", "tpu_use_cluster"}
"""Options of `accelerate launch` for what is launched, or with another meaning in the file of a training."""


def run(
    arguments: Sequence[str],
    prog: str,
    traceback: bool = False,
    words: Sequence[str] = ("train",),
    work: Callable[[Sequence[str], OptionParser], OPSDTrainer] | None = None,
) -> None:
    """Trains with these arguments of the command `prog`, in this process if that is enough, or else in a launch.

    `words` call the same command again in each process of a launch, and `work` is what it does there, if not to train.
    """
    parser = OptionParser(prog=prog, launch_options=launch_options())
    is_launched = any(name in os.environ for name in _OF_A_PROCESS)
    launcher, script = ([], list(arguments)) if is_launched else separated(arguments, parser)
    several = launcher or torch.accelerator.device_count() > 1 or Path(default_config_file).is_file()
    if is_launched or not several:
        from trl_opsd.cli.train import end, main  # which imports the trainer

        end((work or main)(script, parser))
        return
    parser.check(script)  # once, before each process of the launch imports the trainer to find the same mistake
    command = [*launcher, "--module", "trl_opsd", *["--traceback"] * traceback, *words, *script]
    agent = getLogger("torch.distributed.elastic.multiprocessing.api")
    try:  # the agent would report a failure that the process has printed already
        with replaced(launching, simple_launcher=_replace_process), replaced(agent, disabled=True):
            launch_command(launch_command_parser().parse_args(command))
    except ChildFailedError as error:
        own = [one.exitcode for one in error.failures.values() if one.exitcode > 0]
        if not own:  # signals, which a process could not report itself; else the launcher sent them to the others
            for rank, one in error.failures.items():
                print(f"{prog}: error: {one.signal_name()} ended the process of rank {rank}.", file=sys.stderr)
        sys.exit(min(own) if own else 128 - max(one.exitcode for one in error.failures.values()))
    except SignalException as error:  # the launcher's own, when its processes have ended
        sys.exit(128 + error.sigval)
    except CalledProcessError as error:
        sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)


def _replace_process(args: Any) -> None:
    """Runs one process in place of this one, which gets its signals: accelerate's own would die of a SIGTERM alone."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment)


def launch_options() -> set[str]:
    """The options of `accelerate launch` whose names no option of a training has, and `accelerate_config`."""
    ours = {one.name for group in GROUPS for one in fields(group)}
    theirs = {action.dest for action in launch_command_parser()._actions if action.option_strings}
    return {_CONFIG} | theirs - ours - _NOT_HERE


def separated(arguments: Sequence[str], parser: OptionParser) -> tuple[list[str], list[str]]:
    """The arguments for `accelerate launch`, and those for the training, each in order; a mistake ends the program."""
    own = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    own.error = parser.error  # type: ignore[method-assign]
    allowed = launch_options()
    own.add_argument(f"--{_CONFIG}")
    for action in launch_command_parser()._actions:
        if action.dest in allowed:
            own._add_action(action)
            action.default = SUPPRESS
    found, script = own.parse_known_args(list(arguments))
    ahead = list(script)  # in the same order, among the others
    given = [one for one in arguments if not (ahead and ahead[0] == one and ahead.pop(0))]
    _, options = parser.read(script)
    in_file = {name: options[name] for name in options if name in allowed - vars(found).keys()}
    set_there = {f"--{name}": value for name, value in in_file.items() if value not in (None, False)}
    flags = ([name] if value is True else [name, str(value)] for name, value in set_there.items())
    launcher = [*chain.from_iterable(flags), *given]
    while f"--{_CONFIG}" in launcher:
        at = launcher.index(f"--{_CONFIG}")
        launcher[at : at + 2] = ["--config_file", _accelerate_file(launcher[at + 1], parser)]
    return launcher, script


def _accelerate_file(given: str, parser: OptionParser) -> str:
    """The path of an accelerate file: a path, or the name of one in this package."""
    if Path(given).is_file():
        return given
    folder = files("trl_opsd") / "accelerate_configs"
    names = sorted(one.name.removesuffix(".yaml") for one in folder.iterdir())
    if given in names:
        return str(folder / f"{given}.yaml")
    parser.error(f"--{_CONFIG} {given}: expected a file, or one of {', '.join(names)}.")
