"""Ways to train a drafter, by what speculative decoding accepts of it, and how well the logged `acceptance` says so.

    python benchmarks/drafters.py --output out/drafters

Target and drafter are those of `examples/drafter.py`; all runs start from the same drafter. Minutes for one seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from drafter import DRAFTED, LONGEST, decoded, made, starts

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer
from trl_opsd.losses import Divergence


class Nothing(Divergence):
    """0, with a gradient of 0: what is left is the likelihood of the rows."""

    def value(self, log_student, log_teacher):
        return 0.0 * log_student.sum(-1)


OF_TARGET = {"lmbda": 0.0, "seq_kd": True}
"""The target writes the rows, as token ids: a column of text would be cut into other tokens."""
METHODS: dict[str, dict[str, Any]] = {
    "supervised": {"divergence": Nothing(), "methods": {"off_policy": {"nll_weight": 1.0}}, **OF_TARGET},
    "forward KL": {"divergence": "forward_kl", **OF_TARGET},
    "reverse KL": {"divergence": "reverse_kl", **OF_TARGET},
    "total variation": {"divergence": "total_variation", **OF_TARGET},
    "negative log acceptance": {"divergence": "negative_log_acceptance", **OF_TARGET},
    "forward KL, rows of the drafter": {"divergence": "forward_kl"},
    "total variation, rows of the drafter": {"divergence": "total_variation"},
    "negative log acceptance, rows of the drafter": {"divergence": "negative_log_acceptance"},
}


@torch.no_grad()
def predicted(target: Any, drafter: Any, tested: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """`1 - TV` at each token that was tested, in their order."""
    found = []
    for ids, places in tested:
        probs = [model(torch.tensor([ids])).logits[0].softmax(-1) for model in (target, drafter)]
        found.append(torch.minimum(*probs).sum(-1)[torch.tensor(places, dtype=torch.long) - 1])
    return torch.cat(found)


def measured(trainer: OPSDTrainer, target: Any, prompts: Sequence[list[int]]) -> dict[str, float]:
    """What speculative decoding accepts of the trainer's student, and what its metric says on the same tokens."""
    drafter = trainer.model.eval()
    torch.manual_seed(1)
    greedy, sampled = (decoded(target, drafter, prompts, sample) for sample in (False, True))
    alpha = predicted(target, drafter, sampled["tested"])
    trainer.divergence, trainer.rollout = "total_variation", FixedRollout(sampled["completions"])
    metric = trainer.evaluate()["eval_acceptance"]
    return {
        "metric": metric,
        "at tested tokens": float(alpha.mean()),
        "accepted": sampled["accepted"] / len(alpha),
        "off by standard errors": float((sampled["accepted"] - alpha.sum()) / (alpha * (1 - alpha)).sum().sqrt()),
        "tokens per step": sampled["tokens"] / sampled["forwards"],
        "if independent": (1 - metric ** (DRAFTED + 1)) / (1 - metric),
        "greedy accepted": greedy["accepted"] / sum(len(places) for _, places in greedy["tested"]),
        "greedy tokens per step": greedy["tokens"] / greedy["forwards"],
    }


def run(name: str, seed: int, target: Any, options: argparse.Namespace) -> dict[str, float]:
    """Trains the drafter by a method, or not at all ("before"), and measures it on held-out prompts."""
    begin = time.monotonic()
    words = AutoTokenizer.from_pretrained(options.output / "target")
    held_out = list(dict.fromkeys(starts(4, 3 * options.prompts)))[: options.prompts]
    trainer = OPSDTrainer(
        model=made(options.output / "drafter", "drafter"),
        teacher_model=target,
        args=OPSDConfig(
            str(options.output / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=50,
            max_completion_length=LONGEST,
            learning_rate=options.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=5,
            seed=seed,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **METHODS.get(name, {}),
        ),
        train_dataset=Dataset.from_dict({"prompt": starts(100 + seed, 64 * options.steps)}),
        eval_dataset=Dataset.from_dict({"prompt": held_out}),
        processing_class=words,
    )
    if name in METHODS:
        trainer.train()
    return {**measured(trainer, target, words(held_out)["input_ids"]), "seconds": time.monotonic() - begin}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, dict[str, float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/drafters"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, each of 64 completions")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts for speculative decoding")
    options = parser.parse_args(arguments)
    target = made(options.output / "target", "target")
    file = options.output / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for seed in map(str, options.seeds):
        for name in [*([] if "before" in results else ["before"]), *options.methods]:
            if seed not in results.setdefault(name, {}):
                results[name][seed] = run(name, int(seed), target, options)
                file.write_text(json.dumps(results, indent=1))
    columns = [one for one in next(iter(results["before"].values())) if one != "seconds"]
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for name, rows in results.items():
        means = [statistics.mean(row[one] for row in rows.values()) for one in columns]
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in means)} |")
    return results


if __name__ == "__main__":
    main()
