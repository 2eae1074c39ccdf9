"""Versions of libraries: their bounds in `setup.cfg`, names that changed between them, attributes that must exist.

To silence the warning: `logging.getLogger("trl_opsd._compat.versions").setLevel("ERROR")`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any

from accelerate.logging import get_logger
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

logger = get_logger(__name__)

_EXTRAS = ("", "deepspeed", "quantization", "report", "server", "vllm")
"""Extras for users; `""` is the package without extras."""


@cache
def bounds() -> dict[str, SpecifierSet]:
    """The supported versions of each library with bounds; empty for a source tree that is not installed."""
    try:
        wanted = [Requirement(line) for line in metadata.requires("trl_opsd") or ()]
    except metadata.PackageNotFoundError:
        return {}
    return {
        one.name: one.specifier
        for one in wanted
        if one.specifier and (one.marker is None or any(one.marker.evaluate({"extra": name}) for name in _EXTRAS))
    }


def installed() -> dict[str, str]:
    """The version of this package, and of each library of [`bounds`], that is installed."""
    found = {}
    for name in {"trl_opsd": None, **bounds(), "vllm": None}:
        # vLLM's build for CPUs is another distribution.
        for build in (name, f"{name}-cpu"):
            try:
                found[name] = metadata.version(build)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def untested(found: Mapping[str, str]) -> str | None:
    """Which of these versions are outside their bounds, and the command that installs others; `None` if none is."""
    wanted = {
        name: f"{name}{allowed}"
        for name, allowed in bounds().items()
        if name in found and not allowed.contains(found[name], prereleases=True)
    }
    if not wanted:
        return None
    named = ", ".join(f"{name} {found[name]} (expected {one})" for name, one in wanted.items())
    return (
        f"Not tested with trl_opsd, which uses private parts of these libraries: {named}. To install what was tested: "
        f"pip install {' '.join(map(repr, wanted.values()))}"
    )


@cache
def warn_of_untested() -> None:
    """Warns once about libraries outside their bounds."""
    if said := untested(installed()):
        logger.warning(said)


_INSTALLED = Version(metadata.version("transformers")).release
_OLDER = "gradient_checkpointing"

CACHE = "cache" if _INSTALLED >= (5, 24) else "past_key_values"
"""The key-value cache: an argument of forward passes and their preparation, and a field of their outputs."""
CHECKPOINTING = "activation_checkpointing" if _INSTALLED >= (5, 23) else _OLDER
"""An option of `TrainingArguments`, with `_kwargs` another; with `_enable` a method of models."""
ALIASES = {
    f"{name}{end}": f"{alias}{end}"
    for end in ("", "_kwargs")
    for name, alias in ((CHECKPOINTING, _OLDER), (_OLDER, CHECKPOINTING))
}
"""The other name of each renamed option: `transformers` reads one name and TRL the other."""


def set_known(owner: Any, **values: Any) -> None:
    """Sets attributes that exist; a plain assignment to a renamed one would make another that nothing reads."""
    lacking = [name for name in values if not hasattr(owner, name)]
    if lacking:
        raise AttributeError(
            f"{type(owner).__name__} has no {', '.join(f'`{name}`' for name in lacking)}: trl_opsd was not tested with "
            "the installed version of this library. Install a version that setup.cfg allows.",
            name=lacking[0],
            obj=owner,
        )
    for name, value in values.items():
        setattr(owner, name, value)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes as [`set_known`] while the context is open."""
    before = {name: getattr(owner, name) for name in values}
    set_known(owner, **values)
    try:
        yield
    finally:
        set_known(owner, **before)
