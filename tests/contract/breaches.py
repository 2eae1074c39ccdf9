"""Checks the table of borrowed names against our source and against the libraries' source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import theirs
from borrowed import NOT_BORROWED, OWNERS, READING, Owner
from ours import ANYWHERE, CONTINUED, LISTED, OVERRIDDEN, READ, WRITTEN, Use, is_private
from theirs import Sources

Uses = Mapping[tuple[str, str], Sequence[Use]]
"""Uses of a name, by kind and name."""

INSTALLED = tuple(owner for owner in OWNERS if theirs.folder_of(owner.package))
"""Owners whose library is installed; vLLM and DeepSpeed need not be."""


@cache
def uses() -> Uses:
    """All names in our source that may belong to another library."""
    found = defaultdict(list)
    for use in READING.uses():
        found[use.kind, use.name].append(use)
    return dict(found)


def breach(owner: Owner, name: str, sources: Sources = Sources()) -> str | None:  # noqa: B008, it is frozen
    """Describes how a library no longer defines or reads a borrowed name, and which of our lines depend on it."""
    used = uses().get((owner.kind, name), ())
    roles = {use.role for use in used}
    lacks = None
    if _has_to_define(owner, roles) and name not in _defined(owner, sources):
        lacks = f"not defined in {' or '.join(owner.where)}"
    elif _has_to_read(owner, name, roles) and name not in _read(owner, roles, sources):
        lacks = f"not read in {' or '.join((*owner.where, *owner.also_read_in))}, so that ours goes unnoticed"
    if lacks is None:
        return None
    why = f" ({owner.names[name]})" if owner.names.get(name) else ""
    places = ", ".join(f"{use.role} in trl_opsd/{use.place}" for use in used)
    return f"`{name}` of {owner.title}{why} is {lacks}. Ours: {places}."


def unlisted() -> Iterator[str]:
    """Private or borrowed names in our source that are missing from the table."""
    for (kind, name), used in uses().items():
        places = ", ".join(use.place for use in used)
        if kind == ANYWHERE:
            listed = any(name in owner.names for owner in OWNERS if owner.kind == kind)
            if not listed and name not in NOT_BORROWED:
                yield f"`{name}` in {places} is private: say in borrowed.py whose it is."
            continue
        for owner in INSTALLED:
            if owner.kind != kind or name in owner.names or not _counts(owner, used):
                continue
            sources = Sources()
            if name in _defined(owner, sources) | (_read(owner, set(), sources) if owner.keys else set()):
                yield f"`{name}` in {places} is a name of {owner.title}, too: list it in borrowed.py, or rename ours."


def unused() -> Iterator[str]:
    """Entries of the tables that our source no longer uses."""
    for owner in OWNERS:
        for name in owner.names:
            if not _counts(owner, uses().get((owner.kind, name), ())):
                yield f"`{name}` of {owner.title} is not used any more: take it out of borrowed.py."
    for name in NOT_BORROWED:
        if (ANYWHERE, name) not in uses():
            yield f"`{name}` is not used any more: take it out of `NOT_BORROWED`."


def _counts(owner: Owner, used: Sequence[Use]) -> bool:
    return any(not owner.only_taken or use.role != READ or is_private(use.name) for use in used)


def _has_to_define(owner: Owner, roles: set[str]) -> bool:
    return not owner.keys or bool(roles & {READ, CONTINUED})


def _has_to_read(owner: Owner, name: str, roles: set[str]) -> bool:
    if owner.keys:
        return bool(roles & {WRITTEN, LISTED})
    return name not in owner.entries and bool(roles & {WRITTEN, OVERRIDDEN})


def _defined(owner: Owner, sources: Sources) -> set[str]:
    look = theirs.keys_defined if owner.keys else theirs.defined
    return {name for where in owner.where if (scope := sources.scope(where)) is not None for name in look(scope)}


def _read(owner: Owner, roles: set[str], sources: Sources) -> set[str]:
    found = set()
    for where in (*owner.where, *owner.also_read_in):
        scope = sources.scope(where)
        if scope is None:
            continue
        # What we assign, the owner's `__init__` has read before; what we override, it calls.
        at_construction = OVERRIDDEN in roles or where not in owner.where
        found |= theirs.keys_read(scope) if owner.keys else theirs.read(scope, owner.read_of, at_construction)
    return found
