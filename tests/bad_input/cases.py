"""What a case of bad input is made of, and what it may use to come about; it knows no single case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from trl_opsd import OPSDConfig, OPSDTrainer


@dataclass(frozen=True, slots=True)
class Lab:
    """What a case may use, and what it has built."""

    folder: Path
    """Empty, and the `output_dir` of every trainer."""
    patch: pytest.MonkeyPatch
    """Undone after the case."""
    make_trainer: Callable[..., OPSDTrainer]
    """The fixture, for trainers that are meant to learn."""
    _built: list[tuple[OPSDTrainer, dict[str, torch.Tensor]]] = field(default_factory=list)

    def make(self, **given: Any) -> OPSDTrainer:
        """A trainer that is to refuse something, if not now then before it learns."""
        trainer = self.make_trainer(**given)
        self._built.append((trainer, {name: one.clone() for name, one in trainer.model.state_dict().items()}))
        return trainer

    def config(self, **options: Any) -> OPSDConfig:
        return tiny.config(self.folder, **options)

    def checkpoint(self) -> Path:
        """After the first step of a run with the default options of `make_trainer`."""
        self.make_trainer(save_strategy="steps", save_steps=1, max_steps=1).train()
        return self.folder / "checkpoint-1"

    def check_that_nothing_was_learnt(self) -> None:
        """A trainer that was built before it refused has neither taken a step nor read a checkpoint."""
        for trainer, before in self._built:
            assert (trainer.state.global_step, trainer.loads) == (0, 0)
            now = trainer.model.state_dict()
            assert now.keys() == before.keys()
            assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


@dataclass(frozen=True, slots=True)
class Case:
    """One mistake, and the sentence it is answered with."""

    phrase: str
    """The words of the list of bad inputs that it belongs to."""
    name: str
    """Tells it from the others of that phrase."""
    message: str
    """A regular expression that is found in the message."""
    provoke: Callable[[Lab], object]
    error: type[Exception] = ValueError
    before_loading: bool = False
    """Whether it is refused before weights are read."""
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
    """Options that the config refuses by itself; a config reads no weights."""
    name = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return Case(phrase, name, message, lambda lab: lab.config(**options), before_loading=True)


class MustNotLoad:
    """Any use of it is a model that was loaded too early."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the model was touched ({name}) before the arguments were checked")


def untouched(phrase: str, name: str, message: str, error: type[Exception] = ValueError, **given: Any) -> Case:
    """Arguments that are refused before the student is so much as looked at."""
    return Case(
        phrase,
        name,
        message,
        lambda lab: lab.make(**{"model": MustNotLoad(), "teacher_model": "teacher", **given}),
        error,
        before_loading=True,
    )
