"""Three experts of one base into one student; what counts alike in the loss, and what cheaper ways are worth.

    python examples/merge_experts.py --output out/merge

Trains a base and an adapter of it for each task (minutes, once), and then a student for each way and seed. One expert
answers with a digit, the sums with 25 tokens: if all tokens count alike, it has a twentieth of the loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from experts.controls import supervised, ties
from experts.make import ADAPTER, make
from experts.tasks import TASKS, draw, rows

from trl_opsd.cli.merge import AFTER, AVERAGE, BEFORE, FILE
from trl_opsd.cli.train import main as train

WAYS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "rows": {"methods": {"aggregation": {"by": "rows"}}},
    "teachers": {"methods": {"aggregation": {"by": "teachers"}}},
    "off-policy: the experts' completions": {"lmbda": 0.0, "seq_kd": True},
}
"""The options of each way to distil."""


def options(folder: Path, steps: int, seed: int) -> dict[str, Any]:
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
        "seed": seed,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/merge"))
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps, each of 48 completions")
    parser.add_argument("--held_out", type=int, default=200, help="questions of each task to measure on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--controls", action="store_true", help="supervised training, and TIES by mergekit if installed"
    )
    asked = parser.parse_args(arguments)
    folder = asked.output
    make(folder)
    for task in TASKS:
        rows(draw(task, 16 * asked.steps)).to_json(folder / f"{task}.jsonl")
        rows(draw(task, asked.held_out, held_out=True)).to_json(folder / f"{task}-test.jsonl")
    for seed in asked.seeds:
        for way in asked.ways:
            run = folder / f"{way.partition(':')[0]}-{seed}"
            if (run / FILE).exists() and AFTER in json.loads((run / FILE).read_text())["accuracy"]:
                continue
            run.mkdir(exist_ok=True)
            file = run / "experts.yaml"
            said = {**options(folder, asked.steps, seed), **WAYS[way], "output_dir": str(run)}
            file.write_text(yaml.safe_dump(said, sort_keys=False))
            train(["--config", str(file)])
    lines = table(folder, asked.ways, asked.seeds, controls(folder, asked) if asked.controls else {})
    print("\n".join(lines))


def controls(folder: Path, asked: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What was measured of cheaper ways, by their names; once."""
    file = folder / "controls.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    if "supervised on the experts' completions" not in found:
        found["supervised on the experts' completions"] = [
            supervised(folder, asked.steps, seed, asked.held_out) for seed in asked.seeds
        ]
    if "TIES of the weights" not in found and find_spec("mergekit"):  # pip install --no-deps mergekit immutables
        found["TIES of the weights"] = [ties(folder, asked.held_out)]
    file.write_text(json.dumps(found))
    return found


def table(
    folder: Path, ways: Sequence[str], seeds: Sequence[int], more: Mapping[str, Sequence[dict[str, float]]]
) -> list[str]:
    """Accuracies, means over seeds with their ranges, and the share of the headroom."""
    of = {
        (way, seed): json.loads((folder / f"{way.partition(':')[0]}-{seed}" / FILE).read_text())["accuracy"]
        for way in ways
        for seed in seeds
    }
    first = next(iter(of.values()))
    before, best = (statistics.mean(one) for one in (first[BEFORE].values(), (first[task][task] for task in TASKS)))

    def line(name: str, some: Sequence[dict[str, float]]) -> str:
        each = [[one[task] for one in some] for task in TASKS]
        means = [statistics.mean(one.values()) for one in some]
        cells = [
            f"{statistics.mean(values):.2f}" + (f" ({min(values):.2f}–{max(values):.2f})" if len(some) > 1 else "")
            for values in (*each, means)
        ]
        share = f"{(statistics.mean(means) - before) / (best - before):.0%}" if best > before else "–"
        return f"| {name} | {' | '.join(cells)} | {share} |"

    head = [f"| accuracy | {' | '.join(TASKS)} | mean | share of the headroom |", "|---" * (len(TASKS) + 3) + "|"]
    fixed = [line(f"expert of {name}" if name in TASKS else name, [first[name]]) for name in (*TASKS, BEFORE, AVERAGE)]
    trained = [line(f"student, {way}", [of[way, seed][AFTER] for seed in seeds]) for way in ways]
    return [*head, *fixed, *(line(name, some) for name, some in more.items()), *trained]


if __name__ == "__main__":
    main()
