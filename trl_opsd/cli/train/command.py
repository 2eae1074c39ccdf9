"""`trl-opsd train`: its place on the command line. Its options are those of a training, which another parser knows."""

from __future__ import annotations

import typer


def train(context: typer.Context) -> None:
    """Train a student, with the options of OPSDConfig, from flags or YAML, in one process or several.

    `--accelerate_config zero3` launches it as `accelerate launch` would. `trl-opsd train --help` lists the options.
    """
    from trl_opsd.cli.train.launch import run  # imports torch

    run(context.args, "trl-opsd train", traceback=context.obj)
