"""The rows of a generation batch: what was read of each, and what a step learns of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_opsd.data.completions import Outcome
from trl_opsd.data.prompts import Prompt, Request
from trl_opsd.types.rollout import RowImages


@dataclass(frozen=True, slots=True)
class Written:
    """What was generated for the rows of a batch, row by row."""

    prompt_ids: list[list[int]]
    completions: list[list[int]]
    masks: Sequence[list[int]] | None = None
    """1 for each token of a completion that the student generated, 0 for what tools said; `None` without tools."""
    conversations: Sequence[list[dict[str, Any]]] | None = None
    """The completions as messages, with what tools said; `None` without tools."""


@dataclass(slots=True, eq=False)
class BatchRow(Mapping[str, Any]):
    """A row of a generation batch; the columns of the dataset are its keys.

    Each field is set in one place of the step, and moves with the row to another process or micro-batch.
    """

    request: Request
    """As it was read; an environment adds text for its teacher."""
    place: int = 0
    """Index in the generation batch over all processes."""
    is_off_policy: bool = False
    """Whether the completion is the dataset's or the teacher's."""
    is_padding: bool = False
    """Whether it only fills the last batch of an evaluation."""
    prompt_weight: float = 1.0
    """Of all rows of the prompt; at 0 the trainer skips it."""
    images: RowImages | None = None
    """Of the student's prompt, once it is tokenized."""
    logprobs: Sequence[float] | None = None
    """Log-probabilities that the tokens of the completion were sampled with, in nats; `None` where not known."""
    reward: float | None = None
    """The weighted sum of the completion's rewards; `None` where no function gave one."""
    advantage: float = 0.0
    """Of the completion within its group, once there are rewards."""
    outcome: Outcome | None = None
    """Once there are rewards, and a teacher's prompt depends on them."""
    gate: float = 1.0
    """Weight of the row in the loss: by its reward, and 0 where the teacher has no prompt."""
    nll_weight: float = 0.0
    """What is added to the divergence of each token, times its `-log p` under the student."""
    contrast: Prompt | None = None
    """The teacher's prompt that its target moves away from."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What methods of a user keep of the row."""

    def __post_init__(self) -> None:
        self.contrast = self.request.contrast

    def __getitem__(self, name: str) -> Any:
        return self.request.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.request.columns)

    def __len__(self) -> int:
        return len(self.request.columns)

    @property
    def by_student(self) -> bool:
        """Whether the student generates the completion."""
        return not self.is_off_policy and self.prompt_weight > 0
