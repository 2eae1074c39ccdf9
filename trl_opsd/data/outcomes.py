"""What rewards tell of a completion: its weight in the loss, and what its teacher may read of its group."""

from __future__ import annotations

import inspect
import math
import re
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
            _THOUGHT.sub("", text).strip()
            for place, (text, reward) in enumerate(self.group)
            if place != self.number and reward is not None and reward >= threshold
        )
        return next(filter(None, others), None)


_THOUGHT = re.compile("<think>.*?</think>", re.DOTALL)


def reads_outcome(function: Any) -> bool:
    """Whether a checked `teacher_prompt_fn` takes an [`Outcome`] too."""
    try:
        inspect.signature(function).bind({}, "", None)
    except (TypeError, ValueError):
        return False
    return True


def check_prompt_fn(function: Any) -> None:
    """Refuses a `teacher_prompt_fn` that cannot be called with a row and the text of a completion (`TypeError`)."""
    expected = (
        "expected a function of two arguments, the row as a dict and the text of the completion, or of three, with an "
        "`Outcome`"
    )
    if not callable(function) or isinstance(function, type):
        what = f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
        raise TypeError(f"`teacher_prompt_fn` is {what}: {expected}.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise TypeError(f"`teacher_prompt_fn` is asynchronous, but would not be awaited: {expected}.")
    if reads_outcome(function):
        return
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise TypeError(f"`teacher_prompt_fn` has another signature ({error}): {expected}.") from None
    except ValueError:  # built-in functions may have no signature
        return


def gate(kind: float | str, reward: float, advantage: float) -> float:
    """The weight of a completion in the loss by its reward, NaN where it has none: `OPSDConfig.reward_gate`."""
    if math.isnan(reward):
        return 0.0
    if isinstance(kind, str):
        return max(0.0, {"reward": reward, "advantage": advantage}[kind])
    return float(reward >= kind)
