"""Writes the report of a run: one self-contained HTML page, which makes no requests."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from trl_opsd.report.curves import charts, facts, picture
from trl_opsd.report.files import PAGE, Recorded, about, log_of, recorded_in
from trl_opsd.report.samples import Sample

__all__ = ["page", "write"]


@dataclass(frozen=True, slots=True)
class _Split:
    """The first and the last samples of a dataset, side by side."""

    name: str
    first: int
    last: int | None
    """Optimizer steps; `None` where there is only one."""
    pairs: list[tuple[Sample | None, Sample | None]]

    @property
    def differs(self) -> bool:
        """Whether no prompt was recorded twice."""
        return self.last is not None and not any(first and last for first, last in self.pairs)


def write(run: Path, log: Sequence[Mapping[str, Any]] | None = None, to: Path | None = None) -> Path:
    """Writes the report of a run (its `output_dir`, or a checkpoint), by default to `report.html` in it.

    Raises `ValueError` if there is nothing to report or a file is damaged, `ImportError` without vl-convert-python.
    """
    file = to or run / PAGE
    text = page(run.resolve().name, log_of(run) if log is None else log, recorded_in(run), about(run))
    # Replaced atomically: a browser may read the page while the run goes on.
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
    return file


def page(
    name: str,
    log: Sequence[Mapping[str, Any]],
    recorded: Sequence[Recorded],
    described: Mapping[str, str] | None = None,
) -> str:
    """The page as HTML, from a `log_history`, samples, and a description by topic."""
    if not (log or recorded):
        raise ValueError("there is no log and no sample yet")
    splits = _splits(recorded)
    shown = [one for split in splits for pair in split.pairs for one in pair if one is not None]
    environment = Environment(
        loader=PackageLoader("trl_opsd.report", "template"),
        autoescape=select_autoescape(default=True),
        # A misspelt name in the template is an error instead of an empty place.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        name=name,
        facts=facts(log),
        described=described or {},
        charts=[(one, "data:image/svg+xml;base64," + _encoded(picture(one))) for one in charts(log)],
        splits=splits,
        top=_top(shown),
        has_teachers=any(one.teacher for one in shown),
    )


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _splits(recorded: Sequence[Recorded]) -> list[_Split]:
    """The samples by dataset, evaluations first, because they show the same prompts before and after."""
    names = sorted(dict.fromkeys(one.split for one in recorded), key=lambda name: name == "train")
    found = []
    for name in names:
        theirs = [one for one in recorded if one.split == name]
        first, last = min(theirs, key=_step), max(reversed(theirs), key=_step)
        if first.step == last.step:
            found.append(_Split(name, last.step, None, [(one, None) for one in last.samples]))
        else:
            # Evaluations repeat their prompts, so that the same one is shown before and after.
            after = {one.prompt: one for one in last.samples}
            pairs = [(one, after.pop(one.prompt, None)) for one in first.samples]
            found.append(_Split(name, first.step, last.step, [*pairs, *((None, one) for one in after.values())]))
    return found


def _step(recorded: Recorded) -> int:
    return recorded.step


def _top(samples: Sequence[Sample]) -> float:
    """The divergence with full colour: the 95th percentile, so that a single token does not pale the rest."""
    values = sorted(abs(token.divergence) for one in samples for token in one.tokens if token.divergence is not None)
    return max(values[int(0.95 * (len(values) - 1))], 1e-6) if values else 1.0
