"""Seconds by phase of an optimizer step: operations and bytes, counted, over a device's rates."""

from __future__ import annotations

from dataclasses import dataclass

from trl_opsd.cli.plan.memory import Choice, Load
from trl_opsd.cli.plan.shapes import Shape


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device, per second.

    The defaults are 40 % of the 989 dense bfloat16 TFLOP/s and 60 % of the 3.35 TB/s in NVIDIA's data sheet of the H100
    SXM, and half of what PCIe 5 x16 can carry.
    """

    flops: float = 400e12
    memory: float = 2000e9
    """Bytes read from the device's memory."""
    link: float = 32e9
    """Bytes from the host's memory to the device."""


def seconds(student: Shape, teacher: Shape, load: Load, choice: Choice, rates: Rates) -> dict[str, float]:
    """By phase, on one device; devices work concurrently. Traffic between devices is not counted.

    Completions are generated token by token: each step reads all weights once, and the keys and values so far. A
    forward pass takes 2 operations for each weight and token, training 6, or 4 where the weights are frozen, and 2 more
    with gradient checkpointing.
    """
    itemsize, rows = load.itemsize, load.batch
    tokens = rows * (load.prompt + load.length)
    cache = rows * student.cached(load.prompt + load.length // 2) * itemsize
    writing = load.length * (itemsize * student.parameters + cache) / rates.memory
    passes = (6 if load.lora is None else 4) + (2 if load.checkpointing else 0)
    heads = 2 * rows * load.length * (3 * student.head + teacher.head)
    moved = itemsize * teacher.parameters if choice.teacher in ("cpu", "stream") else 0
    reading = 2 * teacher.parameters * tokens / rates.flops
    return {
        "rollout": 2 * student.parameters * rows * load.prompt / rates.flops + writing,
        "teacher reads": max(reading, moved / rates.link),  # layers are fetched while others compute
        "student learns": (passes * student.parameters * tokens + heads) / rates.flops,
    }
