"""What a user's subclass of the trainer overrides, and what it may not."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig

VERBS = ("complete", "teach", "weigh", "compare")
"""What a user's subclass may override."""

_PASSED_BY = ("_generate_and_score_completions", "_prepare_inputs", "compute_loss")
"""Methods that a batch passes; an override may change it."""

_ELSEWHERE = {
    "pass a `divergence` (docs/extending.md)": "generalized_jsd_loss _reduce_divergence_loss _compute_iw_opd_loss "
    "_compute_policy_loss _compute_self_distillation_loss _compute_server_forward_kl_loss",
    "override `complete`, or pass a `rollout`": "_generate _generate_single_turn _tool_call_loop "
    "generate_on_policy_outputs sample_rollouts _generate_vllm "
    "_generate_transformers _generate_student_completions _generate_on_policy_for_slices",
    "override `teach`": "_get_last_hidden_state _get_per_token_logps_and_entropies _get_teacher_logits _forward_logits "
    "_setup_teacher_model _compute_teacher_student_logits _get_teacher_token_logprobs_from_server",
    "override `weigh`": "get_high_entropy_mask get_off_policy_mask get_gamma_weights",
    "pass `reward_funcs`": "_calculate_rewards",
    "prepare the rows with `dataset.map`": "_prepare_dataset _tokenize_prompts",
}
_UNCALLED = {name: instead for instead, names in _ELSEWHERE.items() for name in names.split()}
"""Methods of TRL's trainers that are never called here, and what to do instead."""


def of_package(method: Any) -> bool:
    """Whether a method is TRL's or ours."""
    ours = __name__.partition(".")[0]
    return str(getattr(method, "__module__", "")).startswith((f"{ours}.", DistillationTrainer.__module__))


def may_change_batches(trainer: Any) -> bool:
    """Whether the user overrides a method that a batch passes; the same in all processes."""
    return not all(of_package(getattr(trainer, name)) for name in _PASSED_BY)


def prepares_batches(trainer: DistillationTrainer) -> bool:
    """Whether `_prepare_inputs` is the user's, which takes the rows of a call and may return anything."""
    if of_package(trainer._prepare_inputs):
        return False
    if trainer.args.max_tokens_per_microbatch is not None:
        raise ValueError(
            f"`max_tokens_per_microbatch` with `{type(trainer).__name__}._prepare_inputs`, which returns one "
            "micro-batch per call: remove the option, or override `weigh` or `compare` instead."
        )
    return True


def overrides(trainer: Any, verb: str) -> bool:
    """Whether a user's subclass has its own implementation of a verb."""
    return not of_package(getattr(type(trainer), verb))


def own_verbs(trainer: type) -> dict[str, Callable[..., Any]]:
    """The verbs that a user's subclass overrides."""
    return {verb: method for verb in VERBS if not of_package(method := getattr(trainer, verb))}


def _is_users(one: type) -> bool:
    return not one.__module__.startswith(("trl_opsd.", "trl.")) and issubclass(one, DistillationTrainer)


def check_methods(trainer: type, args: OPSDConfig) -> None:
    """Rejects overrides that nothing calls, or of what needs a whole batch: overlap trains before its last row."""
    for one in trainer.__mro__:
        # A longer name, such as `complete_with_hints`, is a helper and no misspelling.
        for name in vars(one) if _is_users(one) else ():
            near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.8)
            if near and name not in VERBS and not name.startswith(near[0]):
                raise TypeError(f"`{one.__name__}.{name}` is never called; did you mean `{near[0]}`?")
    for name, instead in _UNCALLED.items():
        if not of_package(getattr(trainer, name, check_methods)):
            raise TypeError(f"`{trainer.__name__}.{name}` is never called, unlike in TRL's trainer: {instead}.")
    for name in _PASSED_BY if args.overlap == "step" else ():
        if not of_package(getattr(trainer, name)):
            raise TypeError(
                f"`overlap={args.overlap!r}` with `{trainer.__name__}.{name}`, which needs the whole batch, but rows "
                "are trained on before the last is generated: override `weigh` or `compare` instead, or remove the "
                "option."
            )
