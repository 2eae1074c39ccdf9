"""Trains the teacher and warm-starts the student on worked solutions; run it to remake both folders beside it.

    python examples/arithmetic/make_models.py

The teacher learns until it is nearly always right. The student is a quarter of its size and is stopped early, when it
writes the right form but mostly wrong answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from arithmetic.evaluate import accuracy  # noqa: E402
from arithmetic.task import Problem, draw  # noqa: E402
from arithmetic.tokenizer import make_tokenizer  # noqa: E402

SIZES = {
    "teacher": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6},
    "student": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 3},
}
STEPS = {"teacher": 800, "student": 270}
"""Optimizer steps. The student's are few on purpose."""


def make_model(name: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
    """A random model of the teacher's or the student's size."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        **SIZES[name],
        num_key_value_heads=SIZES[name]["num_attention_heads"],
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def supervise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> None:
    """Next-token training on worked solutions, with a warm-up and a linear decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1 - step / steps))
    batches = _batches(tokenizer, problems, batch_size, seed)
    model.train()
    for step in (bar := trange(steps, unit="step")):
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def _batches(
    tokenizer: PreTrainedTokenizerBase, problems: list[Problem], batch_size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless random batches; only the solution and its end token count in the loss."""
    prompts = [tokenizer.apply_chat_template(p.prompt, add_generation_prompt=True)["input_ids"] for p in problems]
    solutions = [[*tokenizer(p.solution)["input_ids"], tokenizer.eos_token_id] for p in problems]
    width = max(len(prompt) + len(solution) for prompt, solution in zip(prompts, solutions, strict=True))
    ids = torch.full((len(problems), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
        ids[row, : len(prompt) + len(solution)] = torch.tensor([*prompt, *solution])
        labels[row, len(prompt) : len(prompt) + len(solution)] = torch.tensor(solution)
    source = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(problems), (batch_size,), generator=source)
        yield {"input_ids": ids[chosen], "labels": labels[chosen]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SIZES), help="which to make: teacher, student")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of those that are shipped")
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    held_out = draw(500, held_out=True)
    for name in options.names:
        start, model = time.perf_counter(), make_model(name, tokenizer)
        supervise(model, tokenizer, draw(50_000), steps=options.steps or STEPS[name])
        model.save_pretrained(options.output / name)
        tokenizer.save_pretrained(options.output / name)
        print(
            f"{name}: {model.num_parameters():,} parameters, {accuracy(model, tokenizer, held_out):.3f} of "
            f"{len(held_out)} held-out problems right, {time.perf_counter() - start:.0f} s"
        )


if __name__ == "__main__":
    main()
