"""Tasks of verifiers (run with 0.4) as rows, and their rewards, if these need no `runtime`, as a reward function.

tasks = list(taskset)  # such as `verifiers.v1.load_taskset(...)`
trainer = OPSDTrainer(..., train_dataset=rows(tasks), methods=[Rewards(scores(tasks))])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import verifiers.v1 as vf
from datasets import Dataset


def rows(tasks: Sequence[Any]) -> Dataset:
    """A prompt for each task, with its number."""
    prompts = [[{"role": "user", "content": task.data.prompt_text}] for task in tasks]
    return Dataset.from_dict({"prompt": prompts, "task": range(len(tasks))})


def scores(tasks: Sequence[Any]) -> Callable[..., Any]:
    """The reward that each task gives a conversation."""

    async def score(prompts: list[Any], completions: list[Any], task: list[int], **_: Any) -> list[float]:
        return [
            await _reward(tasks[place], [*prompt, *said])
            for place, prompt, said in zip(task, prompts, completions, strict=True)
        ]

    return score


async def _reward(task: Any, messages: list[Any]) -> float:
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig())
    )
    for place, message in enumerate(messages):
        parent, is_sampled = place - 1 if place else None, message["role"] == "assistant"
        trace.nodes.append(vf.MessageNode(message=message, parent=parent, sampled=is_sampled))
    await task.score(trace)
    return trace.reward
