"""The HTML page of a run: its log as charts, and its completions token by token."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from trl_opsd.monitor.progress import PHASES, evaluated, in_words
from trl_opsd.report.recording import PAGE, Recorded, about, log_of, recorded_in
from trl_opsd.report.samples import Sample
from trl_opsd.types.loss import TENTHS

Point = tuple[float, float]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette, distinguishable with any colour vision; each colour also has its own dashes."""
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (4, 1), (1, 3))
_GREY = "#7f7f7f"
"""Readable on white and on black."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[Point, ...]


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
        stride = math.ceil(len(at) / 39) or 1
        at = [x for number, x in enumerate(at) if number % stride == 0 or number == len(at) - 1]
        values = [dict(curve.points) for curve in self.curves]
        return [(x, [one.get(x) for one in values]) for x in at]


_GROUPS = (
    ("Divergence", "nats per token", r"divergence/mean", True),
    ("Reward", "mean", r"reward|rewards/(.+)/mean", True),
    ("Entropy", "nats per token", r"entropy/(student|teacher)", True),
    ("Length of completions", "tokens", r"completions/mean_length", True),
    ("Seconds of a step", "seconds", r"time/(complete|sync|reward|teach|compare)", False),
    ("Speed", "tokens per second", r"tokens_per_second", False),
    ("Learning rate", "", r"learning_rate", False),
)
"""Title, unit, names in a log (a group in the pattern names the curve), and whether evaluations are drawn too."""


_LOSS = ("Loss", "", r"loss", True)


def charts(log: Sequence[Mapping[str, Any]], groups: Sequence[tuple[str, str, str, bool]] = _GROUPS) -> list[Chart]:
    """The charts that a `log_history` has figures for."""
    found = []
    for title, unit, pattern, of_evaluations in groups:
        points: dict[str, dict[float, float]] = {}
        for entry in log:
            split = evaluated(entry)
            # Times and speeds of an evaluation cannot be compared with those of training.
            if split and not of_evaluations:
                continue
            for name, value in sorted(entry.items()):  # a log loaded from JSON may have another order
                short = name.removeprefix(f"{split}_") if split else name
                match = re.fullmatch(pattern, short)
                if match and _is_number(value) and (not split or short != name):
                    part = match.group(1) if match.re.groups else None
                    where = (split or "training") if of_evaluations or not part else None
                    part = PHASES.get(part, part) if part and name.startswith("time/") else part
                    curve = ", ".join(filter(None, [part, where]))
                    points.setdefault(curve, {})[entry["step"]] = float(value)
        # With a single reward function, its curve equals their sum: draw it once.
        different = {
            name: one for name, one in points.items() if ", " not in name or points.get(name.rpartition(", ")[2]) != one
        }
        if different:
            curves = tuple(Curve(name, tuple(sorted(one.items()))) for name, one in different.items())
            found.append(Chart(title, unit, "step", curves))
            if title == "Divergence" and (places := _by_place(log)) is not None:
                found.append(places)
    return found


def _by_place(log: Sequence[Mapping[str, Any]]) -> Chart | None:
    """The divergence of each tenth of the completions, in the first and the last log that has it."""
    names = [f"divergence/position_{tenth}" for tenth in range(TENTHS)]
    having = [entry for entry in log if any(_is_number(entry.get(name)) for name in names)]
    ends = {entry["step"]: entry for entry in (having[:1] + having[-1:])}
    curves = [
        Curve(
            f"step {step}",
            tuple((tenth + 1, float(entry[name])) for tenth, name in enumerate(names) if _is_number(entry.get(name))),
        )
        for step, entry in ends.items()
    ]
    unit = "nats per token"
    return Chart("Divergence by position", unit, "tenth of the completion", tuple(curves)) if curves else None


def facts(log: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The run in a few named figures."""
    found = [("Steps", f"{max(entry['step'] for entry in log)}")] if log else []
    times = [entry["train_runtime"] for entry in log if _is_number(entry.get("train_runtime"))]
    found += [("Time", in_words(one)) for one in times[-1:]]
    for chart in charts(log)[:3]:
        for curve in chart.curves if chart.axis == "step" else ():
            (_, first), (_, last) = curve.points[0], curve.points[-1]
            found.append((f"{chart.title}, {curve.name}", f"{chart.shown(first)} → {chart.shown(last)}"))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def picture(chart: Chart) -> str:
    """A chart as SVG without a background, by Vega-Lite."""
    import vl_convert  # large, and needed by a report alone

    names = [curve.name for curve in chart.curves]
    values = [{"x": x, "y": y, "curve": curve.name} for curve in chart.curves for x, y in curve.points]
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
        "data": {"values": values},
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
    text = page(run.resolve().name, log_of(run) if log is None else log, recorded_in(run), about(run))
    return _published(text, to or run / PAGE)


