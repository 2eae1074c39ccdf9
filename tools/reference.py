"""Writes docs/reference.md: options, arguments of the trainer and metrics, all read from the code.

Values come from the table of options; incompatible ones are obtained by calling the checks: the page quotes errors.

    python tools/reference.py
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import DIVERGENCES
from trl_opsd.methods import NAMED
from trl_opsd.options.table import RESUMED, table
from trl_opsd.teacher.checks import check_teachers

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"

_INTRODUCTION = """\
Written by `python tools/reference.py` from the code; a test fails when the two differ. Sentences after *Refused* are
the errors themselves."""

_OPTIONS = """\
`OPSDConfig` is [`trl.DistillationConfig`](https://huggingface.co/docs/trl/distillation_trainer) with the fields below.
All others keep TRL's names, defaults and meanings, but for [these](#different-from-trl). `examples/train.py` takes
every field on its command line. Options are read when the trainer is built; an option may differ when a run resumes,
unless it says otherwise."""

_METHODS = """\
Names in `OPSDConfig(methods={...})`, with the classes of `trl_opsd.methods` that `OPSDTrainer(methods=[...])` takes,
and their settings."""

_DIVERGENCES = """\
Values of `divergence` by name, and the objects they stand for. [extending.md](extending.md) has one of your own."""

_NARROWER = """\
`trust_remote_code` covers the student alone; `teacher_trust_remote_code` is the teacher's. Without an accelerator,
`bf16` is off unless it is set, and memory is not pinned; TRL's default is refused there.

Options may be given as text, as a YAML file or a shell gives them (`"1e-5"`, `"False"`), and those that take a dict as
JSON. A name that does not exist is refused with the closest one; [migration.md](migration.md) has the names of other
trainers."""

_CHECKED = """\
These come from TRL and mean what they mean there. `OPSDConfig` checks their values, which TRL mostly does not."""

_REFUSED = """\
Because they would not have the effect that they promise."""

_ARGUMENTS = """\
Of `OPSDTrainer`; from `rollout` on they are given by name. Those up to `tools` are
[TRL's](https://huggingface.co/docs/trl/distillation_trainer)."""

_ATTRIBUTES = """\
A trainer is final once it is built: build another one for other options, teachers, datasets or tools. Assigning to
`divergence`, `beta`, `temperature` (of the loss, as in TRL), `rollout`, and to the attributes of `generation_config`
(where `transformers` generates) takes effect with the next batch."""

_METRICS = """\
Units are nats where the objective is a KL or the JSD; a total variation, an α-divergence and one of your own have
theirs. Added to what TRL logs (`loss`, `entropy`, `num_tokens`, `step_time`, `completions/…`). An evaluation logs
its metrics as `eval_<metric>`; where `eval_dataset` is a dict there is one log for each dataset, with all metrics,
TRL's too, as `eval_<dataset>_<metric>`. `evaluate(metric_key_prefix="held_out")` puts `held_out` in place of
`eval`. `predict(rows)` logs nothing and returns the token ids of the completions, in the order of the rows and
padded with -100, the same completions as `texts`, and the same metrics as `test_<metric>`. `eval_loss` differs from
TRL's: it is the mean over the tokens of the whole evaluation, which is also `eval_divergence/mean`; with
`Aggregation("rows")` that over its rows of their means over tokens, with `"teachers"` that over its teachers.

*Main process*: each process has a value of its own, and loggers get that of the main process. Means cover what happened
since the last log; what a log without a token in the loss leaves out is in the next. *Always* is in every other log.
Values are reduced as one of:"""


def _config(**options: Any) -> OPSDConfig:
    return OPSDConfig("out", use_cpu=True, **options)


TOGETHER: dict[str, list[Callable[[], Any]]] = {
    "teacher_model_kind": [
        lambda: check_teachers(None, "student", _config()),
        lambda: check_teachers("teacher-model", "student", _config(teacher_model_kind="base")),
    ],
    "teacher_offload": [
        lambda: _config(teacher_offload="zero3"),
    ],
}
"""Calls that are refused, by the new option they concern."""

OF_OTHERS: list[Callable[[], Any]] = [
    lambda: _config(auto_find_batch_size=True),
    lambda: _config(torch_compile=True),
    lambda: _config(bf16_full_eval=True),
    lambda: _config(dataloader_in_order=False, dataloader_num_workers=2),
    lambda: _config(generation_kwargs={"num_return_sequences": 2}),
    lambda: _config(generation_kwargs={"stop_strings": ["."]}),
    lambda: _config(generation_kwargs={"prompt_lookup_num_tokens": 3}),
]
"""The same for options of TRL and transformers."""


def document() -> str:
    """The page."""
    described = described_in(OPSDConfig, "Parameters")
    return "\n".join(
        [
            "# Reference: options, arguments, metrics",
            "",
            _INTRODUCTION,
            "",
            "## Options",
            "",
            _OPTIONS,
            "",
            *_new_options(described),
            "### Methods",
            "",
            _METHODS,
            "",
            *_methods(),
            "### Divergences",
            "",
            _DIVERGENCES,
            "",
            *_table(["name", "object", "what it is"], _divergences()),
            "",
            "### Different from TRL",
            "",
            *_table(["option", "TRL", "here", "meaning"], _changed()),
            "",
            _NARROWER,
            "",
            "### TRL's options that are checked",
            "",
            _CHECKED,
            "",
            *_table(["expected", "options, with their defaults"], _checked()),
            "",
            "### Options of TRL and transformers that are refused",
            "",
            _REFUSED,
            "",
            *map(_told, OF_OTHERS),
            "",
            "## Arguments of the trainer",
            "",
            _ARGUMENTS,
            "",
            *_table(["argument", "type", "meaning"], _arguments()),
            "",
            "## Attributes",
            "",
            _ATTRIBUTES,
            "",
            "## Metrics",
            "",
            _METRICS,
            "",
            *_metrics(),
        ]
    )


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


def _new_options(described: dict[str, tuple[str, str]]) -> Iterator[str]:
    for one in new_fields():
        kind = described[one.name][0].partition(", *optional*")[0]
        takes = f": {found}" if (found := expected(one.name)) else ""
        facts = [f"{kind}{takes}. Default: `{_literal(one.default)}`.", *_when(table(OPSDConfig)[one.name])]
        yield from (f"### `{one.name}`", "", " ".join(facts), "")
        yield from (described[one.name][1], "")
        if cases := TOGETHER.get(one.name):
            yield from (*map(_told, cases), "")


def _when(hint: Any) -> Iterator[str]:
    """Whether a resume compares an option."""
    if RESUMED in getattr(hint, "__metadata__", ()):
        yield "Resumed only with the same value."


def _methods() -> Iterator[str]:
    """Each method that is passed, with its settings."""
    for name, kind in NAMED.items():
        about, _, settings = (inspect.getdoc(kind) or "").partition("\n\nArgs:\n")
        yield from (f"#### `{name}`", "", f"`{kind.__name__}`. {' '.join(about.split())}", "")
        for entry in re.split(r"\n(?=    \w)", settings) if settings else ():
            yield re.sub(r"^(\w+)", r"- `\1`", " ".join(entry.split()))
        yield from [""] * bool(settings)


def _divergences() -> Iterator[list[str]]:
    for name, make in DIVERGENCES.items():
        made = make()
        about = " ".join((inspect.getdoc(type(made)) or "").partition("\n\n")[0].split())
        yield [f'`"{name}"`', f"`{made!r}`", about]


def _changed() -> Iterator[list[str]]:
    for theirs, ours in changed_fields():
        yield [f"`{ours.name}`", f"`{_literal(theirs.default)}`", f"`{_literal(ours.default)}`", ours.metadata["help"]]


def _checked() -> Iterator[list[str]]:
    new = {one.name for one in new_fields()}
    alike: dict[str, list[str]] = {}
    for one in dataclasses.fields(OPSDConfig):
        declared = one.name in DistillationConfig.__annotations__ and one.name not in new
        if declared and (found := expected(one.name)):
            alike.setdefault(found, []).append(f"`{one.name}` ({_literal(one.default)})")
    for found, options in alike.items():
        yield [found, ", ".join(options)]


def _arguments() -> Iterator[list[str]]:
    for name, (kind, meaning) in described_in(OPSDTrainer, "Args").items():
        yield [f"`{name}`", kind, meaning]


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


def _told(call: Callable[[], Any]) -> str:
    """The error of a call, as one item of a list."""
    try:
        call()
    except ValueError as error:
        return f"- *Refused.* {error}"
    raise AssertionError("expected an error")


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
