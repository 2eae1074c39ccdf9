"""Trains the base, which can do a bit of two tasks, and an adapter of it for each task.

    python examples/experts/make.py out/experts

The base is stopped early; each adapter learns its own task from answers, until it is nearly always right, and forgets
much of the others.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arithmetic.make_models import make_model
from arithmetic.tokenizer import make_tokenizer
from fitting import fit, padded

from experts.tasks import TASKS, Question, draw

ADAPTER = {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"}
STEPS = {"base": 240, "sums": 500, "sorting": 400, "twice": 400}
"""Optimizer steps of 64 answers."""
ROWS = 20_000
MIXTURE = {"sums": 12, "sorting": 1}
"""Of the base: sums take longest to learn, and one task is new to it."""


def batches(
    tokenizer: PreTrainedTokenizerBase, questions: list[Question], seed: int, size: int = 64
) -> Iterator[dict[str, torch.Tensor]]:
    """Infinite random batches; only the answer and its end token count in the loss."""
    prompts = tokenizer.apply_chat_template([one.prompt for one in questions], add_generation_prompt=True)["input_ids"]
    answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([one.answer for one in questions])["input_ids"]]
    whole = padded(
        [([*prompt, *answer], [-100] * len(prompt) + answer) for prompt, answer in zip(prompts, answers, strict=True)],
        tokenizer.pad_token_id,
    )
    source = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(prompts), (size,), generator=source)
        yield {name: tensor[chosen] for name, tensor in whole.items()}


def make(folder: Path) -> None:
    """Writes `base`, and an adapter for each task, unless they are there."""
    tokenizer = make_tokenizer()
    if not (folder / "base").exists():
        base: PreTrainedModel = make_model("student", tokenizer)
        mixed = [one for task, share in MIXTURE.items() for one in draw(task, ROWS * share // 12)]
        random.Random(0).shuffle(mixed)
        fit(base, batches(tokenizer, mixed, seed=0), steps=STEPS["base"])
        base.save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, 1):
        if not (folder / task).exists():
            torch.manual_seed(seed)
            adapted = get_peft_model(Qwen2ForCausalLM.from_pretrained(folder / "base"), LoraConfig(**ADAPTER))
            fit(adapted, batches(tokenizer, draw(task, ROWS), seed), steps=STEPS[task], learning_rate=3e-3)
            adapted.save_pretrained(folder / task)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains the base and the experts of examples/merge_experts.py.")
    parser.add_argument("folder", type=Path, help="where they are written")
    make(parser.parse_args().folder)