def compare(runs: tuple[Path, Path], to: Path | None = None) -> Path:
    """Writes a page with the curves of two runs in the same charts, by default to `comparison.html` in the first.

    Raises what [`write`] raises; an error names the run.
    """
    of_runs: list[dict[str, Chart]] = []
    for run in runs:
        try:
            of_runs.append({chart.title: chart for chart in charts(log_of(run), (_LOSS, *_GROUPS))})
            if not of_runs[-1]:
                raise ValueError("no log yet")
        except ValueError as error:
            raise ValueError(f"{run}: {error}") from error
    names = [run.resolve().name for run in runs]
    names = list(map(str, runs)) if names[0] == names[1] else names
    joined, figures = [], []
    for chart in {**of_runs[1], **of_runs[0]}.values():
        both = [(name, curve) for name, of in zip(names, of_runs, strict=True) if chart.title in of
                for curve in of[chart.title].curves]  # fmt: skip
        curves = tuple(Curve(f"{name}: {one.name}".removesuffix(": "), one.points) for name, one in both)
        joined.append(replace(chart, curves=curves))
        figures += [
            (
                f"{chart.title}, {one.name}",
                f"{chart.shown(values[0])} → {chart.shown(values[-1])} "
                f"(lowest {chart.shown(min(values))}, highest {chart.shown(max(values))})",
            )
            for one in curves
            if (values := [y for _, y in one.points]) and chart.axis == "step"
        ]
    said = list(map(about, runs))
    differing = {
        topic: " | ".join(f"{name}: {one.get(topic, '–')}" for name, one in zip(names, said, strict=True))
        for topic in {**said[0], **said[1]}
        if said[0].get(topic) != said[1].get(topic)
    }
    return _published(_rendered(" and ".join(names), figures, differing, joined), to or runs[0] / "comparison.html")


def _published(text: str, file: Path) -> Path:
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
        raise ValueError("no log or sample yet")
    return _rendered(name, facts(log), described or {}, charts(log), _splits(recorded))


def _rendered(
    name: str,
    figures: Sequence[tuple[str, str]],
    described: Mapping[str, str],
    drawn: Sequence[Chart],
    splits: Sequence[_Split] = (),
) -> str:
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
        facts=figures,
        described=described,
        charts=[(one, base64.b64encode(picture(one).encode()).decode()) for one in drawn],
        splits=splits,
        top=_top(shown),
        has_teachers=any(one.teacher for one in shown),
    )


def _splits(recorded: Sequence[Recorded]) -> list[_Split]:
    """The samples by dataset, evaluations first, because they show the same prompts before and after."""
    names = sorted(dict.fromkeys(one.split for one in recorded), key=lambda name: name == "train")
    found = []
    for name in names:
        theirs = sorted((one for one in recorded if one.split == name), key=lambda one: one.step)
        first, last = theirs[0], theirs[-1]
        if first.step == last.step:
            found.append(_Split(name, last.step, None, [(one, None) for one in last.samples]))
        else:
            # Evaluations repeat their prompts, so that the same one is shown before and after.
            after = {(one.prompt, one.images): one for one in last.samples}
            pairs = [(one, after.pop((one.prompt, one.images), None)) for one in first.samples]
            found.append(_Split(name, first.step, last.step, [*pairs, *((None, one) for one in after.values())]))
    return found


def _top(samples: Sequence[Sample]) -> float:
    """The divergence with full colour: the 95th percentile, so that a single token does not pale the rest."""
    values = sorted(abs(token.divergence) for one in samples for token in one.tokens if token.divergence is not None)
    return max(values[int(0.95 * (len(values) - 1))], 1e-6) if values else 1.0
