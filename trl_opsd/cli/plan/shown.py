"""Formats a plan: bytes by part and phase, seconds, other placements, why it does not fit, and the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Column, Table

from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.cli.plan.memory import (
    ASLEEP,
    SERVER,
    SHARE,
    TRANSFORMERS,
    Load,
    Plan,
    considered,
    loss_tile,
    seconds,
    tracer,
)
from trl_opsd.cli.plan.shapes import Shape, shape_of
from trl_opsd.models.checks import adapter_at


def planned(
    student: str, teacher: str, load: Load, sizes: Sequence[tuple[int, ...]], host: float | None, engine: str | None
) -> dict[str, Any]:
    """The best placement of a training, as a document; `sizes` are those of a row's images. All bytes are a device's.

    Raises:
        ValueError: A row has more tokens than a model can read.
    """
    base, lends = teacher, load.lora is not None
    places: tuple[str, ...] = ()
    if (adapter := adapter_at(teacher, {})) is not None:
        adapter.check("teacher")
        base = adapter.base
        is_students = lends and Path(base).resolve() == Path(student).resolve()
        places = (*["shared"] * is_students, "none", "cpu", "stream")
    elif lends and student == teacher:
        places = ("itself",)
    shapes = {"student": shape_of(student, sizes), "teacher": shape_of(base, sizes)}
    for role, shape in shapes.items():
        if shape.context is not None and load.row(shape) > shape.context:
            raise ValueError(
                f"A row has {load.row(shape)} tokens, but the {role}'s context has {shape.context}: lower `--prompt`, "
                "`--length` or the number of images."
            )
    both, activations = (shapes["student"], shapes["teacher"]), tracer(shapes["student"], load)
    for tried in [engine] if engine else ["vllm", "transformers"]:
        best, *_ = plans = considered(*both, load, host, activations, places, tried)[:5]
        if best.fits and not best.servers:
            break
    tile, _ = loss_tile(*both, best.choice.micro * load.length, load)
    sharding, processes = best.choice.sharding, f" --num_processes {load.gpus}"
    return {
        **_placed(best, load),
        "estimate": True,
        "command": f"trl-opsd train --config run.yaml --accelerate_config {sharding}"
        f"{'' if sharding == 'single' else processes}",
        "memory": load.memory,
        "usable": int(SHARE * load.memory),
        "phases": best.phases,
        "seconds": seconds(*both, load, best.choice),
        "tokens": {"micro_batch": best.choice.micro * load.row(shapes["student"]), "loss_tile": tile},
        "reason": None if best.fits else _reason(best, load),
        "images": {role: asdict(shape.images) for role, shape in shapes.items() if shape.images.tokens},
        "options": options(best, student, teacher, load, shapes["student"]),
        "placements": [_placed(one, load) for one in plans],
    }


def options(plan: Plan, student: str, teacher: str, load: Load, shape: Shape) -> dict[str, Any]:
    """A plan as the options of `trl-opsd train`."""
    choice, dtype = plan.choice, "bfloat16" if load.half else "float32"
    found: dict[str, Any] = {
        "model_name_or_path": student,
        "dtype": dtype if load.lora else "float32",
        "per_device_train_batch_size": choice.micro,
        "gradient_accumulation_steps": load.batch // choice.micro,
        "max_completion_length": load.length,
        CHECKPOINTING: load.checkpointing,
        "bf16": load.half,
    }
    if choice.engine != TRANSFORMERS:
        found |= {"use_vllm": True, "vllm_max_model_length": load.row(shape)}
        is_apart = choice.engine == SERVER
        found |= {"vllm_mode": "server"} if is_apart else {"vllm_gpu_memory_utilization": plan.engine_share}
        found |= {"vllm_enable_sleep_mode": True} if choice.engine == ASLEEP else {}
    if load.lora:
        found |= {"use_peft": True, "lora_r": load.lora, "lora_target_modules": ["all-linear"]}
    if choice.teacher == "itself":
        return {**found, "teacher_model_kind": "base"}
    if choice.teacher == "served":
        return {**found, "teacher_server_url": f"http://127.0.0.1:{8001 if choice.engine == SERVER else 8000}"}
    kept = "none" if choice.teacher == "shared" else choice.teacher
    return {**found, "teacher_model_name_or_path": teacher, "teacher_dtype": dtype, "teacher_offload": kept}


def _placed(plan: Plan, load: Load) -> dict[str, Any]:
    choice, (phase, peak) = plan.choice, plan.peak
    return {
        "sharding": choice.sharding,
        "teacher": choice.teacher,
        "engine": choice.engine,
        "micro_batch": choice.micro,
        "peak": peak,
        "phase": phase,
        "host": plan.host,
        "gpus": load.gpus + plan.servers,
        "fits": plan.fits,
    }


def _reason(plan: Plan, load: Load) -> str:
    """Why a plan does not fit, in a sentence."""
    phase, peak = plan.peak
    part, size = max(plan.phases[phase].items(), key=lambda one: one[1])
    usable = SHARE * load.memory
    if peak <= usable:
        return f"Offloading needs {plan.host / 1e9:.1f} GB of host memory, more than the machine has."
    return (
        f"The phase `{phase}` needs at least {peak / 1e9:.1f} GB per device, but {usable / 1e9:.1f} GB are usable; "
        f"the largest part is `{part}` with {size / 1e9:.1f} GB."
    )


def show(plan: dict[str, Any], load: Load) -> None:
    """Prints a plan for a person."""
    console, by_phase = Console(highlight=False), plan["phases"].values()
    size, unit = (1e9, "GB") if plan["peak"] >= 1e9 else (1e6, "MB")
    title = ", ".join(f"{name}: {plan[name]}" for name in ("sharding", "teacher", "engine", "micro_batch"))
    table = Table(unit, *(Column(phase, justify="right") for phase in plan["phases"]), title=title, box=None)
    for name in dict.fromkeys(name for parts in by_phase for name in parts):
        table.add_row(name, *(f"{parts[name] / size:.2f}" if name in parts else "" for parts in by_phase))
    table.add_row("sum", *(f"{sum(parts.values()) / size:.2f}" for parts in by_phase), style="bold")
    table.add_row("seconds", *(f"{value:.2f}" for value in plan["seconds"].values()))
    console.print(table)
    console.print(
        f"Estimates per device of {load.memory / 1e9:g} GB (1e9 bytes), {SHARE:.0%} of it usable. Seconds assume "
        f"{load.flops / 1e12:.0f} TFLOP/s, {load.bandwidth / 1e9:.0f} GB/s of memory bandwidth, and no traffic between "
        "devices.\n"
    )
    right = [Column(head, justify="right") for head in ("rows", unit, f"host {unit}", "GPUs")]
    columns: list[Column | str] = ["sharding", "teacher", "engine", *right[:2], "in", *right[2:], "fits"]
    table = Table(*columns, title="Placements", box=None, collapse_padding=True)
    for one in plan["placements"]:
        sums = {"peak": f"{one['peak'] / size:.1f}", "host": f"{one['host'] / size:.0f}"}
        table.add_row(*map(str, {**one, **sums, "fits": "yes" if one["fits"] else "no"}.values()))
    console.print(table)
    if not plan["fits"]:
        console.print(
            f"\nDoes not fit in any placement. {plan['reason']} Try more or larger devices, LoRA (`--lora 16`), fewer "
            "rows, fewer tokens, or `--host-memory` to allow offloading."
        )
        return
    if servers := plan["gpus"] - load.gpus:
        console.print(f"\nServers need {servers} more device(s): {plan['gpus']} in all.")
    tokens = plan["tokens"]
    console.print(
        f"\nFits with micro-batches of {tokens['micro_batch']:,} tokens; the loss computes logits for "
        f"{tokens['loss_tile']:,} tokens at a time. Put these options and a `dataset_name` into run.yaml, then run "
        f"[bold]{plan['command']}[/]\n",
        soft_wrap=True,
    )
    console.print(yaml.safe_dump(plan["options"], sort_keys=False), markup=False, soft_wrap=True)
