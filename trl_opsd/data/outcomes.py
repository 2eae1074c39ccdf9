"""What the rewards of a group tell: what a teacher may read of other completions of its prompt."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a completion once the rewards of its group are: of all completions of its prompt."""

    reward: float | None
    """The sum of its rewards times `reward_weights`; `None` if no function gave one."""
    number: int
    """Its place in the group."""
    group: tuple[tuple[str, float | None], ...]
    """Text and reward of each completion of the group, this one too, in the order of generation."""

    def success(self, threshold: float) -> str | None:
        """The first other completion with a reward of at least `threshold`, without what it thought."""
        others = (
            without_thoughts(text).strip()
            for place, (text, reward) in enumerate(self.group)
            if place != self.number and reward is not None and reward >= threshold
        )
        return next(filter(None, others), None)


_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>", "<channel|>"),
)
"""What begins and ends a thought: in most families, Magistral, Seed-OSS, Command A Reasoning, gpt-oss, Gemma 4."""


def without_thoughts(text: str) -> str:
    """A completion without what it thought; templates may begin a thought in the prompt, and some never end."""
    for begin, end in _THOUGHTS:
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", text, flags=re.DOTALL)
        text = text.rpartition(end)[2].partition(begin)[0]
    return text


def texts_of(tokenizer: Any, completions: Sequence[list[int]]) -> list[str]:
    """Completions without special tokens, but for those that begin or end a thought."""
    added = (one.content for one in tokenizer.added_tokens_decoder.values() if one.special)
    special = {*tokenizer.all_special_tokens, *added}
    kept = {one for one in special if any(one in mark for pair in _THOUGHTS for mark in pair)}
    texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=not kept)
    return [re.sub("|".join(map(re.escape, special - kept)), "", text) for text in texts] if kept else texts


def reads_outcome(function: Any) -> bool:
    """Whether a `teacher_prompt_fn` takes an [`Outcome`] too."""
    try:
        inspect.signature(function).bind({}, "", None)
    except (TypeError, ValueError):
        return False
    return True
