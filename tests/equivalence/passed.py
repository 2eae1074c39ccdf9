"""What a user passes to a run of test_pairs.py besides options: functions, an environment, and a method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import oracle
import torch
from controls import Constant, Shuffled, Unprivileged
from iw_opd import WeighedAhead
from oracle import FACTORS, NLL, REWARDS, TABLES
from small_methods import AlongCompletion, AnchoredBy, Discounted, ShortAtFirst
from support import tiny
from turns import EqualTurns
from visits import SkipFlatGroups, SkipNear, Visits

from trl_opsd import Method


class Mine(Method):
    skips = adds_nll = True

    def before(self, rows: Any) -> None:
        for row in rows:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
            row.prompt_weight *= oracle.method_weight(prompt, self.host.state.global_step)
            row.nll_weight += NLL

    def token_weights(self, weights: Any, rollout: Any, rows: Any, targets: Any) -> Any:
        self.host.record("mine/weights", weights.sum())
        return weights * FACTORS["one"] ** torch.arange(weights.size(1), device=weights.device)


class Silent:
    """An environment without tools, which says something afterwards."""

    def reset(self, prompt: Any, **_: Any) -> None:
        self.prompt = prompt[0]["content"]

    def get_feedback(self) -> str | None:
        return oracle.feedback(self.prompt)


def rewarding(function: Any) -> Any:
    """A reward function, of text or messages."""

    def rewarded(prompts: list[Any], completions: list[Any], **_: Any) -> list[Any]:
        texts = [
            (prompt, text) if isinstance(prompt, str) else (prompt[0]["content"], text[0]["content"])
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        return [function(*one) for one in texts]

    rewarded.__name__ = function.__name__
    return rewarded


class ByVisits(Visits):
    """Weighs a prompt by the gap of its last visit."""

    def weight(self, row: Any, last: Any) -> float:
        return oracle.prompt_weight(row["prompt"], last and (last.gap, last.skipped))


METHODS: dict[str, Callable[[], Method]] = {
    "one": Mine,
    "equal turns": EqualTurns,
    "shuffled": Shuffled,
    "unprivileged": Unprivileged,
    "constant": Constant,
    "flat groups": SkipFlatGroups,
    "near": partial(SkipNear, 2.0),
    "by visits": ByVisits,
    "discounted": lambda: Discounted(FACTORS["discounted"]),
    "growing": lambda: ShortAtFirst(3, 2),
    "anchored": AnchoredBy,
    "ahead": WeighedAhead,
    **{name: partial(AlongCompletion, table) for name, table in TABLES.items()},
}
"""Those of `examples/methods`, too."""
FUNCTIONS: dict[str, dict[str, Any]] = {
    "teacher_prompt_fn": {
        "hint": lambda row, text: oracle.hint(row["prompt"], text),
        "judgement": lambda row, text, of: oracle.judgement(row["prompt"], text, [reward for _, reward in of.group]),
    },
    "environment_factory": {"silent": Silent},
}


REWARD_FUNCS = {name: [*map(rewarding, functions)] for name, functions in REWARDS.items()}


def functions_of(options: dict[str, Any]) -> dict[str, Any]:
    """What of the options is none: the trainer's arguments, which have names there; taken out of the options."""
    if "reward_funcs" in options:
        options["reward_funcs"] = REWARD_FUNCS[options["reward_funcs"]]
    methods = [*(METHODS[name]() for name in options.pop("methods", ())), *tiny.rewards(options)]
    return {"methods": methods} | {key: named[options.pop(key)] for key, named in FUNCTIONS.items() if key in options}
