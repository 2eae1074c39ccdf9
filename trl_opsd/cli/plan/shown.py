"""Formats a plan: bytes by part and phase, seconds, other placements, why it does not fit, and the options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Column, Table

from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.cli.plan.memory import SERVER, SHARE, TRANSFORMERS, Load, Plan, Rates, loss_tile, seconds
from trl_opsd.cli.plan.shapes import Shape


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request for a plan."""

    sources: tuple[str, str]
    """Student and teacher, as they were named."""
    shapes: tuple[Shape, Shape]
    load: Load
    rates: Rates
    memory: float
    """Bytes of each device."""
    base: str | None = None
    """The base of a teacher that is an adapter."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """Where the teacher may be kept, in the words of `Choice`; all places, if none is named."""
        lends = self.load.lora is not None
        if self.base is not None:
            is_students = lends and Path(self.base).resolve() == Path(self.sources[0]).resolve()
            return (*["shared"] * is_students, "none", "cpu", "stream")
        return ("itself",) * (lends and self.sources[0] == self.sources[1])

    @property
    def seeing(self) -> list[tuple[str, Shape]]:
        """Student and teacher with their roles, if they read images."""
        return [(role, one) for role, one in zip(("student", "teacher"), self.shapes, strict=True) if one.images.tokens]

    def seconds(self, plan: Plan) -> dict[str, float]:
        """Seconds of a plan by phase."""
        return seconds(*self.shapes, self.load, plan.choice, self.rates)


def options(plan: Plan, request: PlanRequest) -> dict[str, Any]:
    """A plan as the options of `trl-opsd train`."""
    load, choice, dtype = request.load, plan.choice, "bfloat16" if request.load.half else "float32"
    of_engine = {"use_vllm": True, "vllm_max_model_length": load.row(request.shapes[0])}
    of_adapter = {"use_peft": True, "lora_r": load.lora, "lora_target_modules": ["all-linear"]}
    address = f"http://127.0.0.1:{8001 if choice.engine == SERVER else 8000}"
    kept = "none" if choice.teacher == "shared" else choice.teacher
    here = {"teacher_model_name_or_path": request.sources[1], "teacher_dtype": dtype, "teacher_offload": kept}
    groups: list[tuple[Any, dict[str, Any]]] = [
        (choice.engine != TRANSFORMERS, of_engine),
        (choice.engine == SERVER, {"vllm_mode": "server"}),
        (choice.engine not in (TRANSFORMERS, SERVER), {"vllm_gpu_memory_utilization": plan.engine_share}),
        (choice.sleeps, {"vllm_enable_sleep_mode": True}),
        (load.lora, of_adapter),
        (True, {"itself": {"teacher_model_kind": "base"}, "served": {"teacher_server_url": address}}.get(
            choice.teacher, here)),
    ]  # fmt: skip
    return {
        "model_name_or_path": request.sources[0],
        "dtype": dtype if load.lora else "float32",
        "per_device_train_batch_size": choice.micro,
        "gradient_accumulation_steps": load.batch // choice.micro,
        "max_completion_length": load.length,
        CHECKPOINTING: load.checkpointing,
        "bf16": load.half,
        **{name: value for applies, group in groups if applies for name, value in group.items()},
    }


def accelerate_file(plan: Plan, gpus: int) -> str:
    """The accelerate file of a plan, for its number of devices; empty for a training in one process."""
    if plan.choice.sharding == "single":
        return ""
    text = (files("trl_opsd") / "accelerate_configs" / f"{plan.choice.sharding}.yaml").read_text(encoding="utf-8")
    return re.sub(r"(?m)^num_processes: .*$", f"num_processes: {gpus}", text)


def command(plan: Plan, gpus: int) -> str:
    """The command that launches a plan."""
    sharding, processes = plan.choice.sharding, f" --num_processes {gpus}"
    return f"trl-opsd train --config run.yaml --accelerate_config {sharding}{'' if sharding == 'single' else processes}"


def _placed(plan: Plan, gpus: int) -> dict[str, Any]:
    choice = plan.choice
    found = {"sharding": choice.sharding, "teacher": choice.teacher, "engine": choice.engine}
    return {**found, "gpus": gpus + plan.servers, "host": plan.host, "fits": plan.fits}


def document(plan: Plan, plans: Sequence[Plan], request: PlanRequest) -> str:
    """A plan as JSON; all bytes are those of one device."""
    gpus = request.load.gpus
    found = {
        **_placed(plan, gpus),
        "estimate": True,
        "command": command(plan, gpus),
        "memory": int(request.memory),
        "usable": int(SHARE * request.memory),
        "phases": plan.phases,
        "seconds": request.seconds(plan),
        "reason": None if plan.fits else reason(plan, request.memory),
        "images": {role: asdict(shape.images) for role, shape in request.seeing},
        "options": options(plan, request),
        "accelerate_file": accelerate_file(plan, gpus),
        "placements": [{**_placed(one, gpus), "micro_batch": one.choice.micro, "peak": one.peak[1]} for one in plans],
    }
    return json.dumps(found, indent=2)


def reason(plan: Plan, memory: float) -> str:
    """Why a plan does not fit, in a sentence."""
    phase, peak = plan.peak
    part, size = max(plan.phases[phase].items(), key=lambda one: one[1])
    if peak <= SHARE * memory:
        return f"Offloading needs {_amount(plan.host)} of host memory, more than the machine has."
    return (
        f"The phase `{phase}` needs at least {_amount(peak)} per device, but {_amount(SHARE * memory)} are usable; the "
        f"largest part is `{part}` with {_amount(size)}."
    )


def _unit(bytes_: float) -> tuple[float, str]:
    return (1e9, "GB") if bytes_ >= 1e9 else (1e6, "MB")


def _amount(bytes_: float) -> str:
    size, name = _unit(bytes_)
    return f"{bytes_ / size:.1f} {name}"


_REMEDY = (
    "Try more or larger devices, LoRA (`--lora 16`), fewer rows, fewer tokens, or `--host-memory` to allow offloading."
)


def show(plan: Plan, plans: Sequence[Plan], request: PlanRequest) -> None:
    """Prints a plan for a person."""
    console, rates, load, choice = Console(highlight=False), request.rates, request.load, plan.choice
    (size, unit), by_phase = _unit(plan.peak[1]), plan.phases.values()
    title = f"{choice.sharding}, teacher: {choice.teacher}, engine: {choice.engine}, micro-batch: {choice.micro}"
    table = Table(unit, *(Column(phase, justify="right") for phase in plan.phases), title=title, box=None)
    for name in dict.fromkeys(name for parts in by_phase for name, of_part in parts.items() if of_part):
        table.add_row(name, *(f"{parts[name] / size:.2f}" if name in parts else "" for parts in by_phase))
    table.add_row("sum", *(f"{sum(parts.values()) / size:.2f}" for parts in by_phase), style="bold")
    table.add_row("seconds", *(f"{value:.2f}" for value in request.seconds(plan).values()))
    console.print(table)
    console.print(
        f"Estimates per device, for {load.gpus} device(s) of {request.memory / 1e9:g} GB (1e9 bytes), {SHARE:.0%} "
        f"of it usable. Seconds assume {rates.flops / 1e12:.0f} TFLOP/s, {rates.memory / 1e9:.0f} GB/s of memory "
        f"bandwidth and {rates.link / 1e9:.0f} GB/s from host to device, and exclude traffic between devices. A "
        f"token takes {rates.launch * 1e6:g} µs of host time for each of {load.kernels(request.shapes[0]):,} kernels "
        f"with transformers, and {rates.engine * 1e3:g} ms with an engine besides reading the weights.\n"
    )
    for role, one in request.seeing:
        console.print(
            f"The {role}'s images take {one.images.tokens:,} tokens and {one.images.positions:,} positions of its "
            f"vision tower in each row, by its {one.images.counted_by}.\n"
        )
    size, unit = _unit(max(one.peak[1] for one in plans))
    right = [Column(head, justify="right") for head in ("rows", unit, f"host {unit}", "GPUs")]
    columns: list[Column | str] = ["sharding", "teacher", "engine", *right[:2], "in", *right[2:], "fits"]
    table = Table(*columns, title="Placements", box=None, collapse_padding=True)
    for each in plans:
        (phase, peak), of = each.peak, each.choice
        row = of.sharding, of.teacher, of.engine, str(of.micro), f"{peak / size:.1f}", phase, f"{each.host / size:.0f}"
        table.add_row(*row, str(load.gpus + each.servers), "yes" if each.fits else "no")
    console.print(table)
    if load.gpus > 1:
        console.print("Host memory: teachers `cpu` and `stream` have a copy in each process, `zero3` one for all.")
    if not plan.fits:
        console.print(f"\nDoes not fit in any placement. {reason(plan, request.memory)} {_REMEDY}")
        return
    if plan.servers:
        console.print(f"\nServers need {plan.servers} more device(s): {load.gpus + plan.servers} in all.")
    tokens = choice.micro * load.row(request.shapes[0])
    tile = loss_tile(*request.shapes, choice.micro * load.length, load)
    console.print(
        f"\nFits with micro-batches of {tokens:,} tokens; the loss computes logits for {tile:,} tokens at a time. Put "
        f"these options and a `dataset_name` into run.yaml, then run [bold]{command(plan, load.gpus)}[/]\n",
        soft_wrap=True,
    )
    console.print(yaml.safe_dump(options(plan, request), sort_keys=False), markup=False, soft_wrap=True)
    if text := accelerate_file(plan, load.gpus):
        console.print(f"The accelerate file `{choice.sharding}`, included in this package:\n")
        console.print(text, markup=False, soft_wrap=True)
