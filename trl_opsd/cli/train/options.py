"""The options of a training script: those of `OPSDConfig`, of TRL's parsers, and of the script; and built-in tasks."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

import yaml

from trl_opsd._compat.trl import DatasetConfig, DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from trl_opsd.config import OPSDConfig
from trl_opsd.options.foreign_names import known_elsewhere, nearest, renamed
from trl_opsd.parallel.failure import ends_first, share_tracebacks

if TYPE_CHECKING:
    from trl_opsd import OPSDTrainer
    from trl_opsd.cli.train.script import Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task that `--task NAME` trains on."""

    options: Path
    """A YAML file of options, which the command line and the file of `--config` override."""
    student: str
    """Path of the student, unless another one is named."""
    teacher: str
    """Path of the teacher, unless others are named or the student teaches itself."""
    data: Callable[[], Splits]
    """Loads the splits of its dataset."""
    rewards: Any
    """`reward_funcs` of the trainer."""
    evaluate: Callable[[OPSDTrainer], None]
    """Called before and after training; collective."""


Tasks = Mapping[str, Task]
"""Tasks by name."""


DTYPES = ["auto", "bfloat16", "float16", "float32"]


_STUDENT = "it is called `model_name_or_path`"
_TEACHER = "it is called `teacher_model_name_or_path`, and `teacher_models` for several"
_DATASET = "it is called `dataset_name`, the name or path of a dataset"
_PEFT = "set `use_peft`, and `lora_r`, `lora_alpha`, `lora_target_modules`"
_QUANTIZED = "set `load_in_4bit` or `load_in_8bit`"

HERE = {
    **dict.fromkeys(("model", "model_path", "base_model", "student", "student_model"), _STUDENT),
    "student_model_name_or_path": _STUDENT,
    **dict.fromkeys(("teacher", "teacher_model", "teacher_path"), _TEACHER),
    **dict.fromkeys(("teachers", "teacher_model_names_or_paths"), "it is called `teacher_models`"),
    **dict.fromkeys(("dataset", "train_dataset", "data", "data_path", "train_file", "data_files"), _DATASET),
    "eval_dataset": "`dataset_test_split` names the split that `eval_strategy` evaluates",
    "torch_dtype": "it is called `dtype`; that of the teacher is `teacher_dtype`",
    "revision": "it is called `model_revision`; that of the teacher is `teacher_model_revision`",
    "flash_attn": "it is called `attn_implementation`",
    **dict.fromkeys(("lora", "peft_config", "lora_config", "train_type", "tuner_type", "finetuning_type"), _PEFT),
    "lora_rank": "it is called `lora_r`",
    "config_file": "it is an option of `accelerate launch`, and stands before the script",
    "target_modules": "it is called `lora_target_modules`",
    **dict.fromkeys(("quantization_config", "quantization_bit"), _QUANTIZED),
    **dict.fromkeys(("tokenizer", "processing_class"), "the one beside the student's weights is used"),
}
"""Options of other scripts, and their names in this one, which has more than `OPSDConfig`."""


