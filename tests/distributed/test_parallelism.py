"""One process and several with a `parallelism_config` learn the same."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import variants
from support import forks, tiny
from torch.distributed.tensor import DTensor

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]

TOLERANCE = 1e-5
"""A tenth of one step of AdamW at a learning rate of 1e-4."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch file and its processes, the variants they train, what describes it, and how a tensor is placed."""

    config: str
    processes: int
    variants: tuple[str, ...]
    described: str
    placed: str


LAUNCHES = {
    "hsdp": Launch(
        *("hsdp_cpu", 4, ("full", "full, tied head, own ema", "lora, own ema")),
        *("4, FSDP2, on cpu", "(Replicate(), Shard(dim=0))"),
    ),
    "sp": Launch(
        *("sp_cpu", 2, ("full", "lora, own ema"), "2, DeepSpeed ZeRO-3, 2 per row in training, on cpu", "whole"),
    ),
}
RESUMED = "full, resumed"
"""The first variant, stopped after the first step and resumed."""


def tokens_read(trainer):
    """The shape of each batch that the student will read with gradients, filled while it trains."""
    read = []

    def note(module, inputs):
        if module.training:
            read.append(list(inputs[0].shape))

    trainer.model.get_input_embeddings().register_forward_pre_hook(note)
    return read


def train(folder, launch):
    """Trains the variants of a launch in one of its processes."""
    found = {"losses": {}, "tokens": {}, "trained": {}}
    saves = {"save_strategy": "steps", "save_steps": 1}
    first, *others = launch.variants
    for name, of, given in ((first, first, saves), (RESUMED, first, {}), *((one, one, {}) for one in others)):
        rows = max(2, launch.processes)  # of the four rows of a step, those that are read at once
        trainer = variants.build(folder, {"rows": rows, **variants.ALONE[of]}, launch.processes, **given)
        found["tokens"][name] = tokens_read(trainer)
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-1") if name == RESUMED else None)
        found["trained"][name] = variants.arrays(trainer)
        found["losses"][name] = tiny.logged(trainer, "loss")
        if trainer.accelerator.is_main_process:
            found["described"] = repr(trainer)
        parameters = trainer.model.parameters()
        found["placed"] = {str(one.placements) if isinstance(one, DTensor) else "whole" for one in parameters}
        trainer.accelerator.wait_for_everyone()
    return found


@pytest.mark.parametrize("name", ["sp", pytest.param("hsdp", marks=pytest.mark.long)])
def test_processes_learn_what_one_learns(name, tmp_path):
    variants.save_models(tmp_path)
    launch, differences = LAUNCHES[name], {}
    found = forks.results(launch.config, train, tmp_path, launch, processes=launch.processes)[0]
    for variant in launch.variants:
        alone = variants.build(tmp_path, variants.ALONE[variant], processes=1)
        before = {key: array.copy() for key, array in variants.arrays(alone).items()}
        read = tokens_read(alone)
        alone.train()
        learned = variants.arrays(alone)
        losses = tiny.logged(alone, "loss")
        assert variants.largest_difference(before, learned) > 20 * TOLERANCE, f"{variant} learns nothing"
        for same in (variant, RESUMED) if variant == launch.variants[0] else (variant,):
            differences[same] = variants.largest_difference(found["trained"][same], learned)
            assert found["losses"][same] == pytest.approx(losses, abs=TOLERANCE), same
        if name == "sp":
            _check_divided(found["tokens"][variant], read)
    assert max(differences.values()) <= TOLERANCE, differences
    assert launch.described in found["described"]
    assert found["placed"] == {launch.placed}


def _check_divided(found, alone):
    """One process reads both micro-batches of a step whole; each of two the halves of four, of a row each."""
    assert found.pop(0) == [1, 8], "ZeRO-3 examines the student by eight tokens, in each process by itself"
    steps = len(alone) // 2
    assert [rows for rows, _ in found] == [1] * 4 * steps
    for step in range(steps):
        longest = max(length for _, length in alone[2 * step : 2 * step + 2])
        lengths = [length for _, length in found[4 * step : 4 * step + 4]]
        assert max(lengths) <= -(-(longest - 1) // 2), "a process reads more than its half of a row"
