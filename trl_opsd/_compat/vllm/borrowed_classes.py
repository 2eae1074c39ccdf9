"""Keeps a library that changes classes in place from changing the objects that somebody else made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def classes_kept(root: type) -> Iterator[dict[type, type]]:
    """Gives every class its bases and attributes back in the end, also after an error.

    Args:
        root (`type`):
            It and all of its subclasses that are loaded now are kept.

    Yields:
        `dict[type, type]`: after the context, the changed classes, each with a subclass that has the changes.
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


def retyped(model: nn.Module, classes: Mapping[type, type]) -> None:
    """Gives modules the subclasses of [`classes_kept`], so that they still have what was changed for them."""
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
