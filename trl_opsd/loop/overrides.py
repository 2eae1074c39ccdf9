"""What a user's subclass of the trainer overrides: the four verbs, and nothing that makes a batch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from trl_opsd._compat.trl import DistillationTrainer

VERBS = ("complete", "teach", "weigh", "compare")
"""What a user's subclass may override."""

_OF_BATCHES = (
    *("_prepare_inputs", "_generate_and_score_completions", "_generate", "_generate_single_turn", "_tool_call_loop"),
    *("_tokenize_prompts", "_get_last_hidden_state", "_compute_loss", "_get_train_sampler"),
)
"""Methods of TRL's trainer that make or read a batch there; here an override would have no effect, or a stale one."""


def of_package(method: Any) -> bool:
    """Whether a method is TRL's or ours."""
    ours = __name__.partition(".")[0]
    return str(getattr(method, "__module__", "")).startswith((f"{ours}.", DistillationTrainer.__module__))


def own_verbs(trainer: type) -> dict[str, Callable[..., Any]]:
    """The verbs that a user's subclass overrides."""
    return {verb: method for verb in VERBS if not of_package(method := getattr(trainer, verb))}


def check_methods(trainer: type) -> None:
    """Refuses overrides of what makes a batch, and names of its own that are nearly a verb."""
    for name in _OF_BATCHES:
        if not of_package(getattr(trainer, name)):
            raise TypeError(
                f"`{trainer.__name__}.{name}` makes batches in TRL, not here: override one of {', '.join(VERBS)}, or "
                "pass a method (docs/extending.md)."
            )
    for name in vars(trainer):
        # A longer name, such as `complete_with_hints`, is a helper and no misspelling.
        near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.8)
        if near and name not in VERBS and not name.startswith(near[0]):
            raise TypeError(f"`{trainer.__name__}.{name}` is never called; did you mean `{near[0]}`?")
