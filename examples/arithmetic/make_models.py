"""Trains the models of the examples on worked solutions; running it rebuilds the folders beside it.

    python examples/arithmetic/make_models.py

The teacher is trained until it is nearly always right. The student has a quarter of its size and is stopped early, when
its answers have the right format but are mostly wrong. Three more start from the student: the reader learns to copy a
solution from its prompt, the adder and the subtracter each learn one of the two signs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fitting import fit, padded  # noqa: E402

from arithmetic.evaluate import accuracy  # noqa: E402
from arithmetic.task import Problem, draw  # noqa: E402
from arithmetic.tokenizer import make_tokenizer  # noqa: E402

SIZES = {
    "teacher": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6},
    "student": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 3},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """How a model is trained."""

    steps: int
    learning_rate: float = 2e-3
    signs: str = "+-"
    shown: float = 0.0
    """Share of the problems whose prompt contains the solution."""


LESSONS = {
    "teacher": Lesson(steps=800),
    "student": Lesson(steps=270),  # few on purpose
    "reader": Lesson(steps=200, learning_rate=1e-3, shown=0.8),
    "adder": Lesson(steps=400, signs="+"),
    "subtracter": Lesson(steps=400, signs="-"),
}
"""Models listed in `SIZES` start from random weights, the others from the student."""


def make_model(name: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
    """A model of the teacher's or the student's size, with random weights."""
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
    shown: float = 0.0,
    seed: int = 0,
) -> None:
    """Next-token training on worked solutions, with a warm-up and a linear decay.

    For a share `shown` of the problems, the prompt contains the solution after the question.
    """
    split = round(shown * len(problems))
    questions = [one.prompt_with_solution for one in problems[:split]] + [one.prompt for one in problems[split:]]
    batches = _batches(tokenizer, questions, [problem.solution for problem in problems], batch_size, seed)
    fit(model, batches, steps=steps, learning_rate=learning_rate)


def _batches(
    tokenizer: PreTrainedTokenizerBase,
    questions: list[list[dict[str, str]]],
    answers: list[str],
    batch_size: int,
    seed: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """Infinite random batches; only the answer and its end token count in the loss."""
    prompts = tokenizer.apply_chat_template(questions, add_generation_prompt=True)["input_ids"]
    solutions = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(answers)["input_ids"]]
    rows = [
        ([*prompt, *solution], [-100] * len(prompt) + solution)
        for prompt, solution in zip(prompts, solutions, strict=True)
    ]
    whole = padded(rows, tokenizer.pad_token_id)
    source = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(prompts), (batch_size,), generator=source)
        yield {name: tensor[chosen] for name, tensor in whole.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(LESSONS), help=f"models to train: {', '.join(LESSONS)}")
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of those in `LESSONS`")
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    held_out = draw(500, held_out=True)
    for name in options.names:
        start, lesson = time.perf_counter(), LESSONS[name]
        model = make_model(name, tokenizer) if name in SIZES else Qwen2ForCausalLM.from_pretrained(HERE / "student")
        problems = [problem for problem in draw(50_000) if problem.sign in lesson.signs]
        steps = options.steps or lesson.steps
        supervise(model, tokenizer, problems, steps=steps, learning_rate=lesson.learning_rate, shown=lesson.shown)
        model.save_pretrained(options.output / name)
        tokenizer.save_pretrained(options.output / name)
        print(
            f"{name}: {model.num_parameters():,} parameters, {accuracy(model, tokenizer, held_out):.3f} of "
            f"{len(held_out)} held-out problems right, {time.perf_counter() - start:.0f} s"
        )


if __name__ == "__main__":
    main()
