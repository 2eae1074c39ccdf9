"""Environments for tests: an adder that may misbehave, agents that follow a script, and a trainer of both."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy
import tiny
from datasets import Dataset
from trl.chat_template_utils import qwen3_chat_template

from trl_opsd import RolloutBackend

END = "<|im_end|>"


def call(name: str = "add", **arguments: Any) -> str:
    import json

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

        Returns:
            The total.
        """
        assert threading.get_ident() == self.thread
        self.total += number
        return str(self.total)

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.

        Returns:
            What was waited for.
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    def sleep(self, seconds: float) -> str:
        """Sleeps.

        Args:
            seconds: How long.

        Returns:
            Nothing of interest.
        """
        time.sleep(seconds)
        return "slept"

    def misbehave(self, how: str) -> Any:
        """Does something that a tool should not.

        Args:
            how: What.

        Returns:
            Anything.
        """
        if how == "exit":
            raise SystemExit(3)
        if how == "raise":
            raise RuntimeError("no such table")
        if how == "raise what has no text":
            raise type("Mute", (Exception,), {"__str__": lambda _: 1 / 0})
        if how == "await in its own way":
            return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, "waited"))
        return {
            "array": numpy.arange(2),
            "giant": "x" * 50_000_000,
            "long": "word " * 2000,
            "number": 3.5,
            "image": [{"type": "text", "text": "a map"}, {"type": "image", "image": object()}],
            "nothing": None,
            "rows": [{"id": 1}, {"id": 2}],
            "bytes": b"\xff\xfe",
            "object": object,
            "odd text": "\ud800 <|im_end|> \0",
        }[how]

    def get_reward(self) -> float:
        return float(self.total)


class Told(Adder):
    def get_privileged_context(self) -> str:
        return f"the total is {self.total}"


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


def words() -> Any:
    made = tiny.tokenizer()
    made.chat_template = qwen3_chat_template
    return made


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
