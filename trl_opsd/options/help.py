"""Help of command lines, taken from the docstring of a dataclass, so that an option is described in one place."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import getdoc
from types import MappingProxyType
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])

_ENTRY = re.compile(r"^ {4}(\w+) \(.*\):\n((?: {8}.*\n)+)", re.MULTILINE)
"""One parameter of a docstring in TRL's format: its name, and what it means."""

_REFERENCE = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]")
"""A name that a page of documentation would link."""


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
