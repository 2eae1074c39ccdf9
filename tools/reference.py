"""Writes what docs/reference.md has of the code: options, methods, arguments of the trainer and metrics.

Values come from the table of options. All else on the page is written by hand.

    python tools/reference.py
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import DIVERGENCES
from trl_opsd.methods import NAMED
from trl_opsd.options.table import RESUMED, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"


def document() -> str:
    """The page as it stands, with its generated parts written anew; each stands between two comments."""
    arguments = [[f"`{name}`", *told] for name, told in described_in(OPSDTrainer, "Args").items()]
    changed = [
        [f"`{ours.name}`", f"`{_literal(theirs.default)}`", f"`{_literal(ours.default)}`", ours.metadata["help"]]
        for theirs, ours in changed_fields()
    ]
    divergences = [[f'`"{name}"`', f"`{make()!r}`", _summary(type(make()))] for name, make in DIVERGENCES.items()]
    parts: dict[str, Iterable[str]] = {
        "options": _new_options(),
        "methods": _methods(),
        "divergences": _table(["name", "object", "what it is"], divergences),
        "changed": _table(["option", "TRL", "here", "meaning"], changed),
        "checked": _table(["expected", "options, with their defaults"], _checked()),
        "arguments": _table(["argument", "type", "meaning"], arguments),
        "metrics": _metrics(),
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in parts.items():
        before, begin, rest = page.partition(f"<!-- generated: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"{PAGE} has no place for {name!r}"
        page = "".join([before, begin, "\n", "\n".join(lines).strip(), "\n\n", end, after])
    return page


def new_fields() -> list[dataclasses.Field]:
    """Fields of [`OPSDConfig`] that TRL's config lacks: its own, and then those of each method."""
    theirs = {one.name for one in dataclasses.fields(DistillationConfig)}
    known = {one.name: one for one in dataclasses.fields(OPSDConfig)}
    names = [name for one in OPSDConfig.__mro__ for name in vars(one).get("__annotations__", ())]
    return [known[name] for name in dict.fromkeys(names) if name in known.keys() - theirs]


def changed_fields() -> list[tuple[dataclasses.Field, dataclasses.Field]]:
    """Fields whose default differs from TRL's, as pairs: TRL's field, then ours."""
    ours = {one.name: one for one in dataclasses.fields(OPSDConfig)}
    both = [(one, ours[one.name]) for one in dataclasses.fields(DistillationConfig)]
    return [(one, other) for one, other in both if one.default != other.default]


def described_in(cls: type, heading: str) -> dict[str, tuple[str, str]]:
    """Type and meaning of each entry in a section of a docstring, by name.

    Args:
        cls (`type`):
            The class with the docstring.
        heading (`str`):
            The heading of the section.
    """
    section = re.search(rf"^{heading}:\n((?:(?:    .*)?\n)+)", f"{inspect.getdoc(cls)}\n", re.MULTILINE)
    assert section is not None, f"{cls.__name__} has no section {heading!r}"
    found = re.findall(r"^    (\w+) \((.*)\):\n((?:        .*\n)+)", section[1], re.MULTILINE)
    return {name: (_plain(kind), _plain(" ".join(text.split()))) for name, kind, text in found}


def expected(option: str) -> str:
    """The values of an option in words, from its type; empty if every value of a plain type is taken."""
    kinds, facts = [table(OPSDConfig).get(option)], []
    for one in kinds:  # which grows
        if get_origin(one) is Annotated:
            inner, *more = get_args(one)
            kinds.append(inner)
            facts += more
        elif get_origin(one) in (Union, UnionType):
            kinds += get_args(one)
    optional = " or None" if type(None) in kinds else ""
    if named := next((get_args(one) for one in kinds if get_origin(one) is Literal), ()):
        return f"one of {', '.join(map(repr, named))}{optional}"
    bounds = {kind: getattr(one, kind) for one in facts for kind in ("ge", "gt", "le", "lt") if hasattr(one, kind)}
    return f"{_range(int in kinds, bounds)}{optional}" if bounds else ""


def _range(is_whole: bool, bounds: dict[str, float]) -> str:
    """A range of numbers in words."""
    what = "an integer" if is_whole else "a number"
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", math.inf)
    if high == math.inf:
        return f"{what} of at least {low:g}" if "ge" in bounds else f"{what} above {low:g}"
    return f"{what} in {'[' if 'ge' in bounds else '('}{low}, {high}]"


def _new_options() -> Iterator[str]:
    described = described_in(OPSDConfig, "Parameters")
    for one in new_fields():
        kind = described[one.name][0].partition(", *optional*")[0]
        takes = f": {found}" if (found := expected(one.name)) else ""
        is_compared = RESUMED in getattr(table(OPSDConfig)[one.name], "__metadata__", ())
        resumed = " Resumed only with the same value." if is_compared else ""
        yield from (f"### `{one.name}`", "", f"{kind}{takes}. Default: `{_literal(one.default)}`.{resumed}", "")
        yield from (described[one.name][1], "")


def _methods() -> Iterator[str]:
    """Each method that is passed, with its settings."""
    for name, kind in NAMED.items():
        about, _, settings = (inspect.getdoc(kind) or "").partition("\n\nArgs:\n")
        yield from (f"#### `{name}`", "", f"`{kind.__name__}`. {' '.join(about.split())}", "")
        for entry in re.split(r"\n(?=    \w)", settings) if settings else ():
            yield re.sub(r"^(\w+)", r"- `\1`", " ".join(entry.split()))
        yield from [""] * bool(settings)


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def _checked() -> Iterator[list[str]]:
    new = {one.name for one in new_fields()}
    alike: dict[str, list[str]] = {}
    for one in dataclasses.fields(OPSDConfig):
        declared = one.name in DistillationConfig.__annotations__ and one.name not in new
        if declared and (found := expected(one.name)):
            alike.setdefault(found, []).append(f"`{one.name}` ({_literal(one.default)})")
    for found, options in alike.items():
        yield [found, ", ".join(options)]


def _metrics() -> Iterator[str]:
    """The ways in which values are reduced, numbered, and all metrics; numbered ones are one row."""
    always = OPSDTrainer.known_metrics["divergence/mean"].logs.appears
    ways = list(dict.fromkeys(one.logs.reduced for one in OPSDTrainer.known_metrics.values()))
    yield from (*(f"{number}. {way[0].upper()}{way[1:]}." for number, way in enumerate(ways, 1)), "")
    rows = [
        [
            f"`{name}` to `9`" if name.endswith("_0") else f"`{name}`",
            f"{one.meaning.replace('the first tenth', 'each tenth')} [{one.unit}]",
            str(1 + ways.index(one.logs.reduced)),
            f"{one.logs.appears.replace(always, 'always')}{'' if one.logs.evaluated else '; training only'}",
        ]
        for name, one in OPSDTrainer.known_metrics.items()
        if not re.search(r"_[1-9]$", name)
    ]
    yield from (*_table(["metric", "meaning [unit]", "reduced", "appears in"], rows), "")


def _table(head: list[str], rows: Any) -> list[str]:
    lines = ["|".join(f" {cell.replace('|', chr(92) + '|')} " for cell in row) for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"|{line}|" for line in lines)]


def _plain(text: str) -> str:
    """Turns references in docstrings into code spans."""
    return re.sub(r"\[`~?(?:[\w.]*\.)?(\w+)`\]", r"`\1`", text)


def _literal(value: Any) -> str:
    return f'"{value}"'.replace("\n", "\\n") if isinstance(value, str) else repr(value)


def main() -> None:
    """Writes the page."""
    logging.disable(logging.WARNING)
    PAGE.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
