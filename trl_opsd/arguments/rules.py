"""What options and arguments of a trainer may not be together, and what of it surprises, before anything is loaded."""

from __future__ import annotations

from typing import Any

from trl_opsd.options.rules import Rule
from trl_opsd.options.table import Situation


def _rates(now: Situation) -> list[Any]:
    """The learning rates of an optimizer that was passed; a warmup begins at 0."""
    groups = getattr(now.optimizers[0], "param_groups", [])
    return [group.get("initial_lr", group.get("lr")) for group in groups]


LEARNING = (
    Rule(
        lambda now: now.args.max_steps == 0,
        "`max_steps=0` means that it is not set, as -1 does, and training would last "
        "`num_train_epochs={0.args.num_train_epochs}`: set the number of optimizer steps, or leave `train_dataset` out "
        "to evaluate only.",
    ),
    Rule(
        lambda now: now.args.max_steps < 0 and now.args.num_train_epochs == 0,
        "`num_train_epochs={0.args.num_train_epochs}`: training would end after 0 steps: set more, or `max_steps`; to "
        "evaluate only, leave `train_dataset` out.",
    ),
    Rule(
        lambda now: now.optimizers[0] is None and now.args.learning_rate == 0,
        "`learning_rate={0.args.learning_rate}`: no weight would change: set a rate, 1e-6 to 1e-5 for most models and "
        "about ten times as much for LoRA; to evaluate only, leave `train_dataset` out.",
    ),
    Rule(
        lambda now: (rates := _rates(now)) and all(rate == 0 for rate in rates),
        "All parameters of the optimizer have a learning rate of 0, so no weight would change: set `lr`.",
    ),
)
"""With which a training would change nothing, or last as long as nobody asked for."""


def _best(now: Situation) -> str:
    if now.args.save_strategy == "best":
        return "save_strategy='best'"
    return "load_best_model_at_end=True" if now.args.load_best_model_at_end else ""


EVALUATING = (
    Rule(
        lambda now: now.args.eval_strategy == "no" and _best(now),
        "`{1}` without evaluations, so that no model would be the best: set `eval_strategy`, with an `eval_dataset`, "
        "or leave it out.",
    ),
    Rule(
        lambda now: now.args.metric_for_best_model is None and _best(now),
        "`{1}` without `metric_for_best_model`: set one, for instance 'loss'.",
    ),
    Rule(
        lambda now: now.args.eval_strategy != "no" and (now.eval_dataset is None or now.eval_dataset == {}),
        "`eval_strategy={0.args.eval_strategy.value!r}` without an `eval_dataset`: pass one, or leave it out.",
    ),
)
"""Evaluations without rows, and a best model without evaluations."""

BUILDING = (
    Rule(
        lambda now: now.args.reward_weight and not now.rewards and now.train_dataset is not None,
        "`reward_weight={0.args.reward_weight}` without rewards: pass `reward_funcs` to `OPSDTrainer`, or leave it "
        "out.",
    ),
    Rule(
        lambda now: (
            now.rewards
            and now.args.reward_weights is not None
            and len(now.args.reward_weights) != now.rewards
            and str(len(now.args.reward_weights))
        ),
        "`reward_weights` has {1} numbers, and `reward_funcs` {0.rewards}: expected one for each.",
    ),
    *EVALUATING,
    Rule(
        lambda now: now.teacher_prompt_fn is not None and now.args.seq_kd,
        "`teacher_prompt_fn` with `seq_kd=True`: it is called with a completion, which the teacher would have to write "
        "from its prompt: give a column 'teacher_prompt' or 'privileged_context' instead.",
    ),
    Rule(
        lambda now: now.teacher_prompt_fn is not None and now.args.remove_unused_columns,
        "`remove_unused_columns=True` would hide columns from `teacher_prompt_fn`: leave it at False.",
    ),
)
"""Arguments that options contradict."""

SURPRISES = (
    Rule(
        lambda now: (
            now.rewards
            and not now.args.reward_weight
            and now.train_dataset is not None
            and now.args.eval_strategy == "no"
        ),
        "`reward_funcs` are called in evaluations only, and this training has none: set `reward_weight` above 0 to "
        "learn from rewards, or `eval_strategy` to have them reported.",
        warns=True,
    ),
    Rule(
        lambda now: now.args.neftune_noise_alpha,
        "`neftune_noise_alpha={1:g}`: the figures of the training log, as `divergence/mean`, are those of a student "
        "with noise in its embeddings, and may be many times larger than without: compare evaluations, which have "
        "none.",
        warns=True,
    ),
    Rule(
        lambda now: now.optimizers[1] is None and 0 < now.args.max_steps < now.args.warmup_steps,
        "`warmup_steps={0.args.warmup_steps:g}` with `max_steps={0.args.max_steps}`: training ends before the rate "
        "reaches `learning_rate={0.args.learning_rate}`. Set fewer; below 1, it is a share of all steps.",
        warns=True,
    ),
)
"""What has another effect than one may expect."""
