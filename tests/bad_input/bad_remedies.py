"""Remedies and controls that cannot work as they are set, or that would change nothing."""

from __future__ import annotations

from typing import Any

from bad_rows import trained_on
from cases import Case, Lab, method, untouched
from datasets import Dataset
from peft import LoraConfig

from trl_opsd import OPSDTrainer
from trl_opsd.types import TeacherTargets

EIGHT = {"per_device_train_batch_size": 8, "num_generations": 4}
CONTRAST = {"contrast_weight": 0.5}


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def rows(**columns: Any) -> Dataset:
    return Dataset.from_dict({"prompt": ["a"] * 4, "privileged_context": ["hint"] * 4, **columns})


class OwnTargets(OPSDTrainer):
    def teach(self, rollout: Any, rows: Any) -> TeacherTargets:
        return TeacherTargets(hidden=super().teach(rollout, rows).hidden)


def _trains(lab: Lab, **given: Any) -> None:
    lab.make(**given).train()


CASES: list[Case] = [
    method("remedies", r"gate='best'\)`: expected a valid number", reward_gate="best"),
    method("remedies", r"gate=nan\)`: expected a finite number", reward_gate=float("nan")),
    method("remedies", "`num_generations=1` with `Rewards`", teacher_context="group_success", reward_funcs=len),
    method("remedies", "`num_generations=1` with `Rewards`", reward_gate="advantage", reward_funcs=len),
    method("remedies", "`overlap='step'` with `Rewards`", reward_gate=1.0, overlap="step", reward_funcs=len),
    *(
        method(
            "remedies",
            "`lmbda=0` with `Rewards`, which needs rewards of the student's completions",
            **{"lmbda": 0, "num_generations": 2, "reward_funcs": len, **given},
        )
        for given in ({"reward_weight": 0.5}, {"reward_gate": 1.0}, {"teacher_context": "group_success"})
    ),
    untouched(
        "remedies",
        "outcomes of no completion of the student",
        "`lmbda=0` with `PromptFunction`, which needs rewards of the student's completions",
        teacher_prompt_fn=lambda row, completion, outcome: row["prompt"],
        lmbda=0,
    ),
    Case(
        "remedies",
        "a gate without rewards",
        "`Rewards` without rewards: pass `methods=",
        lambda lab: lab.make(reward_gate=1.0),
        before_loading=True,
    ),
    Case(
        "remedies",
        "two that make what teachers read",
        "`teacher_prompt_fn` with `Rewards`, which makes what teachers read",
        lambda lab: lab.make(
            teacher_context="group_success", reward_funcs=len, teacher_prompt_fn=lambda row, completion: "a", **EIGHT
        ),
        before_loading=True,
    ),
    Case(
        "remedies",
        "an anchor under which the weights change",
        "`Anchor` and `Extrapolation` need the student without its adapter, but .* is trainable and shared",
        lambda lab: lab.make(anchor_weight=0.1, peft_config=LoraConfig(r=4, bias="all", target_modules="all-linear")),
    ),
    untouched(
        "remedies",
        "a function of rewards that there are not",
        "`PromptFunction` without rewards: pass `methods=",
        teacher_prompt_fn=lambda row, completion, outcome: "a",
    ),
    trained_on(
        "remedies", "no contrast", "row 0 of train_dataset has neither of 'contrast_prompt' and", rows(), **CONTRAST
    ),
    trained_on(
        "remedies",
        "two contrasts",
        "row 0 of train_dataset has both of 'contrast_prompt' and 'contrast_context'",
        rows(contrast_prompt=["a"] * 4, contrast_context=["a"] * 4),
        **CONTRAST,
    ),
    trained_on(
        "remedies",
        "a contrast that is the context",
        "The contrast in row 3 of train_dataset is the teacher's own prompt, so nothing would be subtracted",
        rows(contrast_context=["wrong", "wrong", "wrong", "hint"]),
        **CONTRAST,
    ),
    trained_on(
        "remedies",
        "an empty contrast",
        "The privileged_context in row 1 of train_dataset is empty",
        rows(contrast_context=["wrong", "", "wrong", "wrong"]),
        **CONTRAST,
    ),
    trained_on(
        "remedies",
        "a contrast that is too long",
        "The contrast in row 2 of train_dataset has .* tokens",
        rows(contrast_context=["wrong", "wrong", "wrong" * 99, "wrong"]),
        **CONTRAST,
    ),
    Case(
        "remedies",
        "targets without the contrast",
        r"`OwnTargets.teach` returned targets without those of \['contrast'\], which the objective needs",
        lambda lab: _trains(lab, cls=OwnTargets, train_dataset=rows(contrast_context=["wrong"] * 4), **CONTRAST),
    ),
]
