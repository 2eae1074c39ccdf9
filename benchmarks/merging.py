"""Ways to merge three experts of one base into one student, on-policy, off-policy and without distillation.

    python benchmarks/merging.py --output out/merge --controls

The base and its experts are those of `examples/merge_experts.py`; a student is trained for each way and seed. Controls
are TIES of the weights by mergekit, and supervised training on completions of the experts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from experts.make import ADAPTER, batches
from experts.tasks import TASKS, Question, draw
from fitting import fit
from merge_experts import options, prepare

from trl_opsd.cli.merge import AFTER, AVERAGE, BEFORE, FILE
from trl_opsd.cli.train import main as train

WAYS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "rows": {"methods": {"aggregation": {"by": "rows"}}},
    "teachers": {"methods": {"aggregation": {"by": "teachers"}}},
    "off-policy: the experts' completions": {"lmbda": 0.0, "seq_kd": True},
}
"""The options of each way to distil."""


def answers(model: torch.nn.Module, folder: Path, questions: list[Question], temperature: float = 0.0) -> list[str]:
    """One completion of each question; greedy at temperature 0."""
    words = AutoTokenizer.from_pretrained(folder / "base")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    config = GenerationConfig(
        max_new_tokens=40, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, **sampling
    )
    found: list[str] = []
    for start in range(0, len(questions), 200):
        asked = [one.prompt for one in questions[start : start + 200]]
        read = words.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        written = model.eval().generate(**read, generation_config=config)[:, read["input_ids"].size(1) :]
        found += words.batch_decode(written, skip_special_tokens=True)
    return found


def measured(model: torch.nn.Module, folder: Path, number: int) -> dict[str, float]:
    """The accuracy in each task, of the questions that `experts` ask."""
    found = {}
    for task in TASKS:
        asked = draw(task, number, held_out=True)
        said = answers(model, folder, asked)
        found[task] = sum(one.answer == text for one, text in zip(asked, said, strict=True)) / len(asked)
    return found


def supervised(folder: Path, steps: int, seed: int, number: int) -> dict[str, float]:
    """An adapter of the base, trained on completions that the experts have sampled for the student's prompts."""
    torch.manual_seed(seed)
    seen = []
    for task in TASKS:
        expert = AutoPeftModelForCausalLM.from_pretrained(folder / task)
        asked = draw(task, 16 * steps)
        said = answers(expert, folder, asked, temperature=1.0)
        seen += [Question(task, one.text, text) for one, text in zip(asked, said, strict=True)]
    random.Random(seed).shuffle(seen)
    student = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(**ADAPTER))
    fit(student, batches(AutoTokenizer.from_pretrained(folder / "base"), seen, seed, 48), steps=steps)
    return measured(student, folder, number)


def ties(folder: Path, number: int) -> dict[str, float]:
    """TIES of the experts' merged weights, with mergekit's usual density of a half and all weights 1."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    for task in TASKS:
        if not (folder / f"{task}-merged").exists():
            merged = AutoPeftModelForCausalLM.from_pretrained(folder / task).merge_and_unload()
            merged.save_pretrained(folder / f"{task}-merged")
            AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / f"{task}-merged")
    said = {
        "merge_method": "ties",
        "base_model": str(folder / "base"),
        "models": [
            {"model": str(folder / f"{task}-merged"), "parameters": {"density": 0.5, "weight": 1.0}} for task in TASKS
        ],
        "parameters": {"normalize": True},
        "dtype": "float32",
    }
    run_merge(MergeConfiguration.model_validate(said), str(folder / "ties"), MergeOptions(copy_tokenizer=False))
    return measured(AutoModelForCausalLM.from_pretrained(folder / "ties"), folder, number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/merge"))
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps, each of 48 completions")
    parser.add_argument("--held-out", type=int, default=200, help="questions of each task to measure on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--controls", action="store_true", help="supervised training, and TIES by mergekit if installed"
    )
    asked = parser.parse_args(arguments)
    folder = asked.output
    prepare(folder, asked.steps, asked.held_out)
    for seed in asked.seeds:
        for way in asked.ways:
            run = folder / f"{way.partition(':')[0]}-{seed}"
            if (run / FILE).exists() and AFTER in json.loads((run / FILE).read_text())["accuracy"]:
                continue
            run.mkdir(exist_ok=True)
            file = run / "experts.yaml"
            said = {**options(folder, asked.steps), "methods": None, **WAYS[way], "seed": seed, "output_dir": str(run)}
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
