"""The command line `trl-opsd`: which commands there are. What each does is imported only when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import trl_opsd
from trl_opsd.cli.doctor.command import doctor
from trl_opsd.cli.plan.command import plan
from trl_opsd.cli.report.command import report
from trl_opsd.cli.train.command import train
from trl_opsd.errors import explained

TRACEBACK = "--traceback"


class _Commands(TyperGroup):
    """The commands; each ends with one sentence for an error that explains itself, unless `--traceback` is given."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        context.obj = TRACEBACK in args  # it may stand anywhere, also behind a command's own options
        return super().parse_args(context, [one for one in args if one != TRACEBACK])

    def invoke(self, context: Any) -> Any:
        with explained(lambda: f"trl-opsd {context.invoked_subcommand}", whole=context.obj):
            return super().invoke(context)


app = typer.Typer(
    name="trl-opsd",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="On-policy distillation for the Hugging Face ecosystem: train, and what belongs around it.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(trl_opsd.__version__)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    __: Annotated[bool, typer.Option(TRACEBACK, help="Print an error with its traceback; stands anywhere.")] = False,
) -> None:
    """What stands before a command."""


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)(train)
app.command()(doctor)
app.command()(plan)
app.command()(report)


def main() -> None:
    """Runs the command line of this process, and ends it."""
    app(prog_name="trl-opsd")
