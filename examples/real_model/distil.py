"""Teaches a pretrained model rules that it follows with examples in its prompt, so that it does without them.

    python examples/real_model/distil.py --model out/smollm2 --output out/real

The teacher is the model without its adapter, which reads an instruction and three example turns (`rules.py`); the
student is a LoRA adapter, which reads the question. `--model` may be any chat model, on any device. Prints which share
of answers to held-out questions follows each rule, before and after, and what it cost elsewhere. Results are saved in
the output folder and not measured again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import resource
import statistics
import string
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real_model.questions import FACTS, questions
from real_model.rules import RULES

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards

TOKENS = 32
"""The longest answer."""

COLUMNS = (
    "rule",
    "before",
    "after",
    "teacher",
    "facts known; by the teacher",
    "another rule, when told",
    "loss on text, nats",
    "seconds",
    "peak GiB",
)
"""Of the table."""

MESSAGES = List({"role": Value("string"), "content": Value("string")})
FEATURES = Features(
    {"prompt": MESSAGES, "teacher_prompt": MESSAGES, "rule": Value("string"), "known": List(Value("string"))}
)

MODULES = (argparse, inspect, json, math, string, time)
"""Modules of Python whose documentation is the ordinary text."""


def rows(rule: str, asked: Sequence[str], wanted: str | None = None) -> Dataset:
    """The question for the student, and the same after examples of a rule for the teacher.

    Rewards are those of the rule, or of the one that is `wanted`.
    """
    given = {
        "prompt": [[{"role": "user", "content": one}] for one in asked],
        "teacher_prompt": [RULES[rule].teacher_prompt(one) for one in asked],
        "rule": [wanted or rule] * len(asked),
        "known": [FACTS.get(one) for one in asked],
    }
    return Dataset.from_dict(given, features=FEATURES)


def untold(rule: str, asked: Sequence[str]) -> Dataset:
    """The question, which both models read."""
    return rows(rule, asked).remove_columns("teacher_prompt")


def told(rule: str, asked: Sequence[str]) -> Dataset:
    """The question after examples of a rule, which both models read."""
    return rows(rule, asked).remove_columns("prompt").rename_column("teacher_prompt", "prompt")


def follows(completions: list[Any], rule: list[str], **_: Any) -> list[float]:
    """A reward as TRL's trainers call it: 1 for each answer that follows the rule."""
    return [float(RULES[name].follows(one[0]["content"])) for one, name in zip(completions, rule, strict=True)]


def knows(completions: list[Any], known: list[list[str] | None], **_: Any) -> list[float | None]:
    """A reward: 1 for each answer to a fact with one of the words that are known."""
    answers = (completion[0]["content"].lower() for completion in completions)
    return [
        None if words is None else float(any(word.lower() in answer for word in words))
        for words, answer in zip(known, answers, strict=True)
    ]


