"""The images of a row, as a model's processor made them; they travel with the token ids of the row's prompt.

B rows · P prompt tokens · L columns of a pass
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


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


def together(images: Sequence[RowImages | None] | None, starts: Sequence[int], columns: int) -> dict[str, Tensor]:
    """Arguments of a forward pass over rows that begin at these of its columns; empty without images."""
    seen = [one for one in images or () if one is not None]
    found = {name: _joined([one.values[name] for one in seen]) for name in (seen[0].values if seen else ())}
    for name in seen[0].kinds if seen else ():
        kinds_BL = torch.zeros(len(starts), columns, dtype=torch.long)
        for row, (one, start) in enumerate(zip(images or (), starts, strict=True)):
            if one is not None:
                kinds_BL[row, start : start + len(one.kinds[name])] = one.kinds[name]
        found[name] = kinds_BL
    return found


def _joined(values: Sequence[Tensor]) -> Tensor:
    """Concatenated along the first dimension; the others are padded with zeros to the largest."""
    widest = [max(sizes) for sizes in zip(*(one.shape[1:] for one in values), strict=True)]
    if all(list(one.shape[1:]) == widest for one in values):
        return torch.cat(list(values))
    joined = values[0].new_zeros(sum(map(len, values)), *widest)
    start = 0
    for one in values:
        joined[(slice(start, start + len(one)), *map(slice, one.shape[1:]))] = one
        start += len(one)
    return joined
