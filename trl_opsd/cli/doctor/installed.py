"""Checks of settings in a file, and of installed versions."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from trl_opsd.cli.doctor.pair import Pair
from trl_opsd.cli.doctor.verdicts import Doubt
from trl_opsd.cli.train.effects import warn_of_options
from trl_opsd.cli.train.launch import launch_options
from trl_opsd.cli.train.options import OptionParser
from trl_opsd.run.versions import installed_versions, newer_than_tested
from trl_opsd.run.without_effect import described, without_effect


def settings(pair: Pair, file: str) -> str:
    """The settings of a file exist, fit together, and have an effect."""
    models = ["--model_name_or_path", pair.student.source]
    parser = OptionParser(prog="trl-opsd train", launch_options=launch_options())
    with _collected() as warned, redirect_stderr(io.StringIO()) as printed:
        try:
            given = parser.given(["--config", file, *models])
        except SystemExit:
            raise ValueError(printed.getvalue().partition("error: ")[2].partition("\n`trl-opsd")[0]) from None
        warn_of_options(given)
    config = given.config
    teachers = [config.teacher_model_name_or_path or pair.teacher.source]
    if unread := without_effect(config, own_rollout=False, teachers=teachers, optimizers=(None, None), tools=None):
        warned.append(described(config, unread))
    named = config.teacher_model_name_or_path
    if named not in (None, pair.teacher.source):
        warned.append(f"The file names the teacher {named!r}, and {pair.teacher.source!r} was examined.")
    if warned:
        raise Doubt(" ".join(warned))
    return "All are known, fit together and have an effect."


def versions() -> str:
    """Libraries are neither older than what this package asks for nor newer than what it was tested with."""
    outside = [*_outside(), *newer_than_tested(installed_versions())]
    if outside:
        raise Doubt(f"Outside what was tested: {', '.join(outside)}.")
    return ", ".join(f"{name} {number}" for name, number in installed_versions().items())


def _outside() -> Iterator[str]:
    for one in map(Requirement, requires("trl_opsd") or ()):
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(one.name)
        except PackageNotFoundError:
            yield f"{one.name} is not installed"
            continue
        if not one.specifier.contains(found, prereleases=True):
            yield f"{one.name} {found} (asked for: {one.specifier})"


@contextmanager
def _collected() -> Iterator[list[str]]:
    """The warnings of this package, which are not printed meanwhile."""
    found: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("trl_opsd"), Collecting(logging.WARNING)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
