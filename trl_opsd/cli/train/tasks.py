"""A built-in task, for a script that has one: models, data, options and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_opsd import OPSDTrainer
    from trl_opsd.cli.train.data import Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task that `--task NAME` trains on."""

    options: Path
    """A YAML file of options, which the command line and the file of `--config` override."""
    student: str
    """Path of the student, unless another one is named."""
    teacher: str
    """Path of the teacher, unless others are named or the student teaches itself."""
    data: Callable[[], Splits]
    """Loads the splits of its dataset."""
    rewards: Any
    """`reward_funcs` of the trainer."""
    evaluate: Callable[[OPSDTrainer], None]
    """Called before and after training; collective."""


Tasks = Mapping[str, Task]
"""Tasks by name."""
