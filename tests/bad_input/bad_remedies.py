"""Remedies and controls that cannot work as they are set, or that would change nothing."""

from __future__ import annotations

from typing import Any

from bad_rows import trained_on
from cases import Case, Lab, option, untouched
from datasets import Dataset
from peft import LoraConfig
from support import tiny

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


def _skips(name: str, message: str, **given: Any) -> Case:
    return untouched("remedies", name, message, prompt_weight_fn=lambda row, last: 1, **given)


def _raises(row: Any, last: Any) -> float:
    return float(row["nothing"])


WEIGHTS = [
    ("negative", lambda row, last: -1, "returned -1 for row 0 of the batch of step 1: expected a number from 0, which"),
    ("NaN", lambda row, last: float("nan"), "returned nan for row 0 of the batch of step 1: expected a number from 0"),
    ("too large", lambda row, last: 1e21, r"returned 1e\+21 for row 0"),
    ("nothing", lambda row, last: None, "returned None for row 0"),
    ("text", lambda row, last: "1", "returned '1' for row 0"),
    ("an error", _raises, "raised this for row 0 of the batch of step 1"),
]

CASES: list[Case] = [
    option("remedies", "`skip_prompts='flat'`: expected 'flat_groups', or a finite number", skip_prompts="flat"),
    option("remedies", "`skip_prompts=0`", skip_prompts=0),
    option("remedies", "`num_generations` to 2 or more", skip_prompts="flat_groups"),
    option("remedies", "is known when the step before has ended", skip_prompts=0.1, overlap="ahead"),
    option("remedies", "is known when the step before has ended", skip_prompts=0.1, overlap="step"),
    option("remedies", "may have one alone", skip_prompts=0.1, teacher_control="shuffled"),
    option("remedies", "the control replaces the objective", skip_prompts=0.1, teacher_control="constant"),
    option("remedies", "there is one reference alone", extrapolation=2, extrapolation_reference="a", anchor_weight=1),
    Case(
        "remedies",
        "a reference that is no teacher",
        "`extrapolation_reference='base'`: expected the name of one of several teachers, but there are .'teacher'.: ",
        lambda lab: lab.make(extrapolation=1.25, extrapolation_reference="base"),
        before_loading=True,
    ),
    Case(
        "remedies",
        "a reference whose context is too short",
        "input for row . of the batch of step 1 has .* prompt tokens and .* completion tokens, but its context is 28",
        lambda lab: _trains(
            lab,
            extrapolation=1.25,
            extrapolation_reference="base",
            teacher_model={"one": tiny.qwen2(48, 1), "base": tiny.qwen2(40, 2, max_position_embeddings=28)},
            train_dataset=tiny.rows().add_column("teacher", ["one"] * 8),
            shuffle_dataset=False,
            per_device_train_batch_size=8,
        ),
    ),
    Case(
        "remedies",
        "flat groups without rewards",
        "`skip_prompts='flat_groups'` without rewards: pass `reward_funcs`",
        lambda lab: lab.make(skip_prompts="flat_groups", **EIGHT),
        before_loading=True,
    ),
    _skips("a weight and overlap", "`prompt_weight_fn` with `overlap='ahead'`", overlap="ahead"),
    _skips("a weight and a shuffle", "`prompt_weight_fn` with `teacher_control='sh.*'`", teacher_control="shuffled"),
    _skips("a weight without columns", "would hide columns from `prompt_weight_fn`", remove_unused_columns=True),
    untouched(
        "remedies",
        "a weight of a row alone",
        "`prompt_weight_fn` has another signature .*: expected a function of two arguments, the row as a dict, and a",
        TypeError,
        prompt_weight_fn=lambda row: 1,
    ),
    *(
        Case(
            "remedies",
            f"a weight that is {name}",
            f"`prompt_weight_fn` {message}",
            lambda lab, function=function: _trains(lab, prompt_weight_fn=function),
            KeyError if name == "an error" else ValueError,
        )
        for name, function, message in WEIGHTS
    ),
    option("remedies", "`reward_gate='best'`: expected a finite number, 'reward' or 'advantage'", reward_gate="best"),
    option("remedies", "`reward_gate=nan`", reward_gate=float("nan")),
    option("remedies", "`extrapolation=-1.0`", extrapolation=-1.0),
    option("remedies", "`num_generations` to 2 or more", teacher_context="group_success"),
    option("remedies", "`num_generations` to 2 or more", reward_gate="advantage"),
    option("remedies", "before the other completions of its step", reward_gate=1.0, overlap="step"),
    option("remedies", "before the other completions of its step", teacher_control="shuffled", overlap="step"),
    option(
        "remedies",
        "the teacher's context is not read",
        teacher_control="unprivileged",
        teacher_context="group_success",
        num_generations=2,
    ),
    *(
        option(
            "remedies",
            f"`{name}={value!r}` with `lmbda=0.*it generates none",
            lmbda=0,
            num_generations=2,
            **{name: value},
        )
        for name, value in (
            ("reward_weight", 0.5),
            ("reward_gate", 1.0),
            ("teacher_context", "group_success"),
            ("skip_prompts", "flat_groups"),
        )
    ),
    Case(
        "remedies",
        "outcomes of no completion of the student",
        "a third argument, the rewards of all completions of a prompt, with `lmbda=0`",
        lambda lab: lab.make(
            teacher_prompt_fn=lambda row, completion, outcome: row["prompt"], reward_funcs=len, lmbda=0
        ),
        before_loading=True,
    ),
    *(
        option("remedies", "with the context that the control takes away", teacher_control=one, seq_kd=True, lmbda=0.5)
        for one in ("shuffled", "unprivileged")
    ),
    Case(
        "remedies",
        "rows that name the reference",
        "row . of train_dataset names the teacher 'base', which is the `extrapolation_reference`, so nothing would be",
        lambda lab: lab.make(
            extrapolation=1.25,
            extrapolation_reference="base",
            teacher_model={"one": tiny.qwen2(48, 1), "base": tiny.qwen2(40, 2)},
            train_dataset=tiny.rows().add_column("teacher", ["one", "base"] * 4),
        ),
    ),
    option("remedies", "the control replaces the objective", teacher_control="constant", divergence="jsd"),
    option("remedies", "the control replaces the objective", teacher_control="constant", token_selection="prefix"),
    option("remedies", "`teacher_control='random'`: expected one of None, 'shuffled'", teacher_control="random"),
    Case(
        "remedies",
        "a gate without rewards",
        "`reward_gate=1.0` without rewards: pass `reward_funcs`",
        lambda lab: lab.make(reward_gate=1.0),
        before_loading=True,
    ),
    Case(
        "remedies",
        "a success without rewards",
        "`teacher_context='group_success'` without rewards",
        lambda lab: lab.make(teacher_context="group_success", **EIGHT),
        before_loading=True,
    ),
    untouched(
        "remedies",
        "a control and an objective",
        "`teacher_control='constant'` with the argument `divergence`: the control replaces the objective",
        divergence="jsd",
        teacher_control="constant",
    ),
    Case(
        "remedies",
        "an anchor under which the weights change",
        "`anchor_weight` and `extrapolation` need the student without its adapter, but .* is trainable and shared",
        lambda lab: lab.make(anchor_weight=0.1, peft_config=LoraConfig(r=4, bias="all", target_modules="all-linear")),
    ),
    untouched(
        "remedies",
        "a function of rewards that there are not",
        "takes a third argument, the rewards of all completions of a prompt, without `reward_funcs`",
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
    Case(
        "remedies",
        "one prompt to shuffle",
        "`teacher_control='shuffled'`, but the batch of step 1 has one prompt alone",
        lambda lab: _trains(lab, teacher_control="shuffled", num_generations=2, per_device_train_batch_size=2),
    ),
]
