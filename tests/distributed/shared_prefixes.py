"""Reads rows that share prefixes in the processes of one strategy, each its own, and compares them with whole rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import variants
from support import tiny

from trl_opsd import FrozenTeacher
from trl_opsd.teacher import Resident
from trl_opsd.types import Rollout

CPU = torch.device("cpu")
TEACHERS = {
    "sharded": {"teacher_offload": "zero3"},
    "streamed": {"teacher_offload": "stream"},
    "own base": {"teacher_model_kind": "base", "lora": variants.LORA},
}


def rollouts(rank: int) -> list[Rollout]:
    """The rows of a process in each call: other documents, other lengths, and not equally many passes."""
    draw = random.Random(rank)

    def ids(number: int) -> list[int]:
        return [draw.randint(3, tiny.VOCABULARY - 1) for _ in range(number)]

    document, other = ids(130 + 20 * rank), ids(160)
    calls = [[document] * 3, [document] * 2 + [other] * rank, [ids(5)] * (1 + 3 * rank), [other] * 2]
    return [
        Rollout.of([[*one, *ids(4)] for one in call], [ids(draw.randint(1, 6)) for _ in call], CPU) for call in calls
    ]


def read(folder: Path, names: list[str]) -> dict[str, Any]:
    """Of each teacher, the largest distance of a call's targets from those of whole rows, relative to their norm."""
    # before there is a DeepSpeed config, which would split them
    whole = {width: FrozenTeacher(Resident(tiny.qwen2(width, seed), CPU)) for width, seed in ((48, 1), (32, 0))}
    found: dict[str, Any] = {}
    for name in names:
        options = {**TEACHERS[name], "teacher_prefix_cache_gb": 0.1, "max_steps": 1}
        trainer = variants.build(folder, options, processes=2)
        trainer.train()
        apart, given = [], rollouts(trainer.accelerator.process_index)
        for rollout in given:
            expected = whole[32 if name == "own base" else 48].targets(rollout).hidden
            apart.append(float((trainer.teacher.targets(rollout).hidden - expected).norm() / expected.norm()))
        prefix = trainer.teacher.prefix
        found[name] = {"apart": max(apart), "saved": prefix.saved, "kept": len(prefix.kept)}
    return found
