"""An exponential moving average of the student's parameters, which a teacher follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.sharding import is_split, whole, write

FILE = "ema_teacher.safetensors"
"""File of the average in a checkpoint."""


@final
class Average(TrainerCallback):
    """`teacher = (1 - rate) * teacher + rate * student`, after every `every` optimizer steps."""

    def __init__(
        self, student: Callable[[], Mapping[str, Tensor]], teacher: Mapping[str, Tensor], rate: float, every: int
    ) -> None:
        self._student = student
        self._teacher = teacher
        # Unsharded, on the teacher's devices, and in float32: in half precision a step of 5 % of a small difference is
        # rounded away, and the teacher would not move. A float32 teacher's tensors are the averages themselves.
        self._average = {name: tensor.detach().float() for name, tensor in teacher.items()}
        self._rate = rate
        self._every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self._every == 0:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average toward the student; a split student is gathered one parameter at a time."""
        student = self._student()
        for name, average in self._average.items():
            average.lerp_(whole(student[name]).to(average), self._rate)
        self._copy_to_teacher()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The student's parameters hold the averages while the context lasts."""
        student = self._student()
        # Shards cannot be swapped with full tensors: the student's values are gathered, overwritten and written back.
        if any(is_split(student[name]) for name in self._teacher):
            own = {name: whole(student[name]) for name in self._teacher}
            write(student, self._teacher)
            try:
                yield
            finally:
                write(self._student(), own)
        else:
            self._swap()
            try:
                yield
            finally:
                self._swap()

    @property
    def copies(self) -> dict[str, Tensor]:
        """The averages that are not the teacher's own tensors because those are in half precision."""
        return {
            name: average
            for name, average in self._average.items()
            if average.data_ptr() != self._teacher[name].data_ptr()
        }

    def save(self, folder: str | Path) -> None:
        """Writes the average into a checkpoint."""
        tensors = {name: average.contiguous() for name, average in self._average.items()}
        save_file(tensors, Path(folder) / FILE)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Loads the average from a checkpoint; refuses one that has none, or that of other parameters."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {FILE}: it was not written with teacher_model_kind='ema'; resume from one that was."
            )
        saved = load_file(path)
        if {name: tensor.shape for name, tensor in saved.items()} != {
            name: average.shape for name, average in self._average.items()
        }:
            raise ValueError(f"{path} holds the average of other parameters: resume with the model it was written for.")
        for name, average in self._average.items():
            average.copy_(saved[name])
        self._copy_to_teacher()

    def _copy_to_teacher(self) -> None:
        for name, average in self.copies.items():
            self._teacher[name].copy_(average)

    def _swap(self) -> None:
        student = self._student()
        for name, tensor in self._teacher.items():
            parameter = student[name]
            # Swapping storage copies nothing, and optimizer state that refers to the parameters stays valid.
            parameter.data, tensor.data = tensor.data, parameter.data
