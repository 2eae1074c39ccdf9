"""Ways to train a student that is served quantised, with itself unquantised as its teacher or without a teacher.

    python benchmarks/quantisation.py --output out/quantised --controls
    python benchmarks/quantisation.py --task json --model out/smollm2 --format int4 --learning_rate 5e-5 --steps 10

Sums and differences by a model that this trains first (minutes, once), or answers in JSON by any chat model, which
reads three examples. Prints the original, the original quantised without training, and a student of each way. Results
are saved in the output folder and not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.qat import QATConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from arithmetic.task import draw, prompts_with_answers, right
from compare import practised
from real_model.distil import follows, told
from real_model.questions import questions

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards, StudentQuantization

FORMATS = {
    "int4": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),  # the same as `StudentQuantization("int4")`
    "int4 per row": IntxWeightOnlyConfig(torch.int4, PerAxis(0)),
    "int2": IntxWeightOnlyConfig(torch.int2, PerGroup(32)),
}

WAYS: dict[str, dict[str, Any]] = {
    "on-policy, forward KL": {},
    "on-policy, reverse KL": {"divergence": "reverse_kl"},
    "off-policy, the original's completions": {"lmbda": 0.0, "seq_kd": True},
}
"""The options of each way to distil."""

CONTROLS = {"supervised, quantised while training": True, "supervised, quantised after": False}
"""Next-token training on as many completions that the original has sampled."""

FIGURES = {"accuracy": "eval_reward", "agreement": "eval_agreement/first"}
REWARDS = {"arithmetic": right, "json": follows}
SIZES = {
    "arithmetic": {"per_device_train_batch_size": 32, "max_completion_length": 40},
    "json": {"per_device_train_batch_size": 4, "max_completion_length": 24},
}


def rows(task: str, number: int, held_out: bool = False) -> Dataset:
    """Prompts, and what the reward of the task reads."""
    if task == "json":
        asked = questions(held_out=held_out)
        return told(task, [asked[row % len(asked)] for row in range(number)])
    return prompts_with_answers(draw(number, held_out=held_out))


def shared(asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Options of any trainer."""
    return {
        "output_dir": str(asked.output),
        "per_device_train_batch_size": SIZES[asked.task]["per_device_train_batch_size"],
        "max_steps": asked.steps,
        "learning_rate": asked.learning_rate,
        "warmup_steps": asked.steps // 10,
        "adam_beta2": 0.98,
        "gradient_checkpointing": False,
        "bf16": False,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def build(
    asked: argparse.Namespace, seed: int = 0, student: str | None = None, quantised: bool = True, **given: Any
) -> OPSDTrainer:
    """A student of the original's weights, with the original as its teacher; evaluated before and after a training."""
    config = {
        **shared(asked, seed),
        **SIZES[asked.task],
        "divergence": "forward_kl",
        "per_device_eval_batch_size": 50,
        "eval_temperature": 0.0,  # greedy
        "eval_on_start": True,
        "eval_strategy": "epoch",
        "model_init_kwargs": {"dtype": "float32"},
        "teacher_model_init_kwargs": {"dtype": "float32"},  # else as its checkpoint is, and the KL has its rounding
        **given,
    }
    return OPSDTrainer(
        model=student or asked.model,
        teacher_model=asked.model,
        args=OPSDConfig(**config),
        train_dataset=rows(asked.task, config["per_device_train_batch_size"] * asked.steps),
        eval_dataset=rows(asked.task, asked.held_out, held_out=True),
        methods=[
            Rewards(REWARDS[asked.task]),
            *([StudentQuantization(FORMATS[asked.format])] if quantised else []),
        ],
    )


def distilled(asked: argparse.Namespace, way: str, seed: int) -> list[dict[str, float]]:
    """Evaluations before and after a training; its student is saved, with a folder `quantized` to be served."""
    trainer = build(asked, seed, **WAYS[way])
    trainer.train()
    trainer.save_model(str(asked.output / "student"))
    return [log for log in trainer.state.log_history if "eval_agreement/first" in log]


def supervised(asked: argparse.Namespace, way: str, seed: int) -> list[dict[str, float]]:
    """The evaluation of a model that was trained on samples of the original, and then quantised."""
    original = build(asked, seed, quantised=False, eval_temperature=1.0)
    prompts, words = original.train_dataset, original.processing_class
    written = [[{"role": "assistant", "content": text}] for text in original.predict(prompts).texts]
    samples = prompts.select_columns("prompt").add_column("completion", written)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    if CONTROLS[way]:
        quantize_(model.model, QATConfig(FORMATS[asked.format], step="prepare"))
    SFTTrainer(model, SFTConfig(**shared(asked, seed)), train_dataset=samples, processing_class=words).train()
    folder = str(asked.output / "supervised")
    model.save_pretrained(folder)  # with its weights as they are before quantisation
    words.save_pretrained(folder)
    return [build(asked, seed, folder).evaluate()]


def saved(file: Path, compute: Callable[[], list[dict[str, float]]]) -> list[dict[str, float]]:
    """Evaluations, loaded if they have been saved, else computed and saved."""
    if not file.exists():
        file.write_text(json.dumps(compute()))
    found: list[dict[str, float]] = json.loads(file.read_text())
    return found


def line(name: str, runs: Sequence[dict[str, float]]) -> str:
    """A line of the table: means over the seeds, with their ranges."""
    cells = []
    for metric in FIGURES.values():
        values = [one[metric] for one in runs]
        spread = f" ({min(values):.3f} – {max(values):.3f})" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.3f}{spread}")
    return f"| {name} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=REWARDS, default="arithmetic")
    parser.add_argument("--model", help="a chat model: a folder, or its name on the Hub; without, one is trained")
    parser.add_argument("--format", choices=FORMATS, default="int2", help="4 bits cost nothing in arithmetic")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--controls", action="store_true", help="supervised training on the original's samples")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="1e-6 to 1e-5 for a large model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held_out", type=int, default=200, help="prompts to measure on")
    parser.add_argument("--output", type=Path, default=Path("out/quantised"))
    asked = parser.parse_args(arguments)
    folder = asked.output / f"{asked.task}-{asked.format}-{asked.steps}-{asked.learning_rate:g}-{asked.held_out}"
    folder.mkdir(parents=True, exist_ok=True)
    asked.model = asked.model or practised(asked.output, steps=800)
    original = partial(build, asked, quantised=False)
    found = {"original": [saved(folder / "original.json", lambda: [original().evaluate()])]}
    for train, ways in ((distilled, asked.ways), (supervised, CONTROLS if asked.controls else ())):
        for way in ways:
            jobs = {folder / f"{way} {seed}.json": partial(train, asked, way, seed) for seed in asked.seeds}
            found[way] = [saved(file, job) for file, job in jobs.items()]
    lines = ["| | " + " | ".join(FIGURES) + " |", "|---" * (len(FIGURES) + 1) + "|"]
    for way, runs in found.items():
        lines.append(line(way, [logs[-1] for logs in runs]))
        if way == asked.ways[0]:
            lines.insert(3, line(f"{asked.format}, not trained", runs[0][:1]))
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()
