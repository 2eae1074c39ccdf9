"""Searches the placement that fits with the least traffic, and names the largest part of the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trl_opsd.cli.plan.memory import (
    ASLEEP,
    AWAKE,
    SERVER,
    TRANSFORMERS,
    Choice,
    Load,
    Parts,
    engine_bytes,
    host_bytes,
    phases,
    tracer,
)
from trl_opsd.cli.plan.shapes import Shape

SHARE = 0.9
"""Share of a device that may be used; the rest is for the CUDA context, buffers and fragmentation."""

ENGINES = {"transformers": (TRANSFORMERS,), "vllm": (AWAKE, ASLEEP), "server": (SERVER,)}
"""What may generate, by its name on the command line, those with less traffic first."""
_STEP = 0.05
"""Granularity of an engine's share of a device."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement, the memory it needs, and whether that is available."""

    choice: Choice
    phases: dict[str, Parts]
    host: int
    fits: bool
    engine_share: float = 0.0
    """Of a device, for an engine in the same process."""

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most memory, and its bytes on one device."""
        name = max(self.phases, key=lambda phase: sum(self.phases[phase].values()))
        return name, sum(self.phases[name].values())

    @property
    def largest(self) -> tuple[str, int]:
        """The largest part of that phase."""
        parts = self.phases[self.peak[0]]
        name = max(parts, key=lambda part: parts[part])
        return name, parts[name]


def placements(load: Load, host: float | None, shares_weights: bool) -> Iterator[tuple[str, str]]:
    """All placements, those with less traffic first; offloading the student needs a known `host` memory in bytes."""
    shardings = ["single"] if load.gpus == 1 else ["ddp", "zero2", "zero3", "fsdp2"]
    for sharding in [*shardings, *(["zero3_offload"] if host is not None else [])]:
        kept = ["none", "cpu", "stream", *(["zero3"] if sharding.startswith("zero3") else []), "served"]
        yield from ((sharding, teacher) for teacher in (["itself"] if shares_weights else kept))


def divisors(batch: int) -> list[int]:
    """Divisors of the rows of a step, the largest first: micro-batches that divide it evenly."""
    return [rows for rows in range(batch, 0, -1) if batch % rows == 0]


def considered(
    student: Shape,
    teacher: Shape,
    load: Load,
    memory: float,
    host: float | None,
    shares_weights: bool = False,
    engine: str = "transformers",
    activations: Callable[..., int] | None = None,
) -> list[Plan]:
    """A plan for each placement, with the largest micro-batch that fits, or that of one row."""
    traced = activations or tracer(student, load)  # that of a caller has traced some already
    share = engine_share(student, load, memory) if engine == "vllm" else 0.0

    def plan(choice: Choice) -> Plan:
        needed = host_bytes(student, teacher, load, choice)
        parts = phases(student, teacher, load, choice, traced, int(share * memory))
        peak = max(sum(of_phase.values()) for of_phase in parts.values())
        # An unknown host memory is taken as enough for an offloaded teacher.
        fits = peak <= SHARE * memory and (host is None or needed <= SHARE * host)
        return Plan(choice, parts, needed, fits, share)

    found = []
    for sharding, kept in placements(load, host, shares_weights):
        for writes in ENGINES[engine]:
            plans = (plan(Choice(sharding, kept, rows, writes)) for rows in divisors(load.batch))
            last = next(plans)
            while not last.fits and (smaller := next(plans, None)) is not None:
                last = smaller
            found.append(last)
    return found


def engine_share(student: Shape, load: Load, memory: float) -> float:
    """The share of a device that an engine needs, a multiple of 0.05, or more than 1 if it does not fit."""
    return round(math.ceil(engine_bytes(student, load) / memory / _STEP) * _STEP, 2)


def best(plans: Sequence[Plan]) -> Plan:
    """The first that fits without a teacher server, else with one, else the smallest."""
    here = [plan for plan in plans if plan.choice.teacher != "served"]
    return next((plan for plan in [*here, *plans] if plan.fits), None) or min(here, key=lambda plan: plan.peak[1])
