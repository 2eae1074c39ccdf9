"""Three experts of one base into one student, by one file with `experts`.

    python examples/merge_experts.py --output out/merge

Makes the base and an adapter of it for each task first (minutes, once). One expert answers with a digit, the sums with
25 tokens: if all tokens counted alike, it would have a twentieth of the loss. `aggregation` has each teacher count
alike. The file that is written, `experts.yaml`, is one for `trl-opsd train --config`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from experts.make import ADAPTER, make
from experts.tasks import TASKS, draw, rows

from trl_opsd.cli.train import main as train


def options(folder: Path, steps: int) -> dict[str, Any]:
    """A file of `trl-opsd train` with `experts`."""
    return {
        "model_name_or_path": str(folder / "base"),
        "experts": {
            task: {
                "model": str(folder / task),
                "dataset": str(folder / f"{task}.jsonl"),
                "test": str(folder / f"{task}-test.jsonl"),
                "metric": "experts.tasks.right",
            }
            for task in TASKS
        },
        "methods": {"aggregation": {"by": "teachers"}},
        "use_peft": True,
        "lora_r": ADAPTER["r"],
        "lora_alpha": ADAPTER["lora_alpha"],
        "lora_target_modules": ADAPTER["target_modules"],
        "divergence": "forward_kl",
        "top_p": 0.6,
        "max_steps": steps,
        "per_device_train_batch_size": 48,
        "per_device_eval_batch_size": 200,
        "max_completion_length": 40,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10,
        "adam_beta2": 0.98,
        "eval_temperature": 0.0,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(folder / "student"),
    }


def prepare(folder: Path, steps: int, held_out: int) -> None:
    """The base, its experts, and rows to train and to measure on."""
    make(folder)
    for task in TASKS:
        rows(draw(task, 16 * steps)).to_json(folder / f"{task}.jsonl")
        rows(draw(task, held_out, held_out=True)).to_json(folder / f"{task}-test.jsonl")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/merge"))
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps, each of 48 completions")
    parser.add_argument("--held-out", type=int, default=200, help="questions of each task to measure on")
    asked = parser.parse_args(arguments)
    prepare(asked.output, asked.steps, asked.held_out)
    file = asked.output / "experts.yaml"
    file.write_text(yaml.safe_dump(options(asked.output, asked.steps), sort_keys=False))
    train(["--config", str(file)])
    print(f"the student, an adapter: {asked.output / 'student'}; its options: {file}")


if __name__ == "__main__":
    main()