@torch.no_grad()
def loss_on_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Mean next-token loss on ordinary text, nats per token."""
    losses = []
    for module in MODULES:
        ids = tokenizer(inspect.getdoc(module) or "", return_tensors="pt", truncation=True, max_length=256)["input_ids"]
        losses.append(model(ids.to(model.device), labels=ids.to(model.device)).loss.item())
    return sum(losses) / len(losses)


def measured(trainer: OPSDTrainer, rule: str, count: int) -> dict[str, Any]:
    """Which share of `count` held-out answers follows the rule, and what the model can do elsewhere."""
    asked = questions(held_out=True)[:count]
    answers, facts = (trainer.predict(untold(rule, some)) for some in (asked, list(FACTS)))
    other = trainer.predict(told("json" if rule != "json" else "french", asked[::10]))
    return {
        "follows": answers.metrics["test_rewards/follows/mean"],
        "facts": facts.metrics["test_rewards/knows/mean"],
        "other_rule_when_told": other.metrics["test_rewards/follows/mean"],
        "text_loss": loss_on_text(trainer.model, trainer.processing_class),
        "samples": answers.texts[:3],
    }


def fast_dtype() -> str:
    """`"bfloat16"` on a GPU and on a processor with AVX-512; without, products in it take eight times as long."""
    is_fast = torch.cuda.is_available() or torch.cpu.get_capabilities().get("avx512_f")
    return "bfloat16" if is_fast else "float32"


def build(
    asked: argparse.Namespace, rule: str, seed: int, folder: Path, wanted: str | None = None, **options: Any
) -> OPSDTrainer:
    """The trainer of an adapter, with further options; its evaluations save completions in the folder."""
    cpu = {} if torch.cuda.is_available() else {"bf16": False}
    return OPSDTrainer(
        model=asked.model,
        args=OPSDConfig(
            output_dir=str(folder),
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
            max_steps=asked.steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=100,
            max_completion_length=TOKENS,
            eval_temperature=0.0,  # greedy
            model_init_kwargs={"dtype": fast_dtype()},
            gradient_checkpointing=False,
            eval_strategy="steps",
            eval_steps=max(asked.steps // 3, 1),
            use_vllm=asked.use_vllm,
            save_strategy="no",
            logging_steps=5,
            log_completions=True,  # saved with the rewards of each
            num_completions_to_print=0,
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            **{**cpu, "teacher_model_kind": "base", "divergence": asked.divergence, **options},
        ),
        train_dataset=rows(rule, questions(), wanted),
        eval_dataset=rows(rule, questions(held_out=True)[::10], wanted),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        methods=[Rewards([follows, knows])],
    )


def untrained(asked: argparse.Namespace, rule: str, folder: Path) -> dict[str, Any]:
    """What the model does before training, and as the teacher."""
    trainer = build(asked, rule, 0, folder)
    asked_of_teacher = questions(held_out=True)[: asked.held_out]
    answers, facts = (trainer.predict(told(rule, some)) for some in (asked_of_teacher, list(FACTS)))
    teacher = {
        "follows": answers.metrics["test_rewards/follows/mean"],
        "facts": facts.metrics["test_rewards/knows/mean"],
        "samples": answers.texts[:3],
    }
    return {"teacher": teacher, "before": measured(trainer, rule, asked.held_out)}


def trained(asked: argparse.Namespace, rule: str, seed: int, folder: Path) -> dict[str, Any]:
    """What an adapter does after training."""
    trainer = build(asked, rule, seed, folder)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    history = trainer.state.log_history
    return {
        "after": measured(trainer, rule, asked.held_out),
        "curve": {row["step"]: row["eval_rewards/follows/mean"] for row in history if "eval_loss" in row},
        "seconds": round(seconds, 1),
        "seconds_of_evaluations": round(sum(row.get("eval_runtime", 0) for row in history), 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def saved(folder: Path, compute: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """A result, loaded if it has been saved beside this folder, else computed and saved."""
    path = folder.with_name(f"{folder.name}.json")
    if not path.exists():
        path.write_text(json.dumps(compute(folder), indent=2) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def line(rule: str, start: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    """A line of the table: means over the seeds, with minimum and maximum."""
    before, after = start["before"], [run["after"] for run in runs]
    cells = [
        f"{before['follows']:.3f}",
        _range([one["follows"] for one in after], 3),
        f"{start['teacher']['follows']:.3f}",
        f"{before['facts']:.2f} → {_range([one['facts'] for one in after], 2)}; {start['teacher']['facts']:.2f}",
        f"{before['other_rule_when_told']:.2f} → {_range([one['other_rule_when_told'] for one in after], 2)}",
        f"{before['text_loss']:.2f} → {_range([one['text_loss'] for one in after], 2)}",
        _range([run["seconds"] for run in runs], 0),
        f"{max(run['peak_gib'] for run in runs):.1f}",
    ]
    return f"| {rule} | {' | '.join(cells)} |"


def _range(values: Sequence[float], digits: int) -> str:
    mean, least, most = (f"{value:.{digits}f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} – {most})"


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    parser = argparse.ArgumentParser(description="Rules that a model follows with examples, without them.")
    parser.add_argument("--model", required=True, help="a chat model: a folder, or its name on the Hub")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["pirate"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--divergence", default="forward_kl")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--held-out", type=int, default=200, help="questions to measure with")
    parser.add_argument("--use-vllm", action="store_true", help="rollouts with vLLM, in the same process")
    parser.add_argument("--output", type=Path, default=Path("out/real"))
    asked = parser.parse_args(arguments)
    asked.output.mkdir(parents=True, exist_ok=True)

    engine = "vllm" if asked.use_vllm else "transformers"
    results, lines = {}, [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name in asked.rules:
        start = saved(asked.output / f"{name}-untrained-{asked.held_out}", partial(untrained, asked, name))
        settings = f"{asked.divergence}-{asked.learning_rate:g}-{asked.steps}-{asked.held_out}-{engine}"
        results[name] = [
            saved(asked.output / f"{name}-{settings}-seed{seed}", partial(trained, asked, name, seed))
            for seed in asked.seeds
        ]
        lines.append(line(name, start, results[name]))
        print("\n".join(lines), flush=True)
    print(f"answers and figures of each run: {asked.output}")
    return results


if __name__ == "__main__":
    main()
