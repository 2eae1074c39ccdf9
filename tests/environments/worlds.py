"""Environments for tests: an adder that may misbehave, agents that follow a script, and a trainer of both."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from datasets import Dataset
from support import tiny
from support.tool_calls import words

from trl_opsd import OPSDTrainer, RolloutBackend

END = "<|im_end|>"


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


class Adder:
    """Adds numbers; counts what was done."""

    def __init__(self) -> None:
        self.resets, self.thread = 0, threading.get_ident()

    def reset(self, start: int = 0, **_: Any) -> str | None:
        assert threading.get_ident() == self.thread, "in the thread where it was made"
        self.resets += 1
        self.total, self.said = start, []
        return f" from {start}"

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: The number to add.
        """
        assert threading.get_ident() == self.thread
        self.total += number
        return str(self.total)

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    def sleep(self, seconds: float) -> str:
        """Sleeps.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"

    def misbehave(self, how: str) -> Any:
        """Does something that a tool should not.

        Args:
            how: What.
        """
        if how == "exit":
            raise SystemExit(3)
        if how == "raise":
            raise RuntimeError("no such table")
        if how == "await in its own way":
            return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, "waited"))
        return {
            "array": numpy.arange(2),
            "giant": "x" * 50_000_000,
            "long": "word " * 2000,
            "number": 3.5,
            "image": [{"type": "text", "text": "a map"}, {"type": "image", "image": object()}],
            "rows": [{"id": 1}, {"id": 2}],
            "odd text": "\ud800 odd \0",
        }[how]

    def get_reward(self) -> float:
        assert threading.get_ident() == self.thread, "where it may keep a connection"
        return float(self.total)


class Told(Adder):
    def get_privileged_context(self) -> str:
        return f"the total is {self.total}"


class Drawn(Adder):
    """Draws its task as most environments do, from the random numbers of the program."""

    def reset(self, **row: Any) -> str:
        time.sleep(0.02 * random.SystemRandom().random())  # those of other threads may draw meanwhile
        self.task = (random.random(), float(numpy.random.rand()), float(torch.rand(())))
        super().reset(self.task[0])
        return f" task {self.task[0]:.3f}"


class Tasks(OPSDTrainer):
    """Records the task of each row of this process, by batch."""

    def teach(self, rollout: Any, rows: Any) -> Any:
        self.tasks = [*getattr(self, "tasks", ()), [one.task for one in self.environments]]
        return super().teach(rollout, rows)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def tasks(folder: Any, group: int = 2, batch: int = 8) -> dict[str, Any]:
    """The tasks of each batch of a training and of an evaluation, of all processes in the order of rows."""
    from accelerate.utils import gather_object

    arguments = given(once(call(number=1)), Drawn, train_dataset=None, eval_dataset=rows(6), max_steps=3)
    options = {name: arguments.pop(name) for name in ("max_completion_length", "max_steps")}
    options |= {"num_generations": group, "per_device_train_batch_size": batch}
    trainer = Tasks(args=tiny.config(folder, **options), **arguments)
    found = {}
    for what, act in {"train": trainer.train, "eval": trainer.evaluate}.items():
        trainer.tasks = []
        act()
        found[what] = [flat(batch) for batch in zip(*gather_object([trainer.tasks]), strict=True)]
    return found


class Scripted(RolloutBackend):
    """Writes the turns of a script, by the number of the row and of the turn; every turn it was asked for is kept."""

    def __init__(self, turns: Any) -> None:
        self.turns, self.asked = turns, []

    def bind(self, trainer: Any) -> None:
        self.tokenizer = trainer.processing_class

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self.asked.append([list(ids) for ids in prompt_ids])
        texts = [self.turns(self.tokenizer.decode(ids)) for ids in prompt_ids]
        return self.tokenizer(texts)["input_ids"]


def rows(number: int = 4, **columns: Any) -> Dataset:
    prompts = [[{"role": "user", "content": f"count {place}"}] for place in range(number)]
    return Dataset.from_dict({"prompt": prompts, **columns})


def given(turns: Any, environment: Any = Adder, **more: Any) -> dict[str, Any]:
    """Arguments of a trainer whose agents follow a script: `turns` has a text for each prompt so far."""
    return {
        "model": tiny.qwen2(max_position_embeddings=4096),
        "teacher_model": tiny.qwen2(48, seed=1, max_position_embeddings=4096),
        "train_dataset": rows(),
        "processing_class": words(),
        "rollout": Scripted(turns),
        "environment_factory": environment,
        "max_completion_length": 600,
        "max_steps": 1,
        **more,
    }


def once(text: str) -> Any:
    """A script: one call, then an answer."""
    return lambda prompt: f"done{END}" if "<tool_response>" in prompt else text
