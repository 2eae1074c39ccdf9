"""pydantic, which checks settings of methods and what servers answer."""

from __future__ import annotations

import math
from typing import Annotated, Any

import pydantic
from annotated_types import Ge, Gt, Le, Lt

__all__ = ["Finite", "NotNegative", "Positive", "Share", "fitting", "pydantic"]

Positive = Annotated[float, Gt(0), Lt(math.inf)]
"""A finite number above 0; a comparison with NaN fails."""
NotNegative = Annotated[float, Ge(0), Lt(math.inf)]
Finite = pydantic.FiniteFloat
Share = Annotated[float, Gt(0), Le(1)]


def fitting(hint: Any, value: Any) -> Any:
    """A value as its type and bounds have it: text as a number, for instance.

    Raises:
        ValueError: It does not fit; the message says what would.
    """
    adapter: Any = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        found = dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in error.errors())
        raise ValueError(" or ".join(found)) from None
