"""The interfaces of rollout backends and engines, and the rollout that replays: token ids in, token ids out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

from trl_opsd.rollout.host import Host
from trl_opsd.rollout.returned import rows_of
from trl_opsd.types import Completion


class RolloutBackend(ABC):
    """Generates one completion for each prompt with the current student.

    `str(rollout)` describes it where the trainer describes itself; by default the name of its class.
    """

    generates_out_of_process: ClassVar[bool] = False
    """Whether `stream` generates without this process, which may train the student between two rows. With `overlap`
    a thread takes the rows."""

    returns_logprobs: ClassVar[bool] = False
    """Whether `logprobs` may return any."""

    reads_images: ClassVar[bool] = False
    """Whether it sees images: a prompt has [`~types.rollout.RowImages`] or `None` in its attribute `images`, if a row
    of the dataset has any."""

    in_blocks: ClassVar[bool] = False
    """Whether each call of `complete` generates at most `generation_config.max_new_tokens` of the trainer as they are
    then, so that a method may have it generate a block at a time."""

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
        takes are cancelled: the iterator is closed, or collected. Between two rows a backend without
        `generates_out_of_process` leaves the student in evaluation mode: it may not be used, and torch's random numbers
        not be drawn.

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

    def one_by_one(self, prompt_ids: list[list[int]], step: int) -> Callable[[int, list[int]], list[int]]:
        """A function of the number of a row and its ids so far, which generates what follows, as `complete` does.

        For agents, which go on after the answers of their tools, each at its own pace: any thread may call it, also
        while others do. Collective work ends before this returns. Only with `generates_out_of_process`, and optional.

        Args:
            prompt_ids (`list[list[int]]`):
                As for `complete`, at the beginning.
            step (`int`):
                As for `complete`.
        """
        raise NotImplementedError

    def logprobs(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float] | None:
        """The log-probability of each token of a completion in the distribution that it was sampled from, in nats.

        With `divergence="sampled_reverse_kl"` it weighs the token; with others it is compared with the student's, as
        `rollout/kl_sampler`. Called when a completion has been returned or
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


class FixedRollout(RolloutBackend):
    """Returns the completion recorded for each prompt, whatever its images.

    Args:
        completions (`Mapping[tuple[int, ...], Sequence[int]]`):
            Token ids of each completion, by token ids of its prompt.

    Example:

    ```python
    >>> rollout = FixedRollout({(5, 6): [7, 8]})
    >>> rollout.complete([[5, 6]], step=0)
    [[7, 8]]
    ```
    """

    reads_images: ClassVar[bool] = True

    def __init__(self, completions: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._completions = completions

    def bind(self, trainer: Host) -> None:
        """Needs nothing from the trainer."""

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        """Looks up the completion of each prompt.

        Raises:
            ValueError: No completion was recorded for a prompt.
        """
        missing = [ids for ids in prompt_ids if tuple(ids) not in self._completions]
        if missing:
            raise ValueError(
                f"No completion is recorded for {len(missing)} of {len(prompt_ids)} prompts, the first with token ids "
                f"{missing[0]}: add one for each prompt, tokenized with the chat template."
            )
        return [list(self._completions[tuple(ids)]) for ids in prompt_ids]


# ---- Engines, which are not the student itself: each is sent its weights, and checked (`SyncedRollout`) --------------


class Engine(Protocol):
    """Token ids in, token ids and log-probabilities out. How it receives weights is not part of the protocol."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def block_size(self) -> int:
        """Tokens in a block of its prefix cache."""

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt.

        Args:
            prompt_ids (`list[list[int]]`):
                Not padded.
            options (`list[dict]`):
                For each prompt. `max_tokens`, `ignore_eos`, `seed`, `logprobs` and `prompt_logprobs` as in
                `vllm.SamplingParams`; all others as the engine names them.
        """

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights."""

    def close(self) -> None:
        """Releases its resources."""
