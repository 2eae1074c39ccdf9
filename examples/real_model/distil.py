"""Teaches a pretrained model a rule that it follows with examples in its prompt, so that it does without them.

    python examples/real_model/distil.py --model out/smollm2 --rule json --output out/real

The teacher is the model without its adapter, which reads an instruction and three example turns (`rules.py`); the
student is a LoRA adapter, which reads the question. `--model` may be any chat model, on any device. Prints which share
of answers to held-out questions follows the rule, before and after, and what it cost elsewhere.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import resource
import string
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real_model.questions import FACTS, questions
from real_model.rules import RULES, Rule

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer

TOKENS = 32
"""The longest answer."""

MESSAGES = List({"role": Value("string"), "content": Value("string")})
FEATURES = Features({"prompt": MESSAGES, "teacher_prompt": MESSAGES, "known": List(Value("string"))})

MODULES = (argparse, inspect, json, math, string, time)
"""Modules of Python whose documentation is the ordinary text."""


def rows(rule: Rule, asked: Sequence[str]) -> Dataset:
    """The question for the student, and the same after examples for the teacher."""
    prompts = [[{"role": "user", "content": one}] for one in asked]
    known = [FACTS.get(one) for one in asked]
    given = {"prompt": prompts, "teacher_prompt": [rule.teacher_prompt(one) for one in asked], "known": known}
    return Dataset.from_dict(given, features=FEATURES)


def knows(completions: list[Any], known: list[list[str] | None], **_: Any) -> list[float | None]:
    """A reward as TRL's trainers call it: 1 for each answer with one of the words that are known, of those to facts."""
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


def measured(trainer: OPSDTrainer, rule: Rule, asked: Sequence[str]) -> dict[str, Any]:
    """Which share of held-out answers follows the rule, and what the model can do elsewhere."""
    answers, facts = (trainer.predict(rows(rule, some)) for some in (asked, list(FACTS)))
    return {
        "follows": answers.metrics["test_rewards/follows/mean"],
        "facts": facts.metrics["test_rewards/knows/mean"],
        "text_loss": loss_on_text(trainer.model, trainer.processing_class),
        "samples": answers.texts[:3],
    }


def build(args: argparse.Namespace) -> tuple[OPSDTrainer, Rule]:
    rule = RULES[args.rule]

    def follows(completions: list[Any], **_: Any) -> list[float]:
        return [float(rule.follows(completion[0]["content"])) for completion in completions]

    cpu = {} if torch.cuda.is_available() else {"bf16": False}
    trainer = OPSDTrainer(
        model=args.model,
        args=OPSDConfig(
            output_dir=str(args.output),
            teacher_model_kind="base",
            divergence=args.divergence,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=40,
            max_completion_length=TOKENS,
            eval_temperature=0.0,  # greedy
            model_init_kwargs={"dtype": "bfloat16"},
            gradient_checkpointing=False,
            eval_strategy="steps",
            eval_steps=max(args.steps // 3, 1),
            use_vllm=args.use_vllm,
            save_strategy="no",
            logging_steps=5,
            report_to="none",
            seed=args.seed,
            **cpu,
        ),
        train_dataset=rows(rule, questions()),
        eval_dataset=rows(rule, questions(held_out=True)[::5]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        reward_funcs=[follows, knows],
        rollout=None if args.use_vllm else HFRollout(),
    )
    return trainer, rule


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="A rule that a model follows with examples, without them.")
    parser.add_argument("--model", required=True, help="a chat model: a folder, or its name on the Hub")
    parser.add_argument("--rule", choices=RULES, default="json")
    parser.add_argument("--divergence", default="forward_kl")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=200, help="questions to measure with")
    parser.add_argument("--use-vllm", action="store_true", help="rollouts with vLLM, in the same process")
    parser.add_argument("--output", type=Path, default=Path("out/real"))
    args = parser.parse_args(arguments)

    trainer, rule = build(args)
    asked = questions(held_out=True)[: args.held_out]
    told = rows(rule, asked)
    teacher = trainer.predict(told.remove_columns("prompt").rename_column("teacher_prompt", "prompt"))
    before = measured(trainer, rule, asked)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    curve = [
        row["eval_rewards/follows/mean"] for row in trainer.state.log_history if "eval_rewards/follows/mean" in row
    ]
    result = {
        "model": args.model,
        "rule": args.rule,
        "divergence": args.divergence,
        "seed": args.seed,
        "steps": args.steps,
        "rollouts": "vLLM" if args.use_vllm else "transformers",
        "teacher": teacher.metrics["test_rewards/follows/mean"],
        "before": before,
        "after": measured(trainer, rule, asked),
        "curve": curve,
        "seconds": round(seconds, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    name = f"{args.rule}-{args.divergence}-seed{args.seed}-{result['rollouts']}.json"
    (args.output / name).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
