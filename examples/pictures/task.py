"""Pictures with a small digit in them, crops that show it enlarged, rows, and grading."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw, ImageFont

SIDE, CELL = 64, 16
"""Pixels of a side of a picture, and of a side of the cell that a digit lies in."""

QUESTION = "Which digit is in the picture?"
FONT = ImageFont.load_default(size=20)

HELD_OUT = 1_000_000
"""Seeds from this one on are held out."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture that is drawn from its seed: shapes, noise, and a digit in one of sixteen places.

    Example:

    ```python
    >>> scene = Scene(7)
    >>> scene.answer, scene.whole.size, scene.crop.size
    ('2', (64, 64), (16, 16))
    ```
    """

    seed: int

    @property
    def answer(self) -> str:
        return str(self._random("number").randrange(10))

    @property
    def corner(self) -> tuple[int, int]:
        """Left and top of the digit's cell."""
        source = self._random("place")
        return CELL * source.randrange(SIDE // CELL), CELL * source.randrange(SIDE // CELL)

    @property
    def whole(self) -> Pictures.Image:
        """All of it; what the student sees."""
        source = self._random("picture")
        picture = Pictures.new("RGB", (SIDE, SIDE), _color(source, 150, 230))
        draw = ImageDraw.Draw(picture)
        for _ in range(6):
            x, y, width, height = (source.randrange(SIDE) for _ in range(4))
            shape = source.choice((draw.rectangle, draw.ellipse, draw.line))
            shape((x, y, x + width // 2, y + height // 2), fill=_color(source, 150, 230))
        x, y = self.corner
        left, top, right, _ = FONT.getbbox(self.answer)
        at = (x + (CELL - right - left) / 2, y - top + 1)
        draw.text(at, self.answer, font=FONT, fill=_color(source, 0, 40))
        noise = numpy.random.default_rng(self.seed).normal(0, 12, (SIDE, SIDE, 3))
        return Pictures.fromarray((numpy.asarray(picture) + noise).clip(0, 255).astype(numpy.uint8))

    @property
    def crop(self) -> Pictures.Image:
        """The digit alone, a sixteenth of the picture; what the teacher sees."""
        x, y = self.corner
        return self.whole.crop((x, y, x + CELL, y + CELL))

    def _random(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {what}")


def _color(source: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(source.randint(low, high) for _ in range(3))


def draw_scenes(count: int, held_out: bool = False, seed: int = 0) -> list[Scene]:
    """Different scenes, either all held out or none; `seed` below 20."""
    start = HELD_OUT if held_out else seed * 50_000
    return [Scene(start + number) for number in range(count)]


def rows(scenes: Sequence[Scene], shown: str = "whole", to_teacher: str | None = None) -> Dataset:
    """Rows for a trainer, with the answer, which only [`right`] reads.

    Args:
        scenes (`Sequence[Scene]`):
            One for each row.
        shown (`str`, *optional*, defaults to `"whole"`):
            What the student sees: "whole" or "crop".
        to_teacher (`str`, *optional*):
            What the teacher sees, if not the same.
    """
    columns: dict[str, Any] = {
        "prompt": [[{"role": "user", "content": QUESTION}] for _ in scenes],
        "images": [[getattr(scene, shown)] for scene in scenes],
        "answer": [scene.answer for scene in scenes],
    }
    if to_teacher:
        columns["teacher_images"] = [[getattr(scene, to_teacher)] for scene in scenes]
    kinds = {"prompt": List({"role": Value("string"), "content": Value("string")}), "answer": Value("string")}
    return Dataset.from_dict(columns, Features({name: kinds.get(name, List(Image())) for name in columns}))


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """A reward as TRL's trainers call it: 1 for each completion that is the digit, else 0."""
    return [float(said[-1]["content"].strip() == digit) for said, digit in zip(completions, answer, strict=True)]
