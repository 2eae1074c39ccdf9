"""Options as text: what a shell or a YAML file gives, and the help of a command line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from inspect import getdoc
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

from transformers import TrainingArguments

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}
_EXPECTED = {bool: "True or False", int: "an integer", float: "a number"}
_Class = TypeVar("_Class", bound=type[Any])
_ENTRY = re.compile(r"^ {4}(\w+) \(.*\):\n((?: {8}.*\n)+)", re.MULTILINE)
"""One parameter of a docstring in TRL's format: its name, and its description."""
_REFERENCE = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]")
"""A name that a page of documentation would link."""


def convert_text(args: TrainingArguments) -> None:
    """Converts options in place: `"1e-5"` to a number, `"False"` to a boolean, 1e3 to an integer where one is expected.

    YAML 1.1, which PyYAML reads, takes `1e-5` for text, since it has no dot, and `no` for False, also as a strategy.
    Which option is a number is read from the types of the config's fields.
    """
    for name, hint in get_type_hints(type(args)).items():
        kinds = set(get_args(hint) or (hint,)) - {type(None)}
        if len(kinds) == 1 and (kind := kinds.pop()) in _EXPECTED and (value := getattr(args, name)) is not None:
            setattr(args, name, _converted(name, value, kind))
    for name in ("logging_strategy", "eval_strategy", "save_strategy"):
        if getattr(args, name) is False:
            setattr(args, name, "no")


def _converted(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool:
            return _WORDS[value.strip().lower()] if isinstance(value, str) else value
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise ValueError("not a number")
        if kind is float:
            return value if isinstance(value, int) else float(value)
        if isinstance(value, Integral):
            return int(value)
        number = float(value)
        if not math.isfinite(number) or number != int(number):
            raise ValueError("not an integer")
        return int(number)
    except (KeyError, ValueError) as error:
        raise ValueError(f"`{name}={value!r}`: expected {_EXPECTED[kind]}.") from error


def check_json(args: TrainingArguments) -> None:
    """Checks the options that may be given as JSON; transformers parses them, without saying which one is malformed."""
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                json.loads(value)
            except ValueError as error:
                raise ValueError(
                    f"`{name}={value!r}` is not JSON ({error}): put names and texts in double quotes, for instance "
                    '\'{"revision": "main"}\', or pass a dict.'
                ) from None
        elif name.endswith("_kwargs") and not isinstance(value, dict | None):
            raise ValueError(f"`{name}={value!r}`: expected a dict of options, or the JSON of one.")


def settle_loading(args: TrainingArguments) -> None:
    """Gives the dtype in `*_init_kwargs` its present name, in place, and refuses what is said twice there.

    TRL loads a student as `dtype` says, or in float32, and never looks for `torch_dtype`.
    """
    for option in ("model_init_kwargs", "teacher_model_init_kwargs"):
        loading = dict(getattr(args, option) or {})
        if (older := loading.pop("torch_dtype", None)) is not None:
            _check_once("dtype", loading.setdefault("dtype", older), option, "torch_dtype", older)
            setattr(args, option, loading)
    if (revision := args.teacher_model_revision) is not None:
        again = (args.teacher_model_init_kwargs or {}).get("revision", revision)
        _check_once("teacher_model_revision", revision, "teacher_model_init_kwargs", "revision", again)


def _check_once(name: str, value: Any, option: str, key: str, again: Any) -> None:
    if value != again:
        raise ValueError(
            f"`{name}={value!r}` and `{option}={{{key!r}: {again!r}}}` are two values for one thing: remove one of "
            "them."
        )


def with_help(described: _Class) -> _Class:
    """Decorates a dataclass: each field that has no `help` of its own gets its description in the class's docstring.

    `HfArgumentParser` passes it to argparse, which reads `%` as a format.
    """
    meanings = dict(_ENTRY.findall(f"{getdoc(described) or ''}\n"))
    for field in fields(described):
        if field.name in meanings and "help" not in field.metadata:
            meaning = _REFERENCE.sub(r"`\1`", " ".join(meanings[field.name].split())).replace("%", "%%")
            field.metadata = MappingProxyType({**field.metadata, "help": meaning})
    return described
