"""Makes a class explain a keyword argument it does not know; those of other trainers are in `foreign_names.py`."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, Self


class StrictNames:
    """A class whose constructor refuses unknown names, each with what to do.

    Python's own error for them, in the constructor that `dataclass` writes, only repeats the name. A subclass that
    takes `**kwargs` may know more names than its signature tells, so it is left to Python.
    """

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Checks the names; `__init__` takes the values.

        Raises:
            TypeError: A name is unknown.
        """
        known = inspect.signature(cls.__init__).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise TypeError("\n".join(f"`{cls.__name__}` {cls.explain(name, list(known)[1:])}" for name in unknown))
        return super().__new__(cls)

    @classmethod
    def explain(cls, name: str, known: Collection[str]) -> str:
        """What to say about an unknown name, after the name of the class."""
        raise NotImplementedError
