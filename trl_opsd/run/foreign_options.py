"""What to say of an option or argument of another trainer that does not exist here.

No class is read here; `strict_names.py` asks when a name is unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from trl_opsd.run.foreign_names import ARGUMENTS, FAMILIES, OPTIONS, TRAINER_ARGUMENTS
from trl_opsd.run.nearest import nearest


def known_elsewhere(name: str) -> str:
    """What to do instead of an option of another trainer; empty for a name that none of them is known to have."""
    return OPTIONS.get(name) or next((said for start, said in FAMILIES.items() if name.startswith(start)), "")


def distinct_elsewhere(name: str) -> str:
    """The same for an attribute: of names of one word, which may be the user's own, nothing is known."""
    return (OPTIONS.get(name) or ARGUMENTS.get(name, "")) if "_" in name else ""


def explained_option(name: str, known: Collection[str]) -> str:
    """A sentence about an option that does not exist.

    Args:
        name (`str`):
            The unknown name.
        known (`Collection[str]`):
            The options that exist.
    """
    if name in OPTIONS:
        return f"has no option {name!r}: {OPTIONS[name]}."
    if name in TRAINER_ARGUMENTS:
        return f"has no option {name!r}: it is an argument of `OPSDTrainer`."
    if name in ARGUMENTS:
        return f"has no option {name!r}; of `OPSDTrainer`: {ARGUMENTS[name]}."
    return f"has no option {name!r}{_closest(name, known)}"


def explained_argument(name: str, known: Collection[str], options: Collection[str]) -> str:
    """A sentence about an argument of the trainer that does not exist.

    Args:
        name (`str`):
            The unknown name.
        known (`Collection[str]`):
            The arguments that exist.
        options (`Collection[str]`):
            Names of `OPSDConfig`.
    """
    if name in ARGUMENTS:
        return f"has no argument {name!r}: {ARGUMENTS[name]}."
    if name in options:
        return f"has no argument {name!r}: it is an option, `args=OPSDConfig({name}=...)`."
    if name in OPTIONS:
        return f"has no argument {name!r}; in `OPSDConfig`: {OPTIONS[name]}."
    return f"has no argument {name!r}{_closest(name, known)}"


def _closest(name: str, known: Collection[str]) -> str:
    family = next((start for start in FAMILIES if name.startswith(start)), "")
    if close := [one for one in nearest(name, known) if one.startswith(family)]:
        return f". Did you mean {' or '.join(map(repr, close))}?"
    said = known_elsewhere(name) or known_elsewhere("".join(difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.9)))
    return f": {said}." if said else ". docs/reference.md lists all."
