"""The HTML page of a run: its log as charts, and its completions token by token."""

from __future__ import annotations

import base64
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from trl_opsd.progress import PHASES, evaluated, in_words
from trl_opsd.report.records import PAGE, Recorded, about, log_of, recorded_in
from trl_opsd.report.samples import Sample
from trl_opsd.types.loss import TENTHS

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette, distinguishable with any colour vision; each colour also has its own dashes."""
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (4, 1), (1, 3))
_GREY = "#7f7f7f"
"""Readable on white and on black."""


class Curve(NamedTuple):
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with the same unit."""

    title: str
    unit: str
    """Label of the vertical axis."""
    axis: str
    """Label of the horizontal axis."""
    curves: tuple[Curve, ...]

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max((abs(y) for curve in self.curves for _, y in curve.points), default=0.0)

    def shown(self, value: float | None) -> str:
        """A number with as many decimals as all others of the chart; a dash for `None`."""
        if value is None:
            return "–"
        if 0 < self.largest < 0.01:
            return f"{value:.2e}"
        return f"{value:,.{3 if self.largest < 10 else 1 if self.largest < 1000 else 0}f}"

    @property
    def rows(self) -> list[tuple[float, list[float | None]]]:
        """The numbers of all curves by place on the horizontal axis: at most forty, with the first and the last."""
        at = sorted({x for curve in self.curves for x, _ in curve.points})
        values = [dict(curve.points) for curve in self.curves]
        return [(x, [one.get(x) for one in values]) for x in at[: -1 : math.ceil(len(at) / 39) or 1] + at[-1:]]

    @property
    def figures(self) -> list[tuple[str, list[float]]]:
        """The numbers of each curve over the steps, with its name."""
        return [(f"{self.title}, {one.name}", [y for _, y in one.points]) for one in self.curves if self.axis == "step"]


_GROUPS = (
    ("Divergence", "nats per token", r"divergence/mean", True),
    ("KL(teacher‖student) at temperature 1", "nats per token", r"certificate/kl", True),
    ("Same likeliest token", "share", r"certificate/agreement", True),
    ("Reward", "mean", r"reward|rewards/(.+)/mean", True),
    ("Entropy", "nats per token", r"entropy/(student|teacher)", True),
    ("Length of completions", "tokens", r"completions/mean_length", True),
    ("Seconds of a step", "seconds", r"time/(complete|sync|reward|teach|compare)", False),
    ("Speed", "tokens per second", r"tokens_per_second", False),
    ("Learning rate", "", r"learning_rate", False),
)
"""Title, unit, names in a log (a group in the pattern names the curve), and whether evaluations are drawn too: their
times and speeds cannot be compared with those of training."""
_LOSS = ("Loss", "", r"loss", True)


def charts(log: Sequence[Mapping[str, Any]], groups: Sequence[tuple[str, str, str, bool]] = _GROUPS) -> list[Chart]:
    """The charts that a `log_history` has figures for."""
    found = []
    for title, unit, pattern, of_evaluations in groups:
        points: dict[str, dict[float, float]] = defaultdict(dict)
        for entry in log:
            split = evaluated(entry)
            names = re.compile(f"{re.escape(f'{split}_' if split else '')}(?:{pattern})")
            for name, value in sorted(entry.items()):  # a log loaded from JSON may have another order
                if (match := names.fullmatch(name)) and _is_number(value) and (of_evaluations or not split):
                    part: str | None = match[1] if names.groups else None
                    where = (split or "training") if of_evaluations or not part else None
                    part = PHASES.get(part, part) if part and pattern.startswith("time/") else part
                    curve = ", ".join(filter(None, [part, where]))
                    points[curve][entry["step"]] = float(value)
        # With a single reward function, its curve equals their sum: draw it once.
        drawn = [name for name in points if ", " not in name or points.get(name.rpartition(", ")[2]) != points[name]]
        if drawn:
            curves = tuple(Curve(name, tuple(sorted(points[name].items()))) for name in drawn)
            found.append(Chart(title, unit, "step", curves))
            found += _by_place(log) if title == "Divergence" else []
    return found


