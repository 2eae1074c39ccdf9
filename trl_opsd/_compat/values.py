"""pydantic, which checks options, settings of methods and what servers answer."""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any

import pydantic
from annotated_types import Ge, Gt, Le, Lt

__all__ = ["Finite", "Natural", "NotNegative", "Positive", "Share", "Unit", "fitting", "pydantic"]

Positive = Annotated[float, Gt(0), Lt(math.inf)]
"""A finite number above 0; a comparison with NaN fails."""
NotNegative = Annotated[float, Ge(0), Lt(math.inf)]
Finite = pydantic.FiniteFloat
Share = Annotated[float, Gt(0), Le(1)]
Unit = Annotated[float, Ge(0), Le(1)]
Natural = Annotated[int, Ge(1)]


@cache
def _adapter(hint: Any) -> Any:
    return pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))


def fitting(hint: Any, value: Any) -> Any:
    """A value as its type and bounds have it: text as a number, for instance.

    Raises:
        ValueError: It does not fit; the message says what would.
    """
    try:
        return _adapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        errors = error.errors()
        expected = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in errors))
        names = re.findall("'(.*?)'", expected) if any(one["type"] == "literal_error" for one in errors) else ()
        close = get_close_matches(str(value), names, n=1)
        raise ValueError(f"{expected}.{f' Did you mean {close[0]!r}?' if close else ''}") from None
