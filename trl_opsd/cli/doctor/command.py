"""The function behind `trl-opsd doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    student: Annotated[str, typer.Argument(help="Folder or Hub id of the student.")],
    teacher: Annotated[str, typer.Argument(help="The same of the teacher; the student's, if it teaches itself.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML file of `trl-opsd train`, whose settings are examined too.")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Two small random layers in place of each model's own; heads stay as large.")
    ] = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Start vLLM too, and compare what it writes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examines whether a student can be distilled from a teacher, before that is paid for.

    Tokenizers and chat template; heads, padding and gradients of both models; the loss against its float64 reference;
    precision; what engines write; settings and versions. Models are loaded in float32.

    Exit status: 0 if all checks passed or only warned, 1 if one failed, 2 if the models cannot be loaded.
    """
    import sys
    from contextlib import redirect_stdout

    from trl_opsd.cli.doctor.examined import examine
    from trl_opsd.cli.doctor.pair import load_pair
    from trl_opsd.cli.doctor.shown import document, show

    with redirect_stdout(sys.stderr):  # what libraries print is not part of the answer
        try:
            pair = load_pair(student, teacher, tiny)
        except (OSError, ValueError, KeyError) as error:
            typer.echo(f"trl-opsd doctor: {error}", err=True)
            raise typer.Exit(2) from None
        findings = examine(pair, None if config is None else str(config), vllm)
    print(document(pair, findings)) if as_json else show(pair, findings)
    raise typer.Exit(int(any(one.verdict == "failed" for one in findings)))
