"""The seam every engine stands behind: token ids in, token ids out; it knows neither templates nor padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from trl_opsd.host import Host


class RolloutBackend(ABC):
    """Lets the current student write one completion for each prompt."""

    @abstractmethod
    def bind(self, trainer: Host) -> None:
        """Called once, when the trainer is complete and before anything is generated.

        Args:
            trainer ([`~host.Host`]):
                The trainer: gives the student, the accelerator and the options.
        """

    @abstractmethod
    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        """Writes completions. Every process calls this at the same time, each with prompts of its own.

        Args:
            prompt_ids (`list[list[int]]`):
                The prompts, not padded, each with at least one token.
            step (`int`):
                Optimizer steps done so far; the student's weights do not change within a step.

        Returns:
            `list[list[int]]`: one completion for each prompt, in order, without the prompt and without padding. A
            completion may also be a tuple, or a tensor or array of whole numbers with one dimension. What follows the
            first end-of-sequence token is cut off by the caller; an empty completion is not trained on.
        """

    def close(self) -> None:  # noqa: B027 (most backends have nothing to say here)
        """Gives back what it holds besides the student, after which it writes no more. Most hold nothing."""


def cut_after_end(completion_ids: list[int], end_ids: Collection[int]) -> list[int]:
    """Keeps a completion up to and including its first end-of-sequence token, whichever of them that is."""
    for position, token in enumerate(completion_ids):
        if token in end_ids:
            return completion_ids[: position + 1]
    return completion_ids
