"""Runs probes, which try something before it is relied on: a trainer raises the first failure, `doctor` collects all.

Knows neither models nor engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Literal, TypeVar

import torch

Subject = TypeVar("Subject")

CANNOT_RUN = (AttributeError, TypeError, LookupError, AssertionError, NotImplementedError, RuntimeError)
"""Errors raised by a forward that expects other inputs."""


class Doubt(Exception):
    """Something that works, but may not be intended."""


def _as_measured(subject: Any, measured: Any) -> str:
    return str(measured)


@dataclass(frozen=True, slots=True)
class Probe(Generic[Subject]):
    """Something to try. Called with its subject, returns what was found, or raises what is wrong with it."""

    name: str
    run: Callable[[Subject], Any]
    """Measures."""
    expected: Callable[[Subject, Any], str] = _as_measured
    """Judges what was measured: says it, or raises a `ValueError`, or a [`Doubt`]."""
    cannot: str = ""
    """What the subject cannot do if `run` raises one of `errors`."""
    remedy: str = ""
    """What to do then."""
    errors: tuple[type[Exception], ...] = ()
    needs: tuple[str, ...] = ()
    """Probes whose failure this one would only repeat."""

    def __call__(self, subject: Subject) -> str:
        try:
            measured = self.run(subject)
        except self.errors as error:
            # The trainer explains this one; it is not the subject's fault.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"{subject} cannot {self.cannot}, {type(error).__name__}: {error}. {self.remedy}"
            ) from error
        return self.expected(subject, measured)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a probe."""

    name: str
    verdict: Literal["ok", "warning", "failed", "skipped"]
    said: str
    seconds: float


def require(probes: Iterable[Probe[Subject]], subject: Subject) -> None:
    """Raises the first failure; a doubt is none."""
    for probe in probes:
        try:
            probe(subject)
        except Doubt:
            continue


def findings(
    probes: Iterable[Probe[Subject]], subject: Subject, begin: Callable[[str], None] = lambda name: None
) -> Iterator[Finding]:
    """Results of all probes, in their order, also after a failure; `begin` is called with the name of each."""
    failed: set[str] = set()
    for probe in probes:
        begin(probe.name)
        if lacking := [name for name in probe.needs if name in failed]:
            found = Finding(probe.name, "skipped", f"Needs: {', '.join(lacking)}.", 0.0)
        else:
            found = _tried(probe, subject)
        if found.verdict in ("failed", "skipped"):
            failed.add(probe.name)
        yield found


def _tried(probe: Probe[Subject], subject: Subject) -> Finding:
    start, verdict = perf_counter(), "ok"
    try:
        said = probe(subject)
    except Doubt as doubt:
        verdict, said = "warning", str(doubt)
    except Exception as error:  # whatever a model or an engine raises is a finding
        verdict, said = "failed", str(error) or type(error).__name__
    return Finding(probe.name, verdict, " ".join(said.split()), round(perf_counter() - start, 2))  # type: ignore[arg-type]
