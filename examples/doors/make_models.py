"""Trains the models of the doors; running it rebuilds the folders beside it.

    python examples/doors/make_models.py

All have the same size. The student has seen straight walks, in which no door is closed. The teacher reads the right
doors, and has seen walks in which calls were made at random, which it does not learn but learns to recover from. The
guide reads the doors too, and has seen straight walks only.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fitting import fit, padded  # noqa: E402

from doors.tokenizer import make_tokenizer  # noqa: E402
from doors.world import Call, Maze, draw  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """How a model is trained."""

    steps: int
    is_told: bool
    """Whether it reads the doors."""
    walks: str
    """Those that it sees: "straight" or "mistaken"."""


LESSONS = {
    "student": Lesson(steps=600, is_told=False, walks="straight"),
    "teacher": Lesson(steps=1200, is_told=True, walks="mistaken"),
    "guide": Lesson(steps=1200, is_told=True, walks="straight"),
}


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, of a family whose tokenizer transformers loads as it was saved."""
    torch.manual_seed(seed)
    return Olmo2ForCausalLM(
        Olmo2Config(
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=len(tokenizer),
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def encoded(tokenizer: PreTrainedTokenizerBase, maze: Maze, calls: Iterable[Call], is_told: bool) -> tuple[list, list]:
    """Token ids of a walk, and its labels: what the agent writes, without calls that are not advised."""
    calls = list(calls)
    prompt = maze.prompt_with_hint if is_told else maze.prompt
    text = tokenizer.apply_chat_template(
        prompt + maze.messages(calls), return_dict=True, return_assistant_tokens_mask=True
    )
    turns = iter([*(call.is_advised for call in calls), True])
    labels, learned, inside = [], False, False
    for token, mine in zip(text["input_ids"], text["assistant_masks"], strict=True):
        if mine and not inside:
            learned = next(turns)
        inside = mine
        labels.append(token if mine and learned else -100)
    return text["input_ids"], labels


def batches(
    tokenizer: PreTrainedTokenizerBase, lesson: Lesson, size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Infinite random batches of walks through mazes that are not held out."""
    source, mazes = random.Random(seed), draw(7500)
    while True:
        some = source.sample(mazes, size)
        walks = [maze.mistaken(source) if lesson.walks == "mistaken" else maze.straight() for maze in some]
        texts = [encoded(tokenizer, maze, walk, lesson.is_told) for maze, walk in zip(some, walks, strict=True)]
        yield padded(texts, tokenizer.pad_token_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(LESSONS), help=f"models to train: {', '.join(LESSONS)}")
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of those in `LESSONS`")
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    for name in options.names:
        start, lesson = time.perf_counter(), LESSONS[name]
        model = make_model(tokenizer)
        fit(model, batches(tokenizer, lesson, size=32, seed=0), steps=options.steps or lesson.steps)
        model.save_pretrained(options.output / name)
        tokenizer.save_pretrained(options.output / name)
        print(f"{name}: {model.num_parameters():,} parameters, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
