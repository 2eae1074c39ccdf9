"""Undoes in-place changes of a library to shared classes, without affecting the library's own objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def preserved_classes(root: type) -> Iterator[dict[type, type]]:
    """Restores the bases and attributes of classes on exit, also after an error.

    Args:
        root (`type`):
            The class that is preserved, together with its subclasses that are loaded now.

    Yields:
        `dict[type, type]`: filled on exit: the changed classes, each with a subclass that has the changes.
    """
    before = {cls: (cls.__bases__, dict(vars(cls))) for cls in _family(root)}
    changed: dict[type, type] = {}
    try:
        yield changed
    finally:
        for cls, (bases, attributes) in before.items():
            added = tuple(base for base in cls.__bases__ if base not in bases)
            new = {name: value for name, value in vars(cls).items() if attributes.get(name, _ABSENT) is not value}
            if added or new:
                _restore(cls, bases, {name: attributes.get(name, _ABSENT) for name in new})
                changed[cls] = type(cls)(cls.__name__, (cls, *added), {**new, "__module__": cls.__module__})


def retype(model: nn.Module, classes: Mapping[type, type]) -> None:
    """Switches modules to the subclasses from [`preserved_classes`], so that they keep the changes made for them."""
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))


_ABSENT = object()


def _family(root: type) -> Iterator[type]:
    yield root
    children: list[type] = root.__subclasses__()
    for child in children:
        yield from _family(child)


def _restore(cls: type, bases: tuple[type, ...], attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if value is _ABSENT:
            delattr(cls, name)
        else:
            setattr(cls, name, value)
    cls.__bases__ = bases
