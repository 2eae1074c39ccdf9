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

    try:
        if not run.is_dir():
            raise ValueError("there is no such folder")
        file = write(run, to=output)
    except ImportError:
        typer.echo("trl-opsd report: charts need vl-convert-python: pip install vl-convert-python", err=True)
        raise typer.Exit(2) from None
    except (OSError, ValueError) as error:
        typer.echo(f"trl-opsd report: {run}: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(str(file))
