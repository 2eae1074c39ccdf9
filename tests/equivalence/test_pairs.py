"""Options that meet: each pair is trained for some steps, in one process and in two, against loops in float64."""

from __future__ import annotations

import copy
import faulthandler
import itertools
import random
import warnings
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch
from accelerate.utils import gather_object
from byte_languages import byte_pairs
from datasets import Dataset
from oracle import GATE, TEMPLATE, THRESHOLD, Oracle, worth

from trl_opsd import OPSDTrainer, RolloutBackend

RATE, ROWS, LIMIT = 0.03, 8, 900
WORDS = tiny.tokenizer()
MINE, YOURS = byte_pairs(120, start=5000), byte_pairs(200)

VARIANTS: dict[str, dict[str, Any]] = {
    "contrast": {"contrast_weight": 0.5},
    "contrast, bounded": {"contrast_weight": 1.0, "contrast_clip": 3.0},
    "extrapolation": {"extrapolation": 1.25},
    "extrapolation below 1": {"extrapolation": 0.5},
    "anchor": {"anchor_weight": 0.3},
    "anchor, forward": {"anchor_weight": 0.3, "anchor_divergence": "forward_kl"},
    "gate, number": {"reward_gate": GATE},
    "gate, reward": {"reward_gate": "reward"},
    "gate, advantage": {"reward_gate": "advantage"},
    "success": {"teacher_context": "group_success", "success_threshold": THRESHOLD},
    "success alone": {"teacher_context": "group_success", "success_threshold": THRESHOLD, "columns": False},
    **{
        name: {"token_selection": name, "token_fraction": 0.5}
        for name in (
            "prefix",
            "random",
            "student_entropy",
            "teacher_divergence",
            "teacher_confidence",
            "student_surprise",
        )
    },
    "rising weights": {"position_weights": [0.25, 0.5, 1.0]},
    "weights from 0": {"position_weights": [0.0, 1.0]},
    "no student": {"lmbda": 0.0},
    "half a student": {"lmbda": 0.5},
    "four completions": {"num_generations": 4},
    "temperatures": {"student_temperature": 0.7, "teacher_temperature": 1.3},
    "shuffled": {"teacher_control": "shuffled"},
    "unprivileged": {"teacher_control": "unprivileged"},
    "constant": {"teacher_control": "constant"},
    "skip, flat groups": {"skip_prompts": "flat_groups"},
    "skip, near": {"skip_prompts": 2.0},
    "bytes": {"cross_tokenizer": "bytes"},
}
OF_GROUPS = ("gate, advantage", "success", "success alone", "skip, flat groups")
OF_REWARDS = ("gate, number", "gate, reward", *OF_GROUPS)
MIXING = (*OF_REWARDS, "no student", "half a student", "four completions", "shuffled", "skip, near")
"""What reads several rows, so that two processes have to agree."""


def pairs() -> list[tuple[str, str]]:
    """Of different options."""
    return [
        pair for pair in itertools.combinations(VARIANTS, 2) if not VARIANTS[pair[0]].keys() & VARIANTS[pair[1]].keys()
    ]


