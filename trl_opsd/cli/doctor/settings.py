"""Reads the settings of a training from its file: its models, and whether the settings are consistent."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

from trl_opsd.cli.train.launch import launch_options
from trl_opsd.cli.train.options import Given, OptionParser
from trl_opsd.cli.train.script import set_loading, warn_of_options
from trl_opsd.models.probes import Doubt
from trl_opsd.options.table import Situation, without_effect, without_effect_in_words
from trl_opsd.teacher.checks import LOCATION_OPTIONS, location

_ATTENTION = ("eager", "sdpa")
"""Attention implementations that compute in float32."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in a file."""

    given: Given
    warnings: tuple[str, ...]
    """Warnings of this package when they are read."""

    @property
    def models(self) -> tuple[str | None, str | None]:
        """Student and teacher, as the file names them; the student twice in self-distillation."""
        student, config = self.given.model.model_name_or_path, self.given.config
        return student, config.teacher_model_name_or_path or (config.teacher_model_kind and student)

    @property
    def loading(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """How student and teacher are loaded, but for their dtypes: location, trusted code, attention."""
        config = self.given.config
        of_student = {"trust_remote_code": config.trust_remote_code, **(config.model_init_kwargs or {})}
        of_teacher = {**(config.teacher_model_init_kwargs or {}), **location(config)}
        return _kept(of_student), _kept(of_teacher if config.teacher_model_kind is None else of_student)


def _kept(loading: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: loading[name] for name in LOCATION_OPTIONS if loading.get(name) is not None}
    attention = loading.get("attn_implementation")
    return {**kept, "attn_implementation": attention} if attention in _ATTENTION else kept


def read_settings(file: str) -> Settings:
    """The settings in a file of `trl-opsd train`; a `ValueError` if the parser rejects it."""
    parser = OptionParser(prog="trl-opsd train", launch_options=launch_options())
    with collected() as warned, redirect_stderr(io.StringIO()) as printed:
        try:
            given = parser.given(["--config", file])
        except SystemExit:  # the parser prints its error for a command line and exits
            raise ValueError(printed.getvalue().partition("error: ")[2].partition("\n`trl-opsd")[0]) from None
        warn_of_options(given)
        set_loading(given.extra, given.config, given.model)
    return Settings(given, tuple(warned))


def judged(settings: Settings | ValueError, student: str, teacher: str) -> str:
    """Settings are known, consistent and have an effect; `student` and `teacher` are those examined."""
    if isinstance(settings, ValueError):
        raise settings
    config, warnings = settings.given.config, [*settings.warnings]
    teachers = [settings.models[1] or teacher]
    if unread := without_effect(Situation(args=config, teachers=teachers)):
        warnings.append(without_effect_in_words(config, unread))
    for role, named, examined in zip(("student", "teacher"), settings.models, (student, teacher), strict=True):
        if named not in (None, examined):
            warnings.append(f"The file names the {role} {named!r}, and {examined!r} was examined.")
    if warnings:
        raise Doubt(" ".join(warnings))
    return "All are known, fit together and have an effect."


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collects the warnings of this package instead of printing them."""
    found: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("trl_opsd"), Collecting(logging.WARNING)
    propagates, logger.propagate = logger.propagate, False  # else handlers of the root logger would print them
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
