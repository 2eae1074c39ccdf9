"""What a trainer needs from a teacher: targets for a rollout, and the head that turns them into logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from trl_opsd.teacher.comparison import by_token
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


class Teacher(ABC):
    """Scores rollouts. It never generates, is never trained, and does not know the student.

    `str(teacher)` describes it in the trainer's own description; by default the name of its class.
    """

    reads_images: ClassVar[bool] = False
    """Whether it sees `rollout.images`; prompts with images are refused otherwise."""

    def __str__(self) -> str:
        return type(self).__name__

    @property
    @abstractmethod
    def head(self) -> OutputHead:
        """Turns the hidden states in this teacher's targets into logits."""

    @property
    @abstractmethod
    def context(self) -> int | None:
        """Context length of this teacher in tokens, prompt and completion; `None` where there is no limit."""

    @abstractmethod
    def targets(self, rollout: Rollout) -> TeacherTargets:
        """Scores every row of a generation batch once.

        Args:
            rollout ([`~types.Rollout`]):
                B rows of at most C completion tokens.

        Returns:
            [`~types.TeacherTargets`]: row-aligned with the rollout, `[B, C, H_t]`, without a graph; any numbers where
            the rollout's weights are 0.
        """

    compare = by_token
    """How the student is compared with its targets; another function takes and gives the same."""

    def expect(self, rollout: Rollout) -> None:  # noqa: B027 (most teachers cannot begin early)
        """Announces rows that `targets` will soon be called with, in any grouping. Does nothing by default.

        Args:
            rollout ([`~types.Rollout`]):
                The rows, as `targets` will be given them, but for padding.
        """

    def forget_expected(self) -> None:  # noqa: B027 (most teachers cannot begin early)
        """Announces that `targets` will not be called with the rows expected so far: a step was interrupted."""


def innermost(teacher: Teacher) -> Teacher:
    """The teacher below those that only keep or change its targets."""
    while isinstance(below := getattr(teacher, "teacher", None), Teacher):
        teacher = below
    return teacher
