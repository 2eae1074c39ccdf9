"""Notices options that are changed after they were read, or that differ between processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, Self

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.options.table import BUILD, LIVE, START, TRANSFORMERS, Option, table


def option_values(args: DistillationConfig) -> dict[str, Any]:
    """The options as they are now; dicts and lists are copied, so that a change in them shows."""
    values = {one.name: getattr(args, one.name) for one in fields(args)}
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in values.items()}


def shared_options(args: DistillationConfig) -> dict[str, Any]:
    """The options that decide how one student is trained, as far as they can be compared between processes."""
    options = table(type(args))
    decide = [name for name, one in options.items() if name not in TRANSFORMERS or one.read is not LIVE]
    alike = sorted(name for name in decide if not options[name].may_differ)
    plain = (str, int, float, dict, list, type(None))
    return {name: value for name in alike if isinstance(value := getattr(args, name), plain)}


def check_same_options(each: Sequence[dict[str, Any]]) -> None:
    """Raises `ValueError` for an option that differs between processes, whose students would become different ones."""
    for process, options in enumerate(each):
        for name, value in options.items():
            if value != each[0].get(name):
                raise ValueError(
                    f"`{name}` is {value!r} in process {process} and {each[0].get(name)!r} in process 0, but all "
                    "processes train one student: give all the same. Each draws its own samples with one `seed`."
                )


class ReadOnce:
    """Options that are not read again, with the values they had."""

    def __init__(self, args: DistillationConfig, names: Collection[str], when: str, instead: str) -> None:
        self._when, self._instead, self._options = when, instead, table(type(args))
        self._then = {name: value for name, value in option_values(args).items() if name in names}

    @classmethod
    def by_trainer(cls, args: DistillationConfig) -> Self:
        """The options that a trainer has read when it was built; further ones of a subclass are the user's."""
        options = table(type(args))
        names = {name for name in DistillationConfig.__annotations__ if name not in options}
        names |= {name for name, one in options.items() if one.read is BUILD}
        return cls(args, names, "the trainer was built", "build the trainer with that value")

    @classmethod
    def by_training(cls, args: DistillationConfig) -> Self:
        """The options that a training has read when it began."""
        names = [name for name, one in table(type(args)).items() if one.read is START]
        return cls(args, names, "the training began", "change it between two trainings")

    @property
    def names(self) -> set[str]:
        return set(self._then)

    def check(self, args: DistillationConfig) -> None:
        """Raises `ValueError` for a change, which would have no effect, or break what has begun."""
        for name, then in self._then.items():
            now = getattr(args, name)
            if now != then:
                instead = self._options.get(name, Option()).instead or self._instead
                raise ValueError(
                    f"`args.{name}` was {then!r} when {self._when}, where it was read, and is {now!r} now, "
                    f"which has no effect: {instead}, or restore it."
                )
