"""Makes of a picture once what rows, student and teachers need of it, also if threads ask while it is being made."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from copy import copy
from threading import Lock
from typing import Any

from torch import Tensor


class Pictures:
    """What was made of the pictures of a generation batch of training and of the next, or of one of an evaluation.

    Args:
        pins (`bool`, *optional*, defaults to `False`):
            Whether tensors are pinned, so that copies to a device do not wait.
    """

    def __init__(self, pins: bool = False) -> None:
        self.pins, self._batch, self._lock, self._keeps = pins, 0, Lock(), False
        self._made: dict[Hashable, tuple[int, Future[Any]]] = {}
        """The latest batch that needs it, and what was made or is being made."""
        self.options: dict[str, dict[str, Any]] = {}
        """With which a processor calls its image processor, by the settings of the latter."""

    def begin(self, is_training: bool) -> None:
        """Begins a batch, and drops what was not made ahead for it."""
        with self._lock:
            self._made = {key: one for key, one in self._made.items() if one[0] > self._batch}
            self._batch, self._keeps = self._batch + is_training, True

    def clear(self) -> None:
        """Drops everything, and keeps nothing until the next batch: not what checks of a dataset read."""
        with self._lock:
            self._made, self._keeps = {}, False

    def made(self, key: Hashable, make: Callable[[], Any], ahead: bool = False) -> Any:
        """What `make` returns, or raises; called once for a key, and waited for if another thread does."""
        with self._lock:
            is_new = key not in self._made
            batch, value = self._made.get(key, (0, Future[Any]()))
            if self._keeps:
                self._made[key] = max(batch, self._batch + ahead), value
        if is_new:
            try:
                value.set_result(make())
            except BaseException as error:
                value.set_exception(error)
        return value.result()


class Processing:
    """An image processor that processes the pictures of a row once."""

    def __init__(self, inner: Any, pictures: Pictures, ahead: bool = False) -> None:
        self._inner, self._pictures, self._ahead = inner, pictures, ahead
        self._settings = f"{type(inner).__name__} {inner.to_json_string()}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: list[list[Any]], **options: Any) -> Any:
        self._pictures.options[self._settings] = options

        def make() -> Any:
            found = self._inner(images, **options)
            if self._pictures.pins:
                found.update({name: one.pin_memory() for name, one in found.items() if isinstance(one, Tensor)})
            return images, found  # the pictures too: another object could get the id of one that is gone

        key = self._settings, repr(options), *(tuple(map(id, row)) for row in images)
        return copy(self._pictures.made(key, make, self._ahead)[1])

    def begin(self, images: list[Any]) -> None:
        """Processes the pictures of a row with the options of those before."""
        if (options := self._pictures.options.get(self._settings)) is not None:
            self([images], **options)
