"""The form of a case of bad input and the tools it may use; no single case is known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny

from trl_opsd import OPSDConfig, OPSDTrainer


@dataclass(frozen=True, slots=True)
class Lab:
    """The tools of a case, and the trainers it has built."""

    folder: Path
    """Empty, and the `output_dir` of every trainer."""
    patch: pytest.MonkeyPatch
    """Undone after the case."""
    make_trainer: Callable[..., OPSDTrainer]
    """The fixture, for trainers that are expected to train."""
    _built: list[tuple[OPSDTrainer, dict[str, torch.Tensor]]] = field(default_factory=list)

    def make(self, **given: Any) -> OPSDTrainer:
        """A trainer that must refuse its input, at construction or before its first step."""
        trainer = self.make_trainer(**given)
        self._built.append((trainer, {name: one.clone() for name, one in trainer.model.state_dict().items()}))
        return trainer

    def config(self, **options: Any) -> OPSDConfig:
        return tiny.config(self.folder, **options)

    def checkpoint(self) -> Path:
        """After the first step of a run with the default options of `make_trainer`."""
        self.make_trainer(save_strategy="steps", save_steps=1, max_steps=1).train()
        return self.folder / "checkpoint-1"

    def check_that_nothing_was_learned(self) -> None:
        """Asserts that trainers which refused after construction have neither taken a step nor loaded a checkpoint."""
        for trainer, before in self._built:
            assert (trainer.state.global_step, trainer.loads) == (0, 0)
            now = trainer.model.state_dict()
            assert now.keys() == before.keys()
            assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


@dataclass(frozen=True, slots=True)
class Case:
    """One mistake, and the message that refuses it."""

    phrase: str
    """Its entry in the list of bad inputs, `PHRASES`."""
    name: str
    """Distinguishes it from other cases of that phrase."""
    message: str
    """A regular expression that the message must match."""
    provoke: Callable[[Lab], object]
    error: type[Exception] = ValueError
    before_loading: bool = False
    """Whether it is refused before weights are loaded."""
    needs_vllm: bool = False

    def param(self) -> Any:
        """The case as a parameter of a test, with its markers."""
        marks = [pytest.mark.refusal]
        if self.before_loading:
            marks.append(pytest.mark.before_loading)
        if self.needs_vllm:
            marks.append(pytest.mark.vllm)
        elif self.before_loading:
            marks.append(pytest.mark.quick)
        return pytest.param(self, id=f"{self.phrase}: {self.name}", marks=marks)


def option(phrase: str, message: str, **options: Any) -> Case:
    """Options that the config itself refuses; a config loads no weights."""
    name = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return Case(phrase, name, message, lambda lab: lab.config(**options), before_loading=True)


def method(phrase: str, message: str, **options: Any) -> Case:
    """Settings of a method that a trainer refuses before it loads anything, in the flat names of `tiny.SETTINGS`."""
    name = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return Case(phrase, name, message, lambda lab: lab.make(**options), before_loading=True)


class MustNotLoad(torch.nn.Module):
    """Fails on any use, which would mean a model was loaded too early."""

    def __init__(self) -> None:
        """Has no parts."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the model was touched ({name}) before the arguments were checked")


def untouched(phrase: str, name: str, message: str, error: type[Exception] = ValueError, **given: Any) -> Case:
    """Arguments that are refused before the student is used at all."""
    return Case(
        phrase,
        name,
        message,
        lambda lab: lab.make(**{"model": MustNotLoad(), "teacher_model": "teacher", **given}),
        error,
        before_loading=True,
    )
