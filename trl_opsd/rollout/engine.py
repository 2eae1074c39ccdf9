"""The interface of inference engines, which are not the student itself: each can be synced and checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

from trl_opsd.types import Completion

Row: TypeAlias = tuple[list[int], dict[str, Any]]
"""A prompt and its options, as [`Engine.write`] takes them."""


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

    def wipe_cache(self) -> None:
        """Zeroes the key-value cache, if random weights may have left NaNs in it."""

    def close(self) -> None:
        """Releases its resources."""


class Rows(Protocol):
    """The number of each prompt and its completion, as they end; collecting this cancels what has not ended."""

    def __iter__(self) -> Iterator[tuple[int, Completion]]: ...

    def close(self) -> None:
        """Cancels what has not ended; called from any thread, also while another waits for the next."""
