"""Methods: parts of a training that can be left out, each whole in a file, in the order in which a step asks them.

To add one, write its file, and add its class here.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from trl_opsd.methods.base import Method
from trl_opsd.methods.collapse import CollapseGuard
from trl_opsd.methods.quantization import StudentQuantization
from trl_opsd.methods.rewards import PromptFunction, Rewards
from trl_opsd.methods.selection import TokenSelection
from trl_opsd.methods.targets import Anchor, Contrast, Extrapolation
from trl_opsd.methods.together import Blend, Speculative
from trl_opsd.methods.weights import Aggregation, OffPolicy
from trl_opsd.types.metrics import OF_TRAINER, Metric

METHODS: tuple[type[Method], ...] = (
    StudentQuantization,
    OffPolicy,
    Blend,
    Speculative,
    Rewards,
    PromptFunction,
    Contrast,
    Extrapolation,
    Anchor,
    TokenSelection,
    Aggregation,
    CollapseGuard,
)
"""Those of the package: what comes later sees what earlier ones have set."""

NAMED: Mapping[str, type[Method]] = MappingProxyType(
    {
        re.sub(r"\B([A-Z])", r"_\1", one.__name__).lower(): one
        for one in sorted(METHODS, key=lambda one: one.__name__)
        if one is not PromptFunction  # which has an argument of its own
    }
)
"""Those that are passed, by their names in `OPSDConfig(methods=...)`: `"token_selection"` for [`TokenSelection`]."""

METRICS: Mapping[str, Metric] = MappingProxyType(
    {**OF_TRAINER, **{name: metric for one in METHODS for name, metric in one.metrics.items()}}
)
"""All metrics by their names in the training log."""


def made(given: Any) -> list[Method]:
    """The methods of `OPSDConfig(methods=...)`: settings by name, or one name."""
    by_name = {given: None} if isinstance(given, str) else given or {}
    if not isinstance(by_name, Mapping):
        raise ValueError(f"`methods={given!r}`: expected settings by name, as {{'contrast': {{'weight': 0.5}}}}.")
    return [_made(str(name), settings or {}) for name, settings in by_name.items()]


def _made(name: str, settings: Any) -> Method:
    kind = NAMED.get(name) or _imported(name)
    known = [*inspect.signature(kind).parameters]
    if not isinstance(settings, Mapping) or not {*settings} <= {*known}:
        unknown = next((one for one in settings if one not in known), settings)
        close = difflib.get_close_matches(str(unknown), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`methods`: {name!r} has no setting {unknown!r}: expected some of {known}.{hint}")
    try:
        return kind(**settings)
    except TypeError as error:  # a setting without a default
        raise ValueError(f"`methods`: {name!r}: {error}.") from error


def _imported(name: str) -> type[Method]:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute) if module else None
    except (AttributeError, ImportError) as error:
        raise ValueError(f"`methods`: {name!r} was not found ({error}): expected `module.Class`.") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        close = difflib.get_close_matches(name, NAMED, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`methods`: {name!r}: expected one of {[*NAMED]}, or `module.Class` of a method.{hint}")
    return found


def built(args: Any, given: Sequence[Method], teacher_prompt_fn: Any, has_environments: bool) -> tuple[Method, ...]:
    """The methods of a trainer: those of the package in their order, and then the user's."""
    passed = [*made(args.methods), *given]
    for one in passed:
        if not isinstance(one, Method):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(f"`methods` contains {what}: expected instances of subclasses of `trl_opsd.Method`.")
    unasked: list[Method] = [CollapseGuard()]
    unasked += [Rewards()] if has_environments else []
    unasked += [] if teacher_prompt_fn is None else [PromptFunction(teacher_prompt_fn)]
    kinds = {type(one) for one in passed}
    found = [*passed, *(one for one in unasked if type(one) not in kinds)]
    found.sort(key=lambda one: METHODS.index(type(one)) if type(one) in METHODS else len(METHODS))
    names = [one.name or type(one).__name__ for one in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"`methods` contains two of the name {repeated!r}, whose states would be one file: set the `name` of one."
        )
    return tuple(found)
