"""Counts what the host waits for in one optimizer step of four micro-batches, by the part of the step."""

from __future__ import annotations

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from device_cases import GROUPS, build, by_bytes, contrast, images
from support import simulated_device, tiny
from support.simulated_device import waits
from transformers import TrainerCallback
from visits import SkipNear

from trl_opsd import OPSDTrainer
from trl_opsd.bytes import teacher as bytewise
from trl_opsd.teacher import comparison

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": dict,
    "images": lambda: images("qwen2_5_vl"),
    "bytes": by_bytes,
    "contrast": contrast,
    "groups": lambda: {
        **GROUPS,
        "reward_weight": 0.5,
        "methods": [SkipNear(100.0)],
        "token_selection": "student_entropy",
        "token_fraction": 0.5,
    },
}
MICRO_BATCHES = 4  # of two rows
PARTS = ("teacher", "student", "loss", "step")


class Waited(NamedTuple):
    """The waits of a part of a step."""

    reads: int
    copies: int
    lines: list[str]


class Last(TrainerCallback):
    """Counts in the last step: the first ones look at what they meet for the first time."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        waits.phase = "step" if state.global_step + 1 == args.max_steps else None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        waits.phase = None


class Counted(OPSDTrainer):
    """What is in no other part is "step"."""

    def teach(self, *args: Any) -> Any:
        with part("teacher"):
            return super().teach(*args)

    def compare(self, *args: Any) -> Any:
        with part("loss"):
            return super().compare(*args)


@contextmanager
def part(name: str) -> Any:
    with waits.during(name if waits.phase else None):
        yield


def counted(folder: Path, names: tuple[str, ...]) -> dict[str, dict[str, Waited] | str]:
    """The waits of each case, by part, or its error. For a process of its own."""
    simulated_device.install()
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simulated_device.NAME}:0"
    warnings.simplefilter("ignore")
    given, found = tiny.options, dict[str, Any]()

    def student(hidden: Callable[..., Any], *args: Any) -> Any:
        with part("student"):
            return hidden(*args)

    with (
        patch.object(tiny, "options", lambda folder, **more: given(folder, use_cpu=False, **more)),
        patch.object(comparison, "completion_hidden", partial(student, comparison.completion_hidden)),
        patch.object(bytewise, "forked_hidden", partial(student, bytewise.forked_hidden)),
        patch.object(bytewise, "completion_hidden", partial(student, bytewise.completion_hidden)),
    ):
        for name in names:
            try:
                found[name] = _waited(folder / name, KINDS[name]())
            except Exception:
                found[name] = traceback.format_exc()
    return found


def _waited(folder: Path, options: dict[str, Any]) -> dict[str, Waited]:
    sizes = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 2}
    one = build(folder, {**options, **sizes}, Counted)
    one.add_callback(Last())
    backward = one.accelerator.backward

    def of_loss(*args: Any, **more: Any) -> None:
        with part("loss"):
            backward(*args, **more)

    one.accelerator.backward = of_loss
    waits.reads.clear()
    waits.copies.clear()
    one.train()
    return {each: _of(each) for each in PARTS}


def _of(part: str) -> Waited:
    kinds = {"read": waits.reads, "copied": waits.copies}
    each = {kind: Counter({line: n for (of, line), n in found.items() if of == part}) for kind, found in kinds.items()}
    lines = [f"{n} x {kind} {line}" for kind, found in each.items() for line, n in found.most_common()]
    return Waited(each["read"].total(), each["copied"].total(), lines)
