"""What writes for the student outside of its own `generate`: any engine with these members can be synced and proved."""

from __future__ import annotations

from typing import Any, Protocol

from trl_opsd.types import Completion


class Engine(Protocol):
    """Token ids in, token ids and log-probabilities out. How it gets weights is between it and its rollout."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def block_size(self) -> int:
        """Tokens that are cached together."""

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Writes one completion for each prompt.

        Args:
            prompt_ids (`list[list[int]]`):
                Not padded.
            options (`list[dict]`):
                For each prompt, in the words of `vllm.SamplingParams`.
        """

    def forget_prefixes(self) -> None:
        """Drops what was computed from prompts with weights that are no longer there."""

    def wipe_cache(self) -> None:
        """Zeroes the key-value cache, if random weights may have left values in it that are no numbers."""

    def close(self) -> None:
        """Gives back what it holds."""
