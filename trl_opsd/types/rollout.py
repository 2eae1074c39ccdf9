"""Prompts with their images, and completions, as tensors with padding and as an engine returns them.

B rows · P prompt tokens · C completion tokens · L columns of a pass
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class Author(IntEnum):
    """Who wrote a token of a completion."""

    ENVIRONMENT = 0
    """A tool or the user, between turns of the assistant, with what the chat template adds."""
    STUDENT = 1
    TEACHER = 2
    DATASET = 3

    @property
    def word(self) -> str:
        """Its name in options and in the log."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Given:
    """The beginning of a completion that is not generated."""

    ids: list[int]
    authors: list[int]
    """The [`Author`] of each of these."""
    messages: Sequence[dict[str, Any]] = ()
    """The same as messages, where the prompt has messages."""
    is_open: bool = False
    """Whether the student goes on with the last of these."""


class Length(NamedTuple):
    """Numbers of tokens of a row without the padding around it."""

    prompt: int
    completion: int
    """In a batch that was scored, up to the last token that counts."""
    masked: int
    """Tokens between others that no token may attend to."""

    @property
    def total(self) -> int:
        """Tokens from the first to the last that may be attended to."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class OnHost:
    """A copy of a tensor in host memory, readable without waiting for the device."""

    of: Tensor
    version: int
    """The tensor's version when it was copied, by which a later write to it is noticed."""
    copy: Tensor

    @classmethod
    def known(cls, of: Tensor, copy: Tensor) -> OnHost:
        return cls(of, of._version, copy)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a copy of this tensor as it is now."""
        return self.of is tensor and self.version == tensor._version


@dataclass(frozen=True, slots=True, eq=False)
class RowImages:
    """The images of one row, in host memory."""

    values: Mapping[str, Tensor]
    """What the processor made of them, by the name of the model's argument: pixels, grids, sizes."""
    kinds: Mapping[str, Tensor]
    """By the name of the model's argument, [P]: the kind of each prompt token."""
    originals: tuple[Any, ...]
    """The images as PIL has them, for an engine and for the report."""
    positions: int
    """Positions of the vision tower that they take."""
    unexpanded: tuple[int, ...]
    """The prompt's token ids with one placeholder for each image, for an engine, which expands them itself."""


class PromptIds(list[int]):
    """The token ids of a prompt that know its images, also when others are appended."""

    def __init__(self, ids: Iterable[int], images: RowImages | None = None) -> None:
        super().__init__(ids)
        self.images = images

    def __add__(self, more: list[int]) -> PromptIds:  # type: ignore[override]
        images = self.images and replace(self.images, unexpanded=(*self.images.unexpanded, *more))
        return PromptIds([*self, *more], images)

    def copy(self) -> PromptIds:
        return PromptIds(self, self.images)


