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


CHECKS = {
    "ceilings": Check("gpu_checks.ceilings:ceilings", 30, "what memory, products and the bus reach at best"),
    "losses": Check("gpu_checks.losses:losses", 60, "errors against float64, the kernel, strides of the products"),
    "loss_speed": Check("gpu_checks.losses:loss_speed", 45, "time and peak of the loss against TRL's"),
    "attention": Check("gpu_checks.attention:attention", 35, "ragged rows without a mask, with one, and packed"),
    "precision": Check("gpu_checks.precision:precision", 45, "dtypes under bf16=True, and waits for the device"),
    "contrast": Check("gpu_checks.objectives:contrast", 35, "a target moved away from another, and an anchor"),
    "bytes": Check("gpu_checks.objectives:by_bytes", 45, "a student with another tokenizer"),
    "teacher": Check("gpu_checks.placements:teacher", 55, "a teacher resident, visiting whole, and layer by layer"),
    "steps": Check("gpu_checks.training:steps", 65, "five optimizer steps against TRL's"),
    "pictures": Check("gpu_checks.pictures:pictures", 35, "rows with pictures, against the CPU"),
    "resume": Check("gpu_checks.training:resume", 30, "a run continued from its checkpoint"),
}
"""By name, the most telling of few seconds first: a budget that runs out leaves out the last. It has room for all."""

LATER = {
    "vllm_full": Check("gpu_checks.engines:vllm_full", 120, "an engine that sleeps and is sent all weights"),
    "vllm_adapter": Check("gpu_checks.engines:vllm_adapter", 120, "an engine that sleeps and is sent an adapter"),
    "rollouts": Check("gpu_checks.rollouts:rollouts", 200, "tokens and speed of generate, compiled and not"),
}
"""Those that run by their name alone: engines start and compile for minutes."""
