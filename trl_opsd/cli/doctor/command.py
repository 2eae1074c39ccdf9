"""The function behind `trl-opsd doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    student: Annotated[
        str | None, typer.Argument(help="Folder or Hub id of the student; left out, that of `--config`.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Argument(help="The same of the teacher; the student's, if it teaches itself.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of `trl-opsd train`: says how to load the models, and is examined too."),
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
    from trl_opsd.cli.doctor.settings import Settings, collected, read_settings
    from trl_opsd.cli.doctor.shown import document, show
    from trl_opsd.monitor.memory import is_out_of_memory

    with redirect_stdout(sys.stderr):  # what libraries print is not part of the answer
        settings: Settings | ValueError | None = None
        try:
            settings = None if config is None else read_settings(str(config))
        except ValueError as error:
            settings = error
        named = settings.models if isinstance(settings, Settings) else (None, None)
        models = student or named[0], teacher or named[1]
        if None in models:
            why = f" {settings}" if isinstance(settings, ValueError) else ""
            raise ValueError(f"expected STUDENT and TEACHER, or a --config FILE that names both.{why}")
        try:
            loading = settings.loading if isinstance(settings, Settings) else ({}, {})
            pair = load_pair(*models, tiny, loading)  # type: ignore[arg-type]
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, MemoryError) as error:
            more = " Both are loaded in float32, 4 bytes a parameter; --tiny needs little." * is_out_of_memory(error)
            raise ValueError(f"{error}{more}") from error
        with collected():  # what a trainer says of prompts that are not the user's
            findings = examine(pair, settings, vllm)
    print(document(pair, findings)) if as_json else show(pair, findings)
    raise typer.Exit(int(any(one.verdict == "failed" for one in findings)))