@dataclass
class ExtraArguments:
    """Options that TRL's configs lack."""

    teacher_models: dict | str | None = field(
        default=None,
        metadata={
            "help": "Several teachers, names to paths or ids, as a mapping or JSON; the column `teacher` names the one "
            "that reads a row."
        },
    )
    teacher_dtype: str = field(
        default="auto",
        metadata={"choices": DTYPES, "help": "dtype of the teacher's weights; 'auto' is that of its checkpoint."},
    )
    teacher_attn_implementation: str | None = field(
        default=None,
        metadata={"help": "Attention implementation of the teacher. If not set, `attn_implementation`."},
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Go through every check, one generation batch and one optimizer step, say what was seen, and save "
            "nothing."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(given := self.teacher_models, str):
            with suppress(ValueError):
                self.teacher_models = json.loads(given)  # other text is rejected below
        if self.teacher_models is None:
            return
        named = self.teacher_models.items() if isinstance(self.teacher_models, dict) else [(None, None)]
        if not named or not all(isinstance(one, str) for pair in named for one in pair):
            raise ValueError(
                f"`teacher_models={given!r}`: expected names and paths or ids, for instance "
                '\'{"math": "Qwen/Qwen2.5-Math-1.5B-Instruct", "code": "Qwen/Qwen2.5-Coder-1.5B-Instruct"}\'.'
            )


_FILE = "--config FILE reads any of these options from a YAML file; the command line goes before it."
_LAUNCHED = (
    " Options of `accelerate launch` may stand among them, also in the file; --accelerate_config takes a file or the "
    "name of one of this package: zero3, fsdp2, ddp. --traceback prints an error with its traceback."
)

GROUPS = (ExtraArguments, ScriptArguments, OPSDConfig, ModelConfig, DatasetMixtureConfig)
"""The dataclasses whose fields are the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options of a run."""

    extra: ExtraArguments
    """Options that TRL lacks."""
    script: ScriptArguments
    """One dataset."""
    config: OPSDConfig
    """The training."""
    model: ModelConfig
    """The student, how it is loaded, and its adapter."""
    mixture: DatasetMixtureConfig
    """Several datasets."""
    task: str | None
    """The built-in task, if one is named."""


class OptionParser(TrlParser):
    """TRL's parser, which ends the program on an unknown option, also in the YAML file.

    Abbreviations of options are unknown. In a launch of several processes, help and errors are printed once.

    Args:
        tasks (`Mapping[str, Task]`, *optional*):
            The built-in tasks by name.
        launch_options (`Collection[str]`, *optional*):
            What the YAML file may also have, for whoever launches the training.
        parser (`Any`):
            What argparse takes.
    """

    def __init__(self, tasks: Tasks | None = None, launch_options: Collection[str] = (), **parser: Any) -> None:
        self.tasks, self._elsewhere = tasks or {}, launch_options
        super().__init__(
            [*GROUPS, *([_task_group(list(self.tasks))] if self.tasks else [])],
            allow_abbrev=False,
            usage=f"%(prog)s [--config FILE]{' [--task TASK]' if self.tasks else ''} [--OPTION VALUE ...]",
            description=f"{_FILE}{_LAUNCHED if launch_options else ''}",
            **parser,
        )
        self.set_defaults(dtype=None)  # TRL's default would load in float32 what an adapter leaves frozen
        next(one for one in self._actions if one.dest == "dtype").help = (
            "dtype of the student's weights. If not set, float32, or bfloat16 for weights that only carry an adapter "
            "and are computed in it."
        )

    def given(self, args: Iterable[str]) -> Given:
        """The options of a run; the command line overrides the file of `--config`, and that a task's own options."""
        share_tracebacks()
        groups = super().parse_args_and_config(self._with_defaults(args))
        names = ("extra", "script", "config", "model", "mixture")
        task = groups[len(names)].task if self.tasks else None
        return Given(**dict(zip(names, groups, strict=False)), task=task)

    def check(self, args: Iterable[str]) -> None:
        """Ends the program on a wrong name or kind of value; makes no config, which would start the launch's state."""
        given = self._with_defaults(args)
        if "--config" in given:
            at = given.index("--config")
            self.set_defaults_with_config(**self._read(given[at + 1]))
            given = [*given[:at], *given[at + 2 :]]
        self.parse_args(given)

    def _with_defaults(self, args: Iterable[str]) -> list[str]:
        """The arguments, with `--config FILE` in two, after checking the file and setting the task's options."""
        own = ArgumentParser(add_help=False, allow_abbrev=False)
        own.error = self.error  # type: ignore[method-assign]
        own.add_argument("--config", action="append", default=[])
        own.add_argument("--task")
        given, _ = own.parse_known_args(args := list(args))
        if len(given.config) > 1:
            self.error(f"--config is given {len(given.config)} times, but only one file is read")
        # The file is checked before TRL's parser, whose error for an unknown key has no hint.
        config = self._read(given.config[0]) if given.config else {}
        if task := self.tasks.get(str(given.task or config.get("task"))):
            self.set_defaults_with_config(**yaml.safe_load(task.options.read_text(encoding="utf-8")))
        return _split(args, "--config")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            named = [one.partition("=")[0] for one in unknown if one.startswith("--")]
            self.error(_unknown("option", named) if named else f"unexpected argument {unknown[0]!r}")
        return found, []

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Numbers are passed as text, so that they are converted as on the command line."""
        ours = {name: value for name, value in config.items() if name not in self._elsewhere}
        return super().set_defaults_with_config(
            **{name: str(value) if type(value) in (int, float) else value for name, value in ours.items()}
        )

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if ends_first():
            print(f"{self.prog}: error: {message}\n`{self.prog} --help` lists all options.", file=sys.stderr)
        raise SystemExit(2)

    def _read(self, path: str) -> dict[str, Any]:
        """The options of a YAML file; ends the program on one that is unknown or of the wrong kind."""
        try:
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.error(f"--config {path}: {error}")
        if not isinstance(config, dict):
            self.error(f"--config {path}: expected a mapping of options to values, got {type(config).__name__}")
        hints = {name: hint for group in self.dataclass_types for name, hint in get_type_hints(group).items()}
        allowed = {action.dest: action.choices for action in self._actions}
        passed = {"env", *self._elsewhere}  # TRL's parser sets environment variables from `env`
        options = {str(name): value for name, value in config.items() if name not in passed}
        problems = [
            _problem(name, value, hints[name], allowed[name]) for name, value in options.items() if name in allowed
        ]
        problems += [_nested(name, value) for name, value in options.items() if name not in allowed]
        problems += [
            _unknown("key", set(one) - {each.name for each in fields(DatasetConfig)}, [DatasetConfig], " of `datasets`")
            for one in options.get("datasets") or ()
            if isinstance(one, dict)
        ]
        if found := [problem for problem in problems if problem]:
            self.error(f"--config {path}: {'; '.join(found)}")
        return config


def _task_group(names: list[str]) -> type:
    """A dataclass with the option that names a built-in task."""
    told = {"choices": names, "help": "Train on a built-in task, with its models, data and options."}
    return make_dataclass("TaskArguments", [("task", str | None, field(default=None, metadata=told))])


def _split(args: Sequence[str], option: str) -> list[str]:
    """Arguments with `--option=value` in two; TRL's parser looks for `--config` alone."""
    return [part for one in args for part in (one.split("=", 1) if one.startswith(f"{option}=") else [one])]


def _nested(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"unknown key {name!r}; options are not nested: write {', '.join(map(repr, value))} at the top level"
    return _unknown("key", [name])


def _unknown(what: str, names: Iterable[str], groups: Iterable[Any] = GROUPS, where: str = "") -> str:
    """Lists unknown names, each with what to do instead, or with up to three similar names."""
    known = [one.name for group in groups for one in fields(group)]
    said = []
    for name in names:
        plain = name.removeprefix("--").replace("-", "_")
        dashes = "--" if name.startswith("--") else ""
        close = " or ".join(repr(dashes + one) for one in nearest(plain, known))
        if elsewhere := HERE.get(plain) or renamed(OPSDConfig).get(plain):
            hint = f": {elsewhere}"
        elif close:
            hint = f", did you mean {close}?"
        else:
            hint = f": {one}" if (one := known_elsewhere(plain, OPSDConfig)) else ""
        said.append(f"unknown {what} {name!r}{where}{hint}")
    return "; ".join(said)


def _problem(name: str, value: Any, hint: Any, choices: Iterable[Any] | None) -> str:
    """What is wrong with the kind of a value, or an empty string."""
    kinds = {getattr(kind, "__origin__", kind) for kind in (get_args(hint) or (hint,))}
    if isinstance(value, Mapping) and dict not in kinds:
        return f"{name!r} is not a group of options: write {', '.join(map(repr, value))} at the top level"
    if isinstance(value, list) and getattr(hint, "__origin__", None) is not list and list not in kinds:
        return f"{name!r} takes one value, got a list of {len(value)}"
    if value is not None and choices is not None and value not in choices:
        return f"{name!r}: invalid choice {value!r}, choose from {', '.join(map(repr, choices))}"
    return ""
