"""Processes whose rows share different prefixes run equally many passes, and get the targets of whole rows."""

from __future__ import annotations

import random

import pytest
import torch
import variants
from support import forks, tiny

from trl_opsd import FrozenTeacher
from trl_opsd.teacher import Resident
from trl_opsd.types import Rollout

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(forks.SECONDS + 60)]
CPU = torch.device("cpu")
TEACHERS = {
    "sharded": {"teacher_offload": "zero3"},
    "streamed": {"teacher_offload": "stream"},
    "own base": {"teacher_model_kind": "base", "lora": variants.LORA},
}


def rollouts(rank):
    """The rows of a process in each call: other documents, other lengths, and not equally many passes."""
    draw = random.Random(rank)

    def ids(number):
        return [draw.randint(3, tiny.VOCABULARY - 1) for _ in range(number)]

    document, other = ids(130 + 20 * rank), ids(160)
    calls = [[document] * 3, [document] * 2 + [other] * rank, [ids(5)] * (1 + 3 * rank), [other] * 2]
    return [
        Rollout.of([[*one, *ids(4)] for one in call], [ids(draw.randint(1, 6)) for _ in call], CPU) for call in calls
    ]


def read(folder, names):
    """Of each teacher, the largest distance of a call's targets from those of whole rows, relative to their norm."""
    # before there is a DeepSpeed config, which would split them
    whole = {width: FrozenTeacher(Resident(tiny.qwen2(width, seed), CPU)) for width, seed in ((48, 1), (32, 0))}
    found = {}
    for name in names:
        options = {**TEACHERS[name], "teacher_prefix_cache_gb": 0.1, "max_steps": 1}
        trainer = variants.build(folder, options, processes=2)
        trainer.train()
        apart = []
        for rollout in rollouts(trainer.accelerator.process_index):
            expected = whole[32 if name == "own base" else 48].targets(rollout).hidden
            apart.append(float((trainer.teacher.targets(rollout).hidden - expected).norm() / expected.norm()))
        prefix = trainer.teacher.prefix
        found[name] = {"apart": max(apart), "saved": prefix.saved, "kept": len(prefix.kept)}
    return found


@pytest.mark.parametrize(
    ("strategy", "teachers"),
    [("zero3_cpu", [*TEACHERS]), ("fsdp2_cpu", ["streamed", "own base"]), ("ddp", ["streamed", "own base"])],
)
def test_different_prefixes_per_process_equal_whole_rows(tmp_path, strategy, teachers):
    variants.save_models(tmp_path)
    found = forks.results(strategy, read, tmp_path, teachers)
    for name in teachers:
        first, second = (found[rank][name] for rank in (0, 1))
        assert max(first["apart"], second["apart"]) < 2e-6
        assert first["kept"] == second["kept"] == 160
        assert first["saved"] == 2 * 130 + 2 * 130 + 160
        assert second["saved"] == 2 * 150 + 160, "rows of two documents share nothing"
