"""Options and arguments that do not exist."""

from __future__ import annotations

from typing import Any

from cases import Case

from trl_opsd import OPSDConfig, OPSDTrainer


def unknown(message: str, **options: Any) -> Case:
    """Options that do not exist."""
    name = ", ".join(options)
    return Case("unknown option", name, message, lambda lab: OPSDConfig("out", **options), TypeError, True)


def unknown_argument(message: str, name: str) -> Case:
    """An argument of the trainer that does not exist."""

    def provoke(lab: Any) -> None:
        OPSDTrainer("student", "teacher", **{name: object()})

    return Case("unknown argument", name, message, provoke, TypeError, True)


CASES: list[Case] = [
    unknown("has no option 'learing_rate': did you mean 'learning_rate'", learing_rate=1e-5),
    unknown("did you mean 'vllm_server_host'", vllm_host="::1"),
    unknown("did you mean 'teacher_model_revision'", teacher_revision="main"),
    unknown("has no option 'zzz': docs/migration.md has the names of other trainers, docs/reference.md all", zzz=1),
    unknown("'max_new_tokenz': .*\n`OPSDConfig` has no option 'zzz': ", max_new_tokenz=1, zzz=1),
    unknown_argument(r"'compute_metrics': pass `methods=\[Rewards\(.*, and an `eval_dataset`", "compute_metrics"),
    unknown_argument(r"'reward_funcs': pass `methods=\[Rewards\(", "reward_funcs"),
    unknown(r"has no option 'reward_weight': pass `methods=\[Rewards\(", reward_weight=0.1),
    unknown_argument("did you mean 'peft_config'", "peft_cfg"),
    unknown_argument(r"it is an option, `args=OPSDConfig\(max_steps=...\)`", "max_steps"),
]