def images_of(rows: Iterable[Any]) -> tuple[RowImages | None, ...] | None:
    """The images of each prompt or row; `None` if none has any."""
    found = tuple(getattr(one, "images", None) for one in rows)
    return None if all(one is None for one in found) else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The student's prompts and completions: prompts padded on the left, completions on the right."""

    prompt_ids: Tensor
    """[B, P], token ids."""
    prompt_mask: Tensor
    """[B, P], 1 where the token is real."""
    completion_ids: Tensor
    """[B, C], token ids."""
    completion_mask: Tensor
    """[B, C], 1 where the token is real and may be attended to."""
    weights: Tensor
    """[B, C], float32: weight of each token in the loss, at least 0; 0 for padding and for an environment's tokens."""
    authors: Tensor | None = None
    """[B, C], int64, the [`Author`] of each token; `None` where the student wrote all."""
    nll_weight: Tensor | None = None
    """[B], float32, constants: each adds itself times `-log p_s` of the row's own tokens to their divergence; 0 adds
    nothing, and so does `None`."""
    logprobs: Tensor | None = None
    """[B, C], float32: log-probability of each token in the distribution that it was drawn from, in nats, NaN where
    it is not known; `None` where it is for none."""
    images: tuple[RowImages | None, ...] | None = None
    """B of them, in host memory, `None` for a row without images; `None` where no row has any."""
    candidates: Tensor | None = None
    """[B, C, K], int64: the student's likeliest tokens at each completion token that counts, and that token itself;
    `None` unless a teacher scores these."""
    lengths: tuple[Length, ...] | None = None
    """B of them, in host memory; `None` until they are read from the masks."""
    begins_at: int | None = None
    """Where rows are divided by position among processes, the position of the first token of this part; else `None`.

    The last token of a part is the first of the next: predicted in this part, an input of that one."""
    on_host: OnHost | None = field(default=None, repr=False)
    """`weights` in host memory, where they were dealt to micro-batches; see [`weights_on_host`]."""

    @classmethod
    def of(cls, prompts: Sequence[list[int]], completions: Sequence[list[int]], device: torch.device) -> Rollout:
        """Builds a rollout from token ids, in which each token of a completion counts alike."""
        flipped, prompt_mask = _padded([ids[::-1] for ids in prompts], device)
        completion_ids, mask = _padded(completions, device)
        return cls(
            prompt_ids=flipped.flip(1),
            prompt_mask=prompt_mask.flip(1),
            completion_ids=completion_ids,
            completion_mask=mask,
            weights=mask.float(),
            images=images_of(prompts),
        )

    @property
    def counts(self) -> Tensor:
        """[B, C], whether the token's weight in the loss is not 0."""
        return self.weights != 0

    @property
    def generated(self) -> Tensor:
        """[B, C], whether the token is neither padding nor an environment's."""
        mask = self.completion_mask if self.authors is None else self.completion_mask * self.authors
        return mask != 0

    def weights_on_host(self) -> Tensor:
        """[B, C], `weights` in host memory; waits for the device unless they are as they were dealt."""
        known = self.on_host
        return self.weights.cpu() if known is None or not known.holds(self.weights) else known.copy

    @property
    def input_ids(self) -> Tensor:
        """[B, P + C], prompt and completion token ids."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """[B, P + C], 1 where a model may attend."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    def prompt_lists(self) -> list[list[int]]:
        """The prompts without their padding."""
        return _without_padding(self.prompt_ids, self.prompt_mask)

    def completion_lists(self) -> list[list[int]]:
        """The completions without their padding."""
        return _without_padding(self.completion_ids, self.completion_mask)

    def select(self, rows: Sequence[int]) -> Self:
        """The given rows, in the given order."""
        lengths = None if self.lengths is None else tuple(self.lengths[row] for row in rows)
        images = None if self.images is None else tuple(self.images[row] for row in rows)
        rows_R = torch.tensor(rows, dtype=torch.long)  # copied without a wait, unlike an index that is a list
        chosen = self._each(lambda one: one.index_select(0, rows_R.to(one.device, non_blocking=True)))
        return replace(chosen, lengths=lengths, images=images)

    def after(self, prompts: Mapping[str, Tensor], images: tuple[RowImages | None, ...] | None = None) -> Rollout:
        """The same completion tokens after other prompts: `input_ids` and `attention_mask`, [B, P], and images."""
        # Lengths were those of the other prompts.
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        return replace(self, prompt_ids=ids, prompt_mask=mask, images=images, lengths=None)

    @property
    def sizes(self) -> list[int]:
        """What each row costs in a pass, in tokens; a position of a vision tower counts like one."""
        images = self.images or [None] * len(self.prompt_ids)
        seen = [0 if one is None else one.positions for one in images]
        return [one.total + more for one, more in zip(self.measured(), seen, strict=True)]

    def measured(self) -> tuple[Length, ...]:
        """The lengths of the rows; waits for the device where they are not known yet."""
        return lengths_of(self.prompt_mask, self.completion_mask) if self.lengths is None else self.lengths

    def cut(self) -> Rollout:
        """Without the columns that are padding in every row; at least one prompt and one completion column stay."""
        # Parts of rows must be equally wide in all processes.
        if self.begins_at is not None:
            return self
        lengths = self.measured()
        prompt, completion = (max(*each, 1) for each in list(zip(*lengths, strict=True))[:2])
        cut = self.of_columns(completion)
        return replace(
            cut, prompt_ids=self.prompt_ids[:, -prompt:], prompt_mask=self.prompt_mask[:, -prompt:], lengths=lengths
        )

    def of_columns(self, columns: int) -> Self:
        """The first columns of completions."""
        weights, on_host = self.weights[:, :columns], self.on_host
        # A slice is another tensor, so the host copy is cut with it.
        if on_host is not None and on_host.holds(self.weights):
            on_host = OnHost.known(weights, on_host.copy[:, :columns])
        return replace(
            self,
            completion_ids=self.completion_ids[:, :columns],
            completion_mask=self.completion_mask[:, :columns],
            weights=weights,
            authors=None if self.authors is None else self.authors[:, :columns],
            on_host=on_host,
            logprobs=None if self.logprobs is None else self.logprobs[:, :columns],
            candidates=None if self.candidates is None else self.candidates[:, :columns],
        )

    def ended(self) -> Rollout:
        """The same rows, each cut after its last token that counts: no later state is needed. Waits for the device."""
        needed_BC = self.counts.flip(1).cumsum(1).flip(1) > 0
        mask_BC = self.completion_mask * needed_BC
        return replace(self, completion_mask=mask_BC, lengths=lengths_of(self.prompt_mask, mask_BC))

    def to(self, device: torch.device) -> Rollout:
        """The same rollout on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        changed: dict[str, Any] = {name: change(one) for name, one in values.items() if isinstance(one, Tensor)}
        return replace(self, **changed)


def lengths_of(prompt_mask_BP: Tensor, completion_mask_BC: Tensor) -> tuple[Length, ...]:
    """The length of each row, from the masks; waits for the device."""
    prompts, tokens = prompt_mask_BP.size(1), prompt_mask_BP.size(1) + completion_mask_BC.size(1)
    # One transfer for both masks; everything after it is computed on the host.
    real_BL = (torch.cat([prompt_mask_BP, completion_mask_BC], dim=1) != 0).cpu()
    places_L = torch.arange(tokens)
    before_B = prompts - places_L.where(real_BL, prompts)[:, :prompts].amin(1)
    after_B = (places_L + 1).where(real_BL, prompts)[:, prompts:].amax(1) - prompts
    masked_B = before_B + after_B - real_BL.sum(1)
    return tuple(map(Length, before_B.tolist(), after_B.tolist(), masked_B.tolist()))


def _padded(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, L], token ids and mask, padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask


def _without_padding(ids_BL: Tensor, mask_BL: Tensor) -> list[list[int]]:
    both_2BL = torch.stack([ids_BL, mask_BL != 0]).cpu()  # one transfer
    return [ids[mask != 0].tolist() for ids, mask in zip(*both_2BL, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's completion of one prompt."""

    prompt_ids: list[int]
    """The prompt tokens as the engine reported them."""
    completion_ids: list[int]
    """The generated tokens."""
    prompt_logprobs: list[float]
    """Log-probability of each prompt token but the first, in nats; empty unless requested."""
    logprobs: list[float]
    """Log-probability of each generated token, in nats; empty unless requested. Before temperature and truncation, but
    after them from a server with `--logprobs-mode processed_logprobs`."""


def cut_after_end(completion_ids: list[int], end_ids: Collection[int]) -> list[int]:
    """Truncates a completion after its first end-of-sequence token, whichever of `end_ids` that is."""
    for position, token in enumerate(completion_ids):
        if token in end_ids:
            return completion_ids[: position + 1]
    return completion_ids
