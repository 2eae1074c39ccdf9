"""The function behind `trl-opsd report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The `output_dir` of a training, or a checkpoint.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; RUN_DIR/report.html.")] = None,
) -> None:
    """Writes the report of a run: curves and, if it was trained with `report: true`, its completions token by token.

    One HTML page without any request to elsewhere. Also of a run that goes on, or was killed.

    Exit status: 0, or 2 if there is nothing to report.
    """
    from trl_opsd.report.page import write

    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder")
    try:
        typer.echo(str(write(run, to=output)))
    except ImportError as error:
        raise ImportError("charts need vl-convert-python: pip install vl-convert-python") from error
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from error
