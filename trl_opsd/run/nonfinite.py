"""Decides what becomes of an optimizer step in which a number is not finite; it knows numbers, and no trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from trl_opsd._compat.sharding import whole_shape
from trl_opsd.run.errors import NonFiniteError

RECORD = "opsd_nonfinite.jsonl"
"""In the output folder: what was found, one JSON object in each line."""

logger = get_logger(__name__)

_REMEDIES = {
    "teacher": "Load the teacher in another dtype (bfloat16 instead of float16), or repair its weights.",
    "student": "Lower the learning rate, or go back to a checkpoint from before.",
    "divergence": "Remove what masks logits in one of the two, or take another `divergence`.",
    "gradient": "Lower the learning rate, compute in another dtype (bfloat16 instead of float16), or suspect the "
    "device, if it is always the same rank.",
}
_WHAT = {
    "teacher": "The teacher's logits are NaN or infinite",
    "student": "The student's logits are NaN or infinite",
    "divergence": "The divergence is infinite, because one model excludes a token the other expects,",
    "gradient": "The loss is finite, but the student's gradient is NaN or infinite",
}


def nonfinite_side(sums: Mapping[str, float]) -> str | None:
    """Whose numbers make a loss NaN or infinite: `"teacher"`, `"student"`, or `"divergence"` if neither's alone.

    Args:
        sums (`Mapping[str, float]`):
            By the names in [`LossParts.ROW_NAMES`].
    """
    for side, name in (("teacher", "teacher_entropy"), ("student", "student_entropy"), ("divergence", "divergence")):
        if not math.isfinite(sums[name]):
            return side
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is not finite, where, and when; its text is the error's."""

    step: int
    """Of the optimizer, counted from 1: the one that was being made, or the last one made before an evaluation."""
    side: str
    """`"teacher"`, `"student"`, `"divergence"` or `"gradient"`."""
    ranks: tuple[int, ...]
    """Of the processes it came from; empty where that cannot be told, because gradients were averaged."""
    sums: tuple[dict[str, float], ...] = ()
    """Of each process, by the names in [`LossParts.ROW_NAMES`]; empty for a gradient."""
    evaluating: bool = False

    def __str__(self) -> str:
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        when = f"in an evaluation after step {self.step}" if self.evaluating else f"in step {self.step}"
        unchanged = "" if self.evaluating else ": the student's weights are as they were before this step"
        return f"{_WHAT[self.side]} {when}{where}{unchanged}. {_REMEDIES[self.side]}"

    def as_json(self) -> str:
        """One line; numbers that JSON does not have are texts."""

        def said(number: float) -> float | str:
            return number if math.isfinite(number) else str(number)

        sums = [{name: said(number) for name, number in one.items()} for one in self.sums]
        return json.dumps({**asdict(self), "sums": sums}, allow_nan=False)


class StepGuard:
    """Turns what is found into an error, or into steps that are left out, counted, and limited.

    A non-finite gradient of a scaled loss is no finding: that is how the scale of float16 is found. Such steps are left
    out by whoever scales, under both policies; here they are counted and limited.

    Args:
        policy (`str`):
            `"raise"` or `"skip"`.
        limit (`int`):
            Steps in a row that may be left out.
        folder (`Path`, *optional*):
            Where the record is written; `None` for a process that writes nothing.
    """

    def __init__(self, policy: str, limit: int, folder: Path | None) -> None:
        self.policy, self.limit, self._folder = policy, limit, folder
        self.skipped = 0
        """Steps that were left out."""
        self.condemned = False
        """Whether the step that is being made will be left out, because of a loss in it."""
        self._in_a_row = 0

    @property
    def counts(self) -> bool:
        """Whether the number of steps left out belongs into the log."""
        return self.policy == "skip" or self.skipped > 0

    def heed(self, finding: Finding) -> None:
        """Writes a finding down, and condemns the step it was made in, once for each step.

        Raises:
            NonFiniteError: The policy says so.
        """
        if self.condemned:
            return
        self._write(finding)
        if self.policy == "raise":
            raise NonFiniteError(str(finding))
        logger.warning(f"Left out: {finding}")
        self.condemned = self.condemned or not finding.evaluating

    def stepped(self) -> None:
        """A step was made."""
        self.condemned, self._in_a_row = False, 0

    def left_out(self) -> None:
        """A step was left out.

        Raises:
            NonFiniteError: There were too many in a row.
        """
        self.condemned = False
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > self.limit:
            raise NonFiniteError(
                f"{self._in_a_row} optimizer steps in a row had a loss or a gradient that is NaN or infinite, and "
                f"`nonfinite_skip_limit={self.limit}`: the student's weights are as they were before them. "
                f"{RECORD} in the output folder says whose numbers they were; lower the learning rate, or go back to a "
                "checkpoint from before."
            )

    def _write(self, finding: Finding) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / RECORD).open("a", encoding="utf-8") as file:
                file.write(finding.as_json() + "\n")
        except OSError as error:  # a full disk must not hide what was found
            logger.warning(f"{self._folder / RECORD} could not be written: {error}")


class GradientProbe:
    """Remembers whether a gradient was finite in this process, before it is averaged with those of the others.

    It looks at one small parameter that the backward pass reaches last; what goes wrong on the way down arrives there.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._broken: Any = None

    def attach(self, model: Any) -> None:
        """Begins to look, at the first bias or norm that is trained, else at the first weight; once."""
        if self._handle is None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            small = (one for one in trained if len(whole_shape(one)) == 1)
            self._handle = next(small, trained[0]).register_hook(self._look)

    def detach(self) -> None:
        """Lets go of the parameter."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._broken = None

    def broken(self) -> bool:
        """Whether a gradient was not finite since it was last told to forget."""
        return self._broken is not None and bool(self._broken)

    def forget(self) -> None:
        """A new step begins."""
        self._broken = None

    def _look(self, gradient: Any) -> None:
        # Nothing is read back here: that would make the host wait for the device in every micro-step.
        broken = ~gradient.isfinite().all()
        self._broken = broken if self._broken is None else self._broken | broken
