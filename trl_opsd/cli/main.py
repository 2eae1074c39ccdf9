"""The command line `trl-opsd`: its commands and their options; what each does is imported only when it runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from functools import partial
from importlib import metadata
from json import JSONDecodeError
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from typer.core import TyperGroup

from trl_opsd.errors import OPSDError


def train(context: typer.Context) -> None:
    """Trains a student with the options of `OPSDConfig`, from flags or YAML, in one or more processes.

    `--accelerate_config zero3` launches it as `accelerate launch` would. `trl-opsd train --help` lists the options.

    Exit status: 0, 1 if the run failed, 2 for a wrong option, model or row, 143 if SIGTERM stopped it.
    """
    from trl_opsd.cli.launch import run  # imports torch

    run(context.args, "trl-opsd train", traceback=context.obj)


def targets(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML file of `trl-opsd train`.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("targets"),
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Log-probabilities of so many likeliest tokens instead of hidden states."),
    ] = None,
) -> None:
    """Has the teacher score each completion once, and keeps what it said: training then needs no teacher.

    The completions are those of the dataset with `lmbda` below 1; else they are generated once, and kept beside. Takes
    the options of `trl-opsd train` too, and goes on where an earlier run ended. Train with `teacher_targets`.
    """
    from trl_opsd.cli import targets as command  # imports torch
    from trl_opsd.cli.launch import run

    words = ["targets", str(config), "--out", str(out), *(["--top-k", str(top_k)] if top_k else [])]
    work = partial(command.main, out=str(out), top_k=top_k)
    given = [] if "--config" in context.args else ["--config", str(config)]  # there, in a process of a launch
    run([*given, *context.args], "trl-opsd targets", traceback=context.obj, words=words, work=work)


def audit(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML file of `trl-opsd train`.")],
    rows: Annotated[int, typer.Option(min=4, help="Rows that the student completes.")] = 32,
) -> None:
    """Tells before a training whether its teacher will help, from a few dozen completions of the student.

    What it says of each token and how much of that is noise, whether it writes better completions itself, and whether
    it recovers from the student's mistakes. Takes the options of `trl-opsd train` too, such as
    `--teacher_model_name_or_path` for another teacher; runs in one process, and changes nothing.

    Exit status: 0, 1 if the verdict is neither helps nor unknown, 2 for a wrong option, model or row.
    """
    from trl_opsd.cli.audit import document, of_run  # imports torch

    with redirect_stdout(sys.stderr):  # what libraries print is not part of the answer
        found = document(of_run(["--config", str(config), *context.args], rows))
    _answer(found, found["verdict"]["word"] in ("helps", "unknown"))


def doctor(
    student: Annotated[
        str | None, typer.Argument(help="Folder or Hub id of the student. Default: that of `--config`.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Argument(help="Folder or Hub id of the teacher; the student's for self-distillation.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of `trl-opsd train`: sets how to load the models, and is checked too."),
    ] = None,
) -> None:
    """Checks whether a student can be distilled from a teacher, before spending GPU time.

    Starts a training with all of its checks, and takes a step; checks the chat template, the teacher's states, and the
    loss against its float64 reference. Models are loaded in float32.

    Exit status: 0 if no check failed, 1 if one failed, 2 for a wrong option, or a student without a tokenizer.
    """
    from trl_opsd.cli.doctor import document, examine, pair_of

    with redirect_stdout(sys.stderr):
        found = document(pair := pair_of(student, teacher, config), examine(pair))
    _answer(found, found["ready"])


class Engine(StrEnum):
    """What writes completions."""

    transformers = "transformers"
    vllm = "vllm"
    server = "server"


def plan(
    student: Annotated[str, typer.Argument(help="Folder, config.json or Hub id of the student.")],
    teacher: Annotated[
        str | None, typer.Argument(help="Folder, config.json or Hub id of the teacher. Default: self-distillation.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    gpu_memory: Annotated[float, typer.Option(min=0.001, help="Memory of each device, in GB (1e9 bytes).")] = 80.0,
    host_memory: Annotated[float | None, typer.Option(min=0.001, help="Host memory, in GB.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per optimizer step and device.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens per prompt, with those of its images.")] = 512,
    length: Annotated[int, typer.Option(min=1, help="Tokens per completion.")] = 512,
    engine: Annotated[
        Engine | None,
        typer.Option(help="What generates; `vllm` in the same process. Default: vllm if it fits, else transformers."),
    ] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="LoRA rank, on all linear layers.")] = None,
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16 instead of float32.")] = True,
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing.")] = True,
) -> None:
    """Estimates from the configs of both models whether a training fits, with which options, or what is too large.

    Assumes AdamW, and loads no weights. Prints GB of each device.

    Exit status: 0 if it fits, 1 if it does not, 2 for bad usage.
    """
    from trl_opsd.cli.plan import Load, planned

    load = Load(gpus, batch, prompt, length, bf16, checkpointing, lora, int(gpu_memory * 1e9))
    found = planned(student, teacher or student, load, host_memory and host_memory * 1e9, engine)
    _answer(found, found["fits"])


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The `output_dir` of a training, or a checkpoint.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output file. Default: report.html in RUN_DIR.")
    ] = None,
) -> None:
    """Writes the report of a run: curves and, if it was trained with `report: true`, its completions token by token.

    One self-contained HTML page; also for a run that is in progress or was killed.

    Exit status: 0, or 2 if there is nothing to report.
    """
    from trl_opsd.report.page import write

    typer.echo(str(write(run, output)))


class _Document(yaml.SafeDumper):
    """Writes the mappings of a list on one line each, as rows of a table."""


def _rows(dumper: yaml.SafeDumper, rows: list[Any]) -> yaml.SequenceNode:
    table = dumper.represent_sequence("tag:yaml.org,2002:seq", rows, flow_style=False)
    for row in table.value:
        row.flow_style = True
    return table


_Document.add_representer(list, _rows)


def _answer(found: Mapping[str, Any], is_yes: bool) -> NoReturn:
    """Prints what a command has found as YAML, and ends it, with status 1 where the answer is no."""
    print(yaml.dump(found, Dumper=_Document, sort_keys=False, allow_unicode=True, width=120))
    raise typer.Exit(0 if is_yes else 1)


TRACEBACK = "--traceback"


@contextmanager
def explained(command: Callable[[], str], whole: bool) -> Iterator[None]:
    """Ends a command with one sentence where the error explains itself: status 2 for a wrong argument, 1 for a failed
    run. Any other error, a bug, is raised, and with `whole` all are; `command` returns how the sentence begins.
    """
    try:
        yield
    except Exception as error:
        if whole or not _is_explained(error):
            raise
        said = [f"{command()}: error: {error}", "`--traceback` shows where it was raised."]
        print(*said, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, OPSDError) else 2)


def _is_explained(error: Exception) -> bool:
    """Whether this error was written for a user: it is ours, the system's, or was raised by a `raise` statement."""
    if isinstance(error, JSONDecodeError | ModuleNotFoundError):  # of an option that takes a dict; of an extra
        return True
    if isinstance(error, ValueError | TypeError | ImportError):
        return (traceback.extract_tb(error.__traceback__)[-1].line or "").startswith("raise")
    return isinstance(error, OPSDError | OSError) and not isinstance(error, BrokenPipeError)  # of `| head`


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
    help="On-policy distillation for the Hugging Face ecosystem: train, check, plan and report.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(metadata.version("trl_opsd"))
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    __: Annotated[
        bool, typer.Option(TRACEBACK, help="Print errors with a traceback; allowed at any position.")
    ] = False,
) -> None:
    """Options before a command."""


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)(train)
for takes_more in (targets, audit):
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(takes_more)
for command in (doctor, plan, report):
    app.command()(command)


def main() -> None:
    """Runs the command line of this process, and ends it."""
    app(prog_name="trl-opsd")
