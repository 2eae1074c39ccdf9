"""Tasks of agents, and small models that are to learn them: they have seen walks through worlds.

    python benchmarks/agents.py sql --output out/sql/models

The student has seen straight walks, of someone who knows what it does not. The teacher is told that, and has seen walks
with calls at random, which it does not learn but learns to recover from. The guide is told too, and has seen straight
walks only. Those of the doors travel with the package.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import doors.world
import house.world
import sql.world
from doors.tokenizer import PIECES, SPECIAL_TOKENS, make_tokenizer
from fitting import fit, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A world, and who acts there.

    Attributes:
        environment (`type`): its class.
        world (`ModuleType`):
            `rows` that begin it, its `LEVELS`, numbers `OF` something, `MOST_CALLS` and `MOST_TOKENS`, what is said
            when it is `DONE`, and the next call of someone who is `knowing`, `searching`, or goes `stray`.
        pieces (`tuple[str, ...]`): texts that are one token each; empty to take them from walks.
        rows (`int`): different rows to learn from.
        steps (`Mapping[str, int]`): optimizer steps of lessons, in place of those in `LESSONS`.
        ended (`tuple[str, ...]`):
            Tools whose calls a teacher learns to end where it would not begin them; else it goes on with another call.
    """

    environment: type
    world: ModuleType
    pieces: tuple[str, ...] = ()
    rows: int = 7500
    steps: Mapping[str, int] = field(default_factory=dict)
    ended: tuple[str, ...] = ()

    def question(self, environment: Any, row: Mapping[str, Any], is_told: bool) -> list[dict[str, str]]:
        """The prompt, as the trainer makes it for the student or the teacher; the environment is begun."""
        observation = environment.reset(**row) or ""
        before = row["prompt"][-1]["content"] if "prompt" in row else ""
        told = f"\n\n{environment.get_privileged_context()}" if is_told else ""
        return [{"role": "user", "content": f"{before}{observation}{told}"}]

    def walk(self, row: Mapping[str, Any], kind: str, source: random.Random, is_told: bool = False) -> Walk:
        """A walk that ends where it should, "straight", "searched" or "mistaken"."""
        environment, world = self.environment(), self.world
        walk = Walk(messages=self.question(environment, row, is_told), is_advised=[])
        while advised := world.knowing(environment):
            strayed = len(walk.is_advised) - walk.is_advised.count(True)
            is_stray = kind == "mistaken" and strayed < 3 and source.random() < 0.4
            name, arguments = advised
            if kind == "searched" or is_stray:
                name, arguments = (world.stray if is_stray else world.searching)(environment, source)
            function = {"type": "function", "function": {"name": name, "arguments": arguments}}
            walk.messages.append({"role": "assistant", "content": "", "tool_calls": [function]})
            try:
                answer = getattr(environment, name)(**arguments)
            except Exception as error:  # as trainers answer
                answer = str({"error": str(error)})
            walk.messages.append({"role": "tool", "name": name, "content": answer})
            is_ended = name in self.ended and name != advised[0]
            walk.is_advised.append(True if not is_stray else None if is_ended else False)
        walk.messages.append({"role": "assistant", "content": world.DONE})
        walk.is_advised.append(True)
        return walk

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """One of words, digits, and what is between them, as they are in walks."""
        pieces, source, plain = set("0123456789"), random.Random(0), make_tokenizer()
        for number, row in enumerate(() if self.pieces else self.world.rows(800)):
            walk = self.walk(row, "mistaken", source, is_told=number % 2 == 1)
            text = plain.apply_chat_template(walk.messages, tokenize=False)
            for part in re.split("|".join(map(re.escape, SPECIAL_TOKENS)), text):
                pieces |= set(_PIECE.findall(part))
        return make_tokenizer(self.pieces or sorted(pieces, key=lambda piece: (-len(piece), piece)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A conversation, and for each turn of the agent whether a model learns it; if `None`, from its arguments on."""

    messages: list[dict[str, Any]]
    is_advised: list[bool | None]


_BEFORE_ARGUMENTS = 2
"""Tokens of a call before its arguments: that a call begins, and of what."""

_PIECE = re.compile(r'\{"name": "\w+", "arguments": \{(?:"\w+": "?)?|[A-Za-z]+|\d|[^A-Za-z\d]+')

TASKS = {
    "doors": Task(environment=doors.world.Doors, world=doors.world, pieces=PIECES),
    "sql": Task(
        environment=sql.world.Database,
        world=sql.world,
        rows=60_000,
        steps={"student": 1200, "teacher": 2000, "guide": 2000},
        ended=("submit",),
    ),
    "house": Task(environment=house.world.House, world=house.world),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """How a model is trained."""

    steps: int
    is_told: bool
    """Whether it reads what only the teacher knows."""
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


def encoded(tokenizer: PreTrainedTokenizerBase, walk: Walk) -> tuple[list, list]:
    """Token ids of a walk, and its labels: what the agent writes, without calls that are not advised."""
    text = tokenizer.apply_chat_template(walk.messages, return_dict=True, return_assistant_tokens_mask=True)
    turns, labels, learned, written = iter(walk.is_advised), [], False, 0
    for token, mine in zip(text["input_ids"], text["assistant_masks"], strict=True):
        if mine and not written:
            learned = next(turns)
        written = written + 1 if mine else 0
        is_learned = learned or (learned is None and written > _BEFORE_ARGUMENTS)
        labels.append(token if mine and is_learned else -100)
    return text["input_ids"], labels


def batches(
    task: Task, tokenizer: PreTrainedTokenizerBase, lesson: Lesson, size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Infinite random batches of walks that are not held out."""
    source, rows = random.Random(seed), task.world.rows(task.rows, seed=seed)
    while True:
        walks = [
            task.walk(row, lesson.walks, source, lesson.is_told)
            for row in map(rows.__getitem__, source.sample(range(len(rows)), size))
        ]
        yield padded([encoded(tokenizer, walk) for walk in walks], tokenizer.pad_token_id)


def make(task: Task, name: str, folder: Path, steps: int | None = None) -> None:
    """Trains one of `LESSONS`, and saves it."""
    start, lesson, tokenizer = time.perf_counter(), LESSONS[name], task.tokenizer()
    model = make_model(tokenizer)
    fit(model, batches(task, tokenizer, lesson, size=32, seed=0), steps=steps or task.steps.get(name, lesson.steps))
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    print(f"{name}: {model.num_parameters():,} parameters, {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the models of a task.")
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("names", nargs="*", default=list(LESSONS), help=f"models to train: {', '.join(LESSONS)}")
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of those of the task")
    parser.add_argument("--output", type=Path, required=True, help="folder of their folders")
    asked = parser.parse_args()
    for name in asked.names:
        make(TASKS[asked.task], name, asked.output, asked.steps)


if __name__ == "__main__":
    main()
