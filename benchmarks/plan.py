"""Compares the memory that `trl-opsd plan` predicts with what trainings on a CPU held, by phase.

python benchmarks/plan.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoConfig, AutoModelForCausalLM

from trl_opsd.cli.plan import Choice, Load, phases, shape_of, tracer

ROOT = Path(__file__).resolve().parent.parent
CLI = ROOT / "tests" / "cli"

CASES = (
    ("single", "none", 4, 64, 192, 0),
    ("single", "none", 4, 64, 192, 1),
    ("single", "none", 8, 128, 384, 0),
    ("ddp", "none", 4, 64, 192, 0),
    ("zero2", "none", 4, 64, 192, 0),
    ("zero3", "none", 4, 64, 192, 0),
    ("zero3", "zero3", 4, 64, 192, 0),
    ("fsdp2", "none", 4, 64, 192, 0),
)
"""Sharding, `teacher_offload`, rows, tokens of prompt and completion, and whether gradient checkpointing is on."""

PROCESSES = 2

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of a training beside it whose peak is taken off: of libraries, and of processes that talk."""


def saved(folder: Path, **changes: int) -> list[str]:
    """Saves a random student and a random teacher, and returns their folders."""
    sys.path.append(str(CLI.parent))
    from support import tiny

    folders = []
    for role in ("student", "teacher"):
        config = AutoConfig.from_pretrained(CLI / "shapes" / f"measured-{role}.json")
        config.update({**changes, "layer_types": ["full_attention"] * changes["num_hidden_layers"]} if changes else {})
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / role)
        tiny.tokenizer().save_pretrained(folder / role)
        folders.append(str(folder / role))
    return folders


def measured(small: list[str], large: list[str], sharding: str, *numbers: object) -> dict[str, int]:
    """Bytes by phase that a training takes beyond one of small models, of the process that took most.

    Both run in the same processes, but for DeepSpeed, which keeps what the first has taken.
    """
    if sharding.startswith("zero"):
        least, most = ([one for (one,) in trained(models, sharding, *numbers)] for models in (small, large))
    else:
        least, most = zip(*trained([*small, *large], sharding, *numbers), strict=True)
    return {phase: max(one[phase] for one in most) - max(one[phase] for one in least) for phase in most[0]}


def trained(models: list[str], sharding: str, *numbers: object) -> list[list[dict[str, int]]]:
    """Peaks by phase of trainings one after the other, in bytes: for each process a list of them."""
    processes = 1 if sharding == "single" else PROCESSES
    launcher: list[str] = []
    if sharding == "ddp":  # accelerate has no file for it that starts several processes on a CPU
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    elif processes > 1:
        config = ROOT / "trl_opsd" / "accelerate_configs" / f"{sharding}_cpu.yaml"
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *[sys.executable, *launcher],
                *[str(CLI / "training_peak.py"), folder, *map(str, numbers), *models],
            ],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{CLI.parent}:{CLI}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the training ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found = [json.loads(file.read_text()) for file in Path(folder).glob("peak-*.json")]
    assert len(found) == processes, "a launch may silently start one"
    return found


def predicted(models: list[str], sharding: str, teacher: str, rows: int, *numbers: int) -> dict[str, int]:
    """The same by the plan, where buckets are as large as what is written to them: the rest is never resident."""
    student, of_teacher = map(shape_of, models)
    load = Load(
        1 if sharding == "single" else PROCESSES, rows, *numbers[:2], half=False, checkpointing=bool(numbers[2])
    )
    found = phases(student, of_teacher, load, Choice(sharding, teacher, rows), tracer(student, load))
    whole = load.itemsize * 500_000_000
    for parts in found.values():
        if parts.get("gradient buckets") and sharding.startswith("zero"):
            parts["gradient buckets"] -= whole - load.itemsize * student.parameters
    return {phase: sum(parts.values()) for phase, parts in found.items()}


def compared(*case: object) -> dict[str, tuple[int, int]]:
    """Bytes by phase, as predicted and as measured, beyond those of a training of small models."""
    with TemporaryDirectory() as folder:
        large, small = saved(Path(folder, "large")), saved(Path(folder, "small"), **SMALL)
        beyond = measured(small, large, *case)
        by_plan, of_small = predicted(large, *case), predicted(small, *case)
    return {phase: (size - of_small[phase], beyond[phase]) for phase, size in by_plan.items()}


def main() -> None:
    """Prints a row for each case."""
    print("| training: rows x (prompt + completion) | rollout | scoring | training |\n|---|---|---|---|")
    for case in CASES:
        cells = [f"{plan / 1e6:.0f} / {peak / 1e6:.0f} = {plan / peak:.2f}" for plan, peak in compared(*case).values()]
        sharding, teacher, rows, prompt, length, checkpointing = case
        training = f"`{sharding}`, teacher `{teacher}`, {rows} x ({prompt} + {length}){', recomputed' * checkpointing}"
        print(f"| {' | '.join((training, *cells))} |", flush=True)


if __name__ == "__main__":
    main()
