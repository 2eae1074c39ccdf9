"""The checks of `benchmarks/gpu.py`: which there are, in which order, and how long each may take on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHECKS", "LATER", "Check"]


@dataclass(frozen=True, slots=True)
class Check:
    """A function of a module that is given a [`~gpu_checks.findings.Findings`] and runs in a process of its own."""

    place: str
    """`module:function`."""
    limit: float
    """Seconds after which it is ended."""
    about: str
    alone: bool = False
    """Whether its process is a new one that imports everything again, instead of a fork."""


MACHINE = Check("gpu_checks.ceilings:machine", 60, "what there is")
"""Says what all others run on."""

CHECKS = {
    "ceilings": Check("gpu_checks.ceilings:ceilings", 15, "what memory, products and the bus reach at best"),
    "loss_speed": Check("gpu_checks.losses:loss_speed", 35, "time and peak of the loss against TRL's"),
    "steps": Check("gpu_checks.training:steps", 60, "optimizer steps against TRL's, and how busy the GPU is"),
    "compiled": Check("gpu_checks.training:compiled", 80, "steps with decoder layers compiled, against eager ones"),
    "attention": Check("gpu_checks.attention:attention", 30, "ragged rows without a mask, with one, and packed"),
    "precision": Check("gpu_checks.precision:precision", 35, "dtypes under bf16=True, and waits for the device"),
    "losses": Check("gpu_checks.losses:losses", 35, "errors against float64, the kernel, strides of the products"),
    "teacher": Check("gpu_checks.placements:teacher", 40, "a teacher resident, visiting whole, and layer by layer"),
    "generation": Check("gpu_checks.rollouts:generation", 30, "tokens and speed of generate, not compiled"),
    "contrast": Check("gpu_checks.objectives:contrast", 25, "a target moved away from another, and an anchor"),
    "bytes": Check("gpu_checks.objectives:by_bytes", 35, "a student with another tokenizer, with forks and without"),
    "resume": Check("gpu_checks.training:resume", 15, "a run continued from its checkpoint"),
    "pictures": Check("gpu_checks.pictures:pictures", 15, "rows with pictures, against the CPU"),
}
"""By name, the most telling of few seconds first: a budget that runs out leaves out the last. It has room for all."""

LATER = {
    "vllm_full": Check("gpu_checks.engines:vllm_full", 120, "an engine that sleeps, sent all weights", alone=True),
    "vllm_adapter": Check("gpu_checks.engines:vllm_adapter", 120, "an engine that sleeps, sent adapters", alone=True),
    "rollouts": Check("gpu_checks.rollouts:rollouts", 200, "speed of generate, compiled"),
}
"""Those that run by their name alone: engines start and compile for minutes.

An engine is alone, as vLLM decides by what its process has imported and used whether the processes that it starts are
forks, and reads its environment when it is imported.
"""
