"""The rows of a generation batch: what was read of each, and what a step learns of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trl_opsd.data.prompts import Prompt, Request
from trl_opsd.types.rollout import Author, Given, RowImages

Complete: TypeAlias = Callable[[list[list[int]]], list[list[int]]]
"""A completion for each prompt, as token ids."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was generated for the rows of a batch, row by row."""

    prompt_ids: list[list[int]]
    completions: list[list[int]]
    authors: Sequence[list[int]] | None = None
    """The [`~types.rollout.Author`] of each token of a completion; `None` where it is that of the row."""
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
    author: Author = Author.STUDENT
    """Who writes the completion, after what is `given`."""
    given: Given = field(default_factory=lambda: Given([], []))
    """How the completion begins; all of it where the author is not the student."""
    is_padding: bool = False
    """Whether it only fills the last batch of an evaluation."""
    prompt_weight: float = 1.0
    """Of all rows of the prompt; at 0 the trainer skips it."""
    images: RowImages | None = None
    """Of the student's prompt, once it is tokenized."""
    authors: list[int] | None = None
    """The [`~types.rollout.Author`] of each token that was generated; `None` where it is `author`."""
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
    def is_off_policy(self) -> bool:
        """Whether the whole completion is the dataset's or the teacher's."""
        return self.author is not Author.STUDENT

    @property
    def by_student(self) -> bool:
        """Whether the student generates the completion, or goes on with one."""
        return not self.is_off_policy and self.prompt_weight > 0


def whole(rows: Sequence[BatchRow], written: Written) -> Written:
    """What was generated after given beginnings, as completions that contain them, with the author of each token."""
    prompts, completions, authors = list[list[int]](), list[list[int]](), list[list[int]]()
    for number, (row, context, ids) in enumerate(zip(rows, written.prompt_ids, written.completions, strict=True)):
        given = row.given
        # The student reads what it goes on with; what others have written as a whole follows the prompt.
        prompts.append(context if row.is_off_policy else context[: len(context) - len(given.ids)])
        by = row.authors or [int(row.author)] * len(ids) if written.authors is None else written.authors[number]
        completions.append([*given.ids, *ids])
        authors.append([*given.authors, *by])
    said = written.conversations
    if said is not None:
        said = [after(row.given, [] if row.is_off_policy else one) for row, one in zip(rows, said, strict=True)]
    return Written(prompts, completions, authors, said)


def after(given: Given, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was said after a beginning, as messages with it."""
    if not (given.is_open and said):
        return [*given.messages, *said]
    both = "".join(one.get("content") or "" for one in (given.messages[-1], said[0]))
    return [*given.messages[:-1], {**said[0], "content": both}, *said[1:]]


# ---- What a teacher may read of other completions of its prompt ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a completion once the rewards of its group are: of all completions of its prompt."""

    reward: float | None
    """The sum of its rewards times `reward_weights`; `None` if no function gave one."""
    number: int
    """Its place in the group."""
    group: tuple[tuple[str, float | None], ...]
    """Text and reward of each completion of the group, this one too, in the order of generation."""

    def success(self, threshold: float) -> str | None:
        """The first other completion with a reward of at least `threshold`, without what it thought."""
        others = (
            without_thoughts(text).strip()
            for place, (text, reward) in enumerate(self.group)
            if place != self.number and reward is not None and reward >= threshold
        )
        return next(filter(None, others), None)


_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>", "<channel|>"),
)
"""What begins and ends a thought: in most families, Magistral, Seed-OSS, Command A Reasoning, gpt-oss, Gemma 4."""


def without_thoughts(text: str) -> str:
    """A completion without what it thought; templates may begin a thought in the prompt, and some never end."""
    for begin, end in _THOUGHTS:
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", text, flags=re.DOTALL)
        text = text.rpartition(end)[2].partition(begin)[0]
    return text


def texts_of(tokenizer: Any, completions: Sequence[list[int]]) -> list[str]:
    """Completions without special tokens, but for those that begin or end a thought."""
    added = (one.content for one in tokenizer.added_tokens_decoder.values() if one.special)
    special = {*tokenizer.all_special_tokens, *added}
    kept = {one for one in special if any(one in mark for pair in _THOUGHTS for mark in pair)}
    texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=not kept)
    return [re.sub("|".join(map(re.escape, special - kept)), "", text) for text in texts] if kept else texts


def reads_outcome(function: Any) -> bool:
    """Whether a `teacher_prompt_fn` takes an [`Outcome`] too."""
    try:
        inspect.signature(function).bind({}, "", None)
    except (TypeError, ValueError):
        return False
    return True