class Answering(RolloutBackend):
    """Answers by words that follow from the prompt, the step, and which answer it is; the first prompts get more."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def bind(self, trainer: Any) -> None:
        self.process = trainer.accelerator.process_index

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        texts = []
        for place, prompt in enumerate(self.words.batch_decode(prompt_ids)):
            number = tiny.PROMPTS.index(prompt)
            draw = random.Random(f"{number} {step} {place} {self.process}")
            said = "".join(draw.choices((" the", " e", "a", "tr", "ning", " of", "ee"), k=draw.randint(1, 3) + 2 * (number < 3)))
            texts.append(said + draw.choice(("", "<|im_end|>")))
        return self.words(texts)["input_ids"]


class Recorded(OPSDTrainer):
    """Records the rows that are taught, with their places among those of all processes."""

    def teach(self, rollout: Any, rows: Any) -> Any:
        for row, ids, weights in zip(rows, rollout.completion_lists(), rollout.weights, strict=True):
            seen = {"ids": ids, "off_policy": row.is_off_policy, "skipped": not row.prompt_weight}
            kept = weights[: len(ids)].nonzero()[:, 0].tolist()
            self.read.append((self.state.global_step, row.place, {**row, **seen, "kept": kept}))
        return super().teach(rollout, rows)


def models(by_bytes: bool) -> tuple[Any, Any]:
    sizes = (len(MINE), len(YOURS)) if by_bytes else (tiny.VOCABULARY,) * 2
    return tiny.qwen2(32, 0, vocab_size=sizes[0]), tiny.qwen2(48, 1, vocab_size=sizes[1])


def options_of(names: tuple[str, ...]) -> dict[str, Any]:
    """The options of a run; `columns` says whether the dataset has contexts."""
    given = {key: value for name in names for key, value in VARIANTS[name].items()}
    given.setdefault("num_generations", 2 if {*names} & {*OF_GROUPS} else 1)
    if "constant" not in names:  # which has no divergence
        given["divergence"] = ("forward_kl", "reverse_kl", "jsd")[sum(map(len, names)) % 3]
    return given


def trained(folder: Path, names: tuple[str, ...], processes: int = 1) -> dict[str, Any]:
    """The losses and weights of a run, and the rows of its steps; or why it was refused. Collective."""
    options = options_of(names)
    prompts = tiny.PROMPTS[: ROWS // options["num_generations"]]
    columns: dict[str, list[str]] = {"prompt": prompts}
    if options.pop("columns", True):
        columns["privileged_context"] = [f"hint {number}" for number in range(len(prompts))]
    if "contrast_weight" in options:
        columns["contrast_context"] = [f"wrong {7 * number % 5}" for number in range(len(prompts))]
    if "lmbda" in options:
        columns["completion"] = [f" given {number}, the end"[: 8 + number] for number in range(len(prompts))]
    by_bytes = "cross_tokenizer" in options
    student, teacher = models(by_bytes)
    words = MINE if by_bytes else WORDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args = tiny.config(
                folder, **options, per_device_train_batch_size=2, gradient_accumulation_steps=ROWS // 2 // processes,
                max_steps=3 if "skip_prompts" in options else 2, shuffle_dataset=False, optim="sgd", learning_rate=RATE,
                max_grad_norm=1e9, max_completion_length=60,
                **({"teacher_prompt_template": TEMPLATE} if len(columns) > 1 or "teacher_context" in options else {}),
            )  # fmt: skip
            trainer = Recorded(
                model=student,
                teacher_model=teacher,
                args=args,
                train_dataset=Dataset.from_dict(columns),
                processing_class=words,
                teacher_processing_class=YOURS if by_bytes else None,
                rollout=Answering(words),
                reward_funcs=rewarded if {*names} & {*OF_REWARDS} else None,
            )
            trainer.read = []
            trainer.train()
        except ValueError as error:
            return {"refused": str(error)}
    steps: list[list[Any]] = [[] for _ in range(args.max_steps)]
    for step, place, row in sorted(gather_object(trainer.read), key=lambda one: one[:2]):
        assert place == len(steps[step])
        steps[step].append(row)
    logs = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    return {
        "steps": steps,
        "losses": [logs.get(step + 1) for step in range(args.max_steps)],
        "weights": [one.detach().clone() for one in trainer.model.parameters()],
    }


def rewarded(completions: list[str], **_: Any) -> list[float]:
    return list(map(worth, completions))


def expected(names: tuple[str, ...], steps: list[list[Any]]) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and weights in float64."""
    options = options_of(names)
    by_bytes = "cross_tokenizer" in options
    student, teacher = models(by_bytes)
    oracle = Oracle(student, teacher, MINE if by_bytes else WORDS, options, RATE, YOURS if by_bytes else None)
    return [oracle.step(rows) for rows in steps], list(student.parameters())


def apart(names: tuple[str, ...], found: dict[str, Any]) -> tuple[list[float], list[float | None], float]:
    """Expected losses, found ones, and how far apart the weights are, relative to how far they have come."""
    losses, weights = expected(names, found["steps"])
    before = models("bytes" in names)[0].parameters()
    moved = max(float((one - was).detach().abs().max()) for one, was in zip(weights, before, strict=True))
    off = max(float((one - mine.double()).detach().abs().max()) for one, mine in zip(weights, found["weights"], strict=True))
    return losses, found["losses"], off / moved if moved else off
