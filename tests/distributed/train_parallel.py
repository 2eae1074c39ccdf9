"""Trains the variants of a launch with a `parallelism_config` in its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import variants
from support import tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trl_opsd import OPSDTrainer


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch file, its number of processes, and the variants it trains."""

    config: str
    processes: int
    variants: tuple[str, ...]


LAUNCHES = {
    "hsdp": Launch("hsdp_cpu", 4, ("full", "full, tied head, own ema", "lora, own ema")),
    "sp": Launch("sp_cpu", 2, ("full", "lora, own ema")),
}
RESUMED = "full, resumed"
"""The first variant, stopped after the first step and resumed."""


def build(folder: Path, name: str, processes: int, **options: Any) -> OPSDTrainer:
    rows = max(2, processes)  # of the four rows of a step, those that are read at once
    return variants.build(folder, {"rows": rows, **variants.ALONE[name]}, processes, **options)


def tokens_read(trainer: OPSDTrainer) -> list[list[int]]:
    """The shape of each batch that the student will read with gradients, filled while it trains."""
    read: list[list[int]] = []

    def note(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if module.training:
            read.append(list(inputs[0].shape))

    trainer.model.get_input_embeddings().register_forward_pre_hook(note)
    return read


def train(folder: Path, launch: str) -> dict[str, Any]:
    """Trains the variants of a launch in one of its processes."""
    found: dict[str, Any] = {"losses": {}, "tokens": {}, "trained": {}}

    def run(name: str, trainer: OPSDTrainer, checkpoint: Path | None = None) -> None:
        found["tokens"][name] = tokens_read(trainer)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        found["trained"][name] = variants.arrays(trainer)
        found["losses"][name] = tiny.logged(trainer, "loss")
        if trainer.accelerator.is_main_process:
            found["described"] = repr(trainer)
        found["placed"] = sorted({_placed(one) for one in trainer.model.parameters()})
        trainer.accelerator.wait_for_everyone()

    processes = LAUNCHES[launch].processes
    first, *others = LAUNCHES[launch].variants
    saved = {"save_strategy": "steps", "save_steps": 1}
    run(first, build(folder, first, processes, **saved))
    run(RESUMED, build(folder, first, processes), folder / "out" / "checkpoint-1")
    for name in others:
        run(name, build(folder, name, processes))
    return found


def _placed(parameter: Tensor) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "whole"
