"""The options of a training script: those of `OPSDConfig`, of TRL's parsers, and of the script."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from datasets import Dataset, IterableDataset

from trl_opsd._compat.trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from trl_opsd.config import OPSDConfig
from trl_opsd.options.names import did_you_mean
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import refuse

Splits = Mapping[str, Dataset | IterableDataset]
"""Datasets by the name of a split."""


@with_help
@dataclass
class ExtraArguments:
    """Options that TRL's configs lack."""

    teacher_models: dict | str | None = None
    """Several teachers, names to paths or ids, as a mapping or JSON; the column `teacher` names the one that reads a
    row."""
    experts: dict | str | None = None
    """Teachers with their datasets and metrics, names to `{model, dataset, metric}`: trains the student on all of them,
    measures everybody, and prints a table; see `docs/teachers.md`."""
    dry_run: bool = False
    """Go through every check, one generation batch and one optimizer step, say what was seen, and save nothing."""

    def __post_init__(self) -> None:
        for name in ("teacher_models", "experts"):  # on the command line
            if isinstance(text := getattr(self, name), str):
                with suppress(ValueError):
                    setattr(self, name, json.loads(text))


_FILE = "--config FILE reads any of these options from a YAML file; the command line takes precedence."
_LAUNCHED = (
    " Options of `accelerate launch` are also accepted, here and in the file; --accelerate_config takes a file or the "
    "name of one in this package: zero3, fsdp2, ddp. --traceback prints errors with a traceback."
)

GROUPS = (ExtraArguments, ScriptArguments, OPSDConfig, ModelConfig, DatasetMixtureConfig)
"""The dataclasses whose fields are the options."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run, in the order of `GROUPS`."""

    extra: ExtraArguments
    script: ScriptArguments
    config: OPSDConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


class OptionParser(TrlParser):
    """TRL's parser, which ends the program on an unknown option, also in the YAML file.

    Abbreviations of options are unknown. In a launch of several processes, help and errors are printed once. The file
    may also have `launch_options`, for whoever launches the training.
    """

    def __init__(self, launch_options: Collection[str] = (), **parser: Any) -> None:
        self._elsewhere = launch_options
        super().__init__(
            GROUPS,
            allow_abbrev=False,
            usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
            description=f"{_FILE}{_LAUNCHED if launch_options else ''}",
            **parser,
        )
        self.set_defaults(dtype=None)  # TRL's default would load in float32 what an adapter leaves frozen
        next(one for one in self._actions if one.dest == "dtype").help = (
            "dtype of the student's weights. Defaults to float32, or to bfloat16 for frozen weights under an adapter "
            "when computing in bfloat16."
        )

    def given(self, args: Iterable[str]) -> RunOptions:
        """The options of a run; the command line overrides the file of `--config`, and that defaults of the parser."""
        rest, config = self.read(args)
        os.environ.update({name: str(value) for name, value in config.get("env", {}).items()})
        found = RunOptions(*self.parse_args_into_dataclasses(args=rest))
        named = {*config, *(one.partition("=")[0].removeprefix("--") for one in rest if one.startswith("--"))}
        lora = sorted(one for one in named if one.startswith("lora_"))
        has_none = lora and "use_peft" not in named and not found.model.use_peft
        refuse([(has_none, f"`{', '.join(lora)}` without `use_peft`", "no adapter is made; set it, or remove these")])
        return found

    def check(self, args: Iterable[str]) -> None:
        """Ends the program on a wrong name or kind of value; makes no config, which would start the launch's state."""
        self.parse_args(self.read(args)[0])

    def read(self, args: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
        """The arguments without `--config FILE`, and that file's options, which are defaults now."""
        own = ArgumentParser(add_help=False, allow_abbrev=False)
        own.error = self.error  # type: ignore[method-assign]
        own.add_argument("--config")
        given, rest = own.parse_known_args(list(args))
        config = self._file(given.config) if given.config else {}
        self.set_defaults_with_config(**config)
        return rest, config

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            named = [one.partition("=")[0] for one in unknown if one.startswith("--")]
            hint = f": did you mean --config {unknown[0]}?" * unknown[0].endswith((".yaml", ".yml"))
            self.error(self._unknown("option", named) if named else f"unexpected argument {unknown[0]!r}{hint}")
        return found, []

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}\n`{self.prog} --help` lists all options.", file=sys.stderr, flush=True)
        raise SystemExit(2)

    def _file(self, path: str) -> dict[str, Any]:
        """The options of a YAML file; ends the program on one that is unknown: TRL's error for it has no hint."""
        try:
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.error(f"--config {path}: {error}")
        if not isinstance(config, dict):
            self.error(f"--config {path}: expected a mapping of options to values, got {type(config).__name__}")
        known = {"env", *self._elsewhere, *(action.dest for action in self._actions)}
        if unknown := [str(name) for name in config if name not in known]:
            self.error(f"--config {path}: {self._unknown('key', unknown)}")
        return config

    def _unknown(self, what: str, names: Iterable[str]) -> str:
        """Lists unknown names, each with what to do instead."""
        known = [action.dest for action in self._actions]
        plain = {name: name.removeprefix("--").replace("-", "_") for name in names}
        hints = {name: did_you_mean(one, known) for name, one in plain.items()}
        return "; ".join(f"unknown {what} {name!r}{hint and ': '}{hint}" for name, hint in hints.items())
