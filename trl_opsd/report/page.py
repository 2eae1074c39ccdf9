"""The HTML page of a run: its log as charts, and completions token by token."""

from __future__ import annotations

import base64
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from pandas import DataFrame

from trl_opsd.progress import PHASES, evaluated
from trl_opsd.report.samples import about, log_of, recorded_in

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette, distinguishable with any colour vision; each colour also has its own dashes."""
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (4, 1), (1, 3))
_GREY = "#7f7f7f"
"""Readable on white and on black."""


class Chart(NamedTuple):
    """Curves with the same unit: the columns of a frame, whose index is the step."""

    title: str
    unit: str
    frame: DataFrame


_GROUPS = (
    ("Divergence", "nats per token", r"divergence/mean", True),
    ("Reward", "mean", r"reward|rewards/(.+)/mean", True),
    ("Entropy", "nats per token", r"entropy/(student|teacher)", True),
    ("Length of completions", "tokens", r"completions/mean_length", True),
    ("Seconds of a step", "seconds", r"time/(complete|sync|reward|teach|compare)", False),
    ("Speed", "tokens per second", r"tokens_per_second", False),
    ("Learning rate", "", r"learning_rate", False),
)
"""Title, unit, names in a log (a group in the pattern names the curve), and whether evaluations are drawn too: their
times and speeds cannot be compared with those of training."""


def charts(log: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """The charts that a `log_history` has figures for."""
    for title, unit, pattern, of_evaluations in _GROUPS:
        points: dict[str, dict[float, float]] = defaultdict(dict)
        for entry in log:
            split = evaluated(entry)
            for name, value in sorted(entry.items()):  # a log loaded from JSON may have another order
                match = re.fullmatch(pattern, name.removeprefix(f"{split}_") if split else name)
                if match and math.isfinite(value) and (of_evaluations or not split):
                    part = match[1] if match.re.groups else None
                    curve = ", ".join(filter(None, [PHASES.get(part or "", part), split or "training"]))
                    points[curve][entry["step"]] = value
        if points:
            yield Chart(title, unit, DataFrame(points).sort_index())


def picture(chart: Chart) -> str:
    """A chart as SVG without a background, by Vega-Lite."""
    import vl_convert  # large

    curves = {str(name): column.dropna() for name, column in chart.frame.items()}
    values = [{"x": x, "y": y, "curve": name} for name, one in curves.items() for x, y in one.items()]
    # A single point draws no line, so points are marked.
    is_short = any(len(one) < 2 for one in curves.values())
    # Rewards and rates may vary little far from 0; other axes begin there.
    scale = {"zero": False} if chart.title in ("Reward", "Learning rate") else {}
    most = chart.frame.abs().max().max()
    y_axis = {"format": ".1e" if most < 0.01 else "~g" if most < 1000 else ",.0f", "tickCount": 5}
    text = {"labelColor": _GREY, "titleColor": _GREY}
    spec = {
        "background": None,
        "width": 270,
        "height": 150,
        "padding": {"left": 14, "right": 4, "top": 4, "bottom": 4},  # a page's font may be wider than that measured
        "data": {"values": values},
        "mark": {"type": "line", "point": {"size": 20} if is_short else False},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": "step", "axis": {"tickCount": 6}},
            "y": {"field": "y", "type": "quantitative", "title": chart.unit, "scale": scale, "axis": y_axis},
            "color": {"field": "curve", "scale": {"domain": [*curves], "range": _COLOURS}, "title": None},
            "strokeDash": {"field": "curve", "scale": {"domain": [*curves], "range": _DASHES}},
        },
        "config": {
            "axis": {**text, "gridColor": f"{_GREY}40", "domainColor": _GREY, "tickColor": _GREY},
            "view": {"stroke": None},
            "legend": {**text, "orient": "bottom", "direction": "vertical", "columns": 2, "labelLimit": 150},
        },
    }
    svg: str = vl_convert.vegalite_to_svg(spec, "6.1")
    return svg


def write(run: Path, to: Path | None = None, log: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """Writes the report of a run (its `output_dir`, or a checkpoint), by default to `report.html` in it.

    Raises `ValueError` if there is nothing to report.
    """
    entries, recorded = log_of(run) if log is None else log, recorded_in(run)
    if not entries and not recorded:
        raise ValueError(f"{run} has no log: train with `report=True`, or, for curves alone, save checkpoints.")
    splits = _first_and_last(recorded)
    samples = [sample for one in splits.values() for group in one.values() for _, sample in group]
    nats = sorted(abs(token.divergence) for one in samples for token in one.tokens if token.divergence is not None)
    environment = Environment(
        loader=PackageLoader("trl_opsd.report", "template"),
        autoescape=select_autoescape(default=True),
        # A misspelt name in the template is an error instead of an empty place.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html").render(
        name=run.resolve().name,
        facts=about(run),
        charts=[(one, base64.b64encode(picture(one).encode()).decode()) for one in charts(entries)],
        splits=splits,
        # The divergence with full colour: the 95th percentile, so that a single token does not pale the rest.
        top=max(nats[int(0.95 * (len(nats) - 1))], 1e-6) if nats else 1.0,
    )
    # Replaced atomically: a browser may read the page while the run goes on.
    file = to or run / "report.html"
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
    return file


def _first_and_last(recorded: Sequence[Any]) -> dict[str, dict[Any, list[tuple[int, Any]]]]:
    """Samples of the first and the last step, with that, by split and prompt."""
    splits: dict[str, dict[Any, list[tuple[int, Any]]]] = {}
    # Evaluations first, because they show the same prompts before and after.
    for split in sorted({one.split for one in recorded}, key=lambda one: (one == "train", one)):
        of_split = sorted((one for one in recorded if one.split == split), key=lambda one: one.step)
        ends, splits[split] = {one.step: one for one in (of_split[0], of_split[-1])}, defaultdict(list)
        for step, one in ends.items():
            for place, sample in enumerate(one.samples):  # several may differ in their images alone
                before = [each.prompt for each in one.samples[:place]].count(sample.prompt)
                splits[split][sample.prompt, before].append((step, sample))
    return splits
