"""The interface of all rollout backends: token ids in, token ids out; no templates, no padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from trl_opsd.host import Host
from trl_opsd.rollout.returned import rows_of


class RolloutBackend(ABC):
    """Generates one completion for each prompt with the current student.

    `str(rollout)` describes it where the trainer describes itself; by default the name of its class.
    """

    writes_apart: ClassVar[bool] = False
    """Whether `stream` generates without this process, which may train the student between two rows. With `overlap`
    a thread takes the rows."""

    tells_logprobs: ClassVar[bool] = False
    """Whether `logprobs` may return any."""

    def __str__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def bind(self, trainer: Host) -> None:
        """Called when the trainer is complete, before anything is generated; again after another trainer has used it.

        Args:
            trainer ([`~host.Host`]):
                The trainer, which provides the student, the accelerator and the options.
        """

    @abstractmethod
    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        """Generates completions. Every process calls this at the same time, each with its own prompts.

        Args:
            prompt_ids (`list[list[int]]`):
                The prompts, not padded, each with at least one token. A process that has none while others have some
                (with `lmbda` below 1, or in a later turn with tools) passes its first again and drops the result.
            step (`int`):
                Optimizer steps done so far; the student's weights do not change within a step.

        Returns:
            `list[list[int]]`: one completion for each prompt, in order, without the prompt and without padding. A
            completion may also be a tuple, or a tensor or array of integers with one dimension. The caller cuts off
            what follows the first end-of-sequence token; an empty completion is not trained on.
        """

    def stream(self, prompt_ids: list[list[int]], step: int) -> Iterator[tuple[int, list[int]]]:
        """Generates as `complete`, and returns an iterator over completions as they end.

        Collective work ends before this returns; then each process takes its rows at its own pace. Rows that nobody
        takes are cancelled: the iterator is closed, or collected. Between two rows a backend without `writes_apart`
        leaves the student in evaluation mode: it may not be used, and torch's random numbers not be drawn.

        Args:
            prompt_ids (`list[list[int]]`):
                As for `complete`.
            step (`int`):
                As for `complete`.

        Returns:
            `Iterator[tuple[int, list[int]]]`: the number of a prompt and its completion; each prompt once, in any
            order. By default what `complete` returns.
        """
        return enumerate(rows_of(self.complete(prompt_ids, step), len(prompt_ids), type(self).__name__))

    def logprobs(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float] | None:
        """The log-probability of each token of a completion in the distribution that it was sampled from, in nats.

        With `divergence="sampled_reverse_kl"` it weighs the token. Called when a completion has been returned or
        yielded; by then others may have begun, as with `overlap="ahead"`. `None` where it is not known, the default.
        """
        return None

    def session(self) -> AbstractContextManager[None]:
        """Entered around all calls of `complete` for a generation batch (one per turn with tools) or an evaluation; it
        nests.

        What `complete` needs may be kept until the outermost ends. Does nothing by default.
        """
        return nullcontext()

    def close(self) -> None:  # noqa: B027 (most backends have nothing to release)
        """Releases all resources but the student; the backend cannot generate afterwards. Most hold none."""