def _by_place(log: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The divergence of each tenth of the completions, in the first and the last log that has it."""
    places = [f"divergence/position_{tenth}" for tenth in range(TENTHS)]
    having = [entry for entry in log if any(_is_number(entry.get(name)) for name in places)]
    curves = [
        Curve(
            f"step {step}",
            tuple((at, float(entry[one])) for at, one in enumerate(places, 1) if _is_number(entry.get(one))),
        )
        for step, entry in {entry["step"]: entry for entry in having[:1] + having[-1:]}.items()
    ]
    return [Chart("Divergence by position", "nats per token", "tenth of the completion", tuple(curves))] * bool(curves)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def facts(log: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The run in a few named figures."""
    found = [("Steps", f"{max(entry['step'] for entry in log)}")] if log else []
    times = [entry["train_runtime"] for entry in log if _is_number(entry.get("train_runtime"))]
    found += [("Time since the last start", in_words(one)) for one in times[-1:]]
    ends = [(name, chart.shown(y[0]), chart.shown(y[-1])) for chart in charts(log)[:3] for name, y in chart.figures]
    return found + [(name, f"{first} → {last}") for name, first, last in ends]


def picture(chart: Chart) -> str:
    """A chart as SVG without a background, by Vega-Lite."""
    import vl_convert  # large

    names = [curve.name for curve in chart.curves]
    # A single point draws no line, so points are marked.
    is_short = any(len(curve.points) < 2 for curve in chart.curves)
    # Rewards and rates may vary little far from 0; other axes begin there.
    scale = {"zero": False} if chart.title in ("Reward", "Learning rate") else {}
    y_axis = {"format": "~s" if chart.largest >= 1000 else "~g" if chart.largest >= 0.01 else ".1e", "tickCount": 5}
    text = {"labelColor": _GREY, "labelFontSize": 11, "titleColor": _GREY, "titleFontSize": 11}
    lines = {"gridColor": "#7f7f7f40", "domainColor": _GREY, "tickColor": _GREY}
    legend = {"orient": "bottom", "direction": "vertical", "columns": 2, "columnPadding": 24, "labelLimit": 150}
    spec = {
        "background": None,
        "width": 270,
        "height": 150,
        "padding": {"left": 14, "right": 4, "top": 4, "bottom": 4},  # a page's font may be wider than that measured
        "data": {"values": [{"x": x, "y": y, "curve": curve.name} for curve in chart.curves for x, y in curve.points]},
        "mark": {"type": "line", "strokeWidth": 1.8, "point": {"size": 20} if is_short else False},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": chart.axis, "axis": {"tickCount": 6}},
            "y": {"field": "y", "type": "quantitative", "title": chart.unit, "scale": scale, "axis": y_axis},
            "color": {"field": "curve", "scale": {"domain": names, "range": _COLOURS}, "title": None},
            "strokeDash": {"field": "curve", "scale": {"domain": names, "range": _DASHES}},
        },
        "config": {
            "font": "sans-serif",
            "axis": {**text, **lines, "titleFontWeight": "normal", "titlePadding": 10},
            "view": {"stroke": None},
            "legend": {**text, **legend, "symbolStrokeWidth": 2, "symbolSize": 220},
        },
    }
    svg: str = vl_convert.vegalite_to_svg(spec, "6.1")
    return svg


def write(run: Path, log: Sequence[Mapping[str, Any]] | None = None, to: Path | None = None) -> Path:
    """Writes the report of a run (its `output_dir`, or a checkpoint), by default to `report.html` in it.

    Raises `ValueError` if there is nothing to report or a file is damaged.
    """
    text = page(run.resolve().name, log_of(run) if log is None else log, recorded_in(run), about(run))
    return published(text, to or run / PAGE)


def compare(runs: tuple[Path, Path], to: Path | None = None) -> Path:
    """Writes a page with the curves of two runs in the same charts, by default to `comparison.html` in the first.

    Raises what [`write`] raises; an error names the run.
    """
    names = [run.resolve().name for run in runs]
    names = list(map(str, runs)) if names[0] == names[1] else names
    joined: dict[str, Chart] = {}
    for run, name in zip(reversed(runs), reversed(names), strict=True):  # the first in front
        try:
            drawn = charts(log_of(run), (_LOSS, *_GROUPS))
            if not drawn:
                raise ValueError("no log yet")
        except ValueError as error:
            raise ValueError(f"{run}: {error}") from error
        for chart in drawn:
            named = tuple(Curve(f"{name}: {one.name}".removesuffix(": "), one.points) for one in chart.curves)
            before = joined[chart.title].curves if chart.title in joined else ()
            joined[chart.title] = replace(chart, curves=named + before)
    figures = []
    for chart in joined.values():
        for title, y in chart.figures:
            first, last, least, most = map(chart.shown, (y[0], y[-1], min(y), max(y)))
            figures.append((title, f"{first} → {last} (lowest {least}, highest {most})"))
    said = list(map(about, runs))
    differing = {
        topic: " | ".join(f"{name}: {one.get(topic, '–')}" for name, one in zip(names, said, strict=True))
        for topic in {**said[0], **said[1]}
        if said[0].get(topic) != said[1].get(topic)
    }
    text = rendered(" and ".join(names), figures, differing, list(joined.values()))
    return published(text, to or runs[0] / "comparison.html")


def published(text: str, file: Path) -> Path:
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
        raise ValueError("no log and no sample: train with `report=True`, or, for curves alone, save checkpoints")
    return rendered(name, facts(log), described or {}, charts(log), recorded)


def rendered(
    name: str,
    figures: Sequence[tuple[str, str]],
    described: Mapping[str, str],
    drawn: Sequence[Chart],
    recorded: Sequence[Recorded] = (),
) -> str:
    # Evaluations first, because they show the same prompts before and after.
    names = sorted(dict.fromkeys(one.split for one in recorded), key=lambda name: name == "train")
    splits = [_Split(name, *_ends([one for one in recorded if one.split == name])) for name in names]
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
        facts=figures,
        described=described,
        charts=[(one, base64.b64encode(picture(one).encode()).decode()) for one in drawn],
        splits=splits,
        top=_top([one for split in splits for pair in split.pairs for one in pair if one is not None]),
    )


class _Split(NamedTuple):
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


def _ends(recorded: list[Recorded]) -> tuple[int, int | None, list[tuple[Sample | None, Sample | None]]]:
    """The first and the last step of a dataset's samples, and these in pairs with the same prompt."""
    recorded.sort(key=lambda one: one.step)
    first, last = recorded[0], recorded[-1]
    if first.step == last.step:
        return last.step, None, [(one, None) for one in last.samples]
    after = {(one.prompt, one.images): one for one in last.samples}
    pairs = [(one, after.pop((one.prompt, one.images), None)) for one in first.samples]
    return first.step, last.step, [*pairs, *((None, one) for one in after.values())]


def _top(samples: Sequence[Sample]) -> float:
    """The divergence with full colour: the 95th percentile, so that a single token does not pale the rest."""
    values = sorted(abs(token.divergence) for one in samples for token in one.tokens if token.divergence is not None)
    return max(values[int(0.95 * (len(values) - 1))], 1e-6) if values else 1.0
