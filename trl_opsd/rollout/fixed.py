"""Replays recorded completions: the test double, and a way to distil on existing answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trl_opsd.host import Host
from trl_opsd.rollout.base import RolloutBackend


class FixedRollout(RolloutBackend):
    """Returns the completion recorded for each prompt.

    Args:
        completions (`Mapping[tuple[int, ...], Sequence[int]]`):
            Token ids of each completion, by token ids of its prompt.

    Raises:
        TypeError: The completions are not given by prompt, or prompts are text.

    Example:

    ```python
    >>> rollout = FixedRollout({(5, 6): [7, 8]})
    >>> rollout.complete([[5, 6]], step=0)
    [[7, 8]]
    ```
    """

    def __init__(self, completions: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        keys = completions if isinstance(completions, Mapping) else [completions]
        for odd in (key for key in keys if not isinstance(key, tuple)):
            raise TypeError(
                f"`FixedRollout` got a {type(odd).__name__} where token ids of a prompt belong: expected a dict of "
                "completions by prompt, both as token ids, such as {(5, 6): [7, 8]}; `tokenizer(prompt)` gives them."
            )
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
                f"{missing[0]}; record one for each prompt as the tokenizer renders it, chat template included."
            )
        return [list(self._completions[tuple(ids)]) for ids in prompt_ids]
