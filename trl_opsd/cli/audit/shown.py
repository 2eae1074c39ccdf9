"""An audit on one screen, as JSON, and as a page in the style of a report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from trl_opsd.cli.audit.measure import Audit, Measured
from trl_opsd.cli.audit.tokens import Mean
from trl_opsd.cli.audit.verdict import verdict
from trl_opsd.progress import in_words
from trl_opsd.report.page import Chart, Curve, published, rendered
from trl_opsd.report.records import Recorded, rounded

_WIDTH = 80


def screen(audit: Audit) -> str:
    """At most 80 columns."""
    lines = [f"{audit.rows} completions of the student, {audit.tokens} tokens; objective {audit.objective}"]
    lines.append(_line("student", _rewards(audit.student), f"entropy {audit.entropy:.3g} nats"))
    for one in audit.candidates:
        found = verdict(one, audit)
        lines += ["", f"{found.word.upper()}: {one.name}"]
        lines += wrap(f"{found.why} {found.remedy}", _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += [_line(*each) for each in _facts(one)]
    each = ", ".join(f"{name} {seconds:.2g}" for name, seconds in audit.seconds.items())
    lines += ["", _line("seconds", f"{each} for these rows, on this machine")]
    lines.append(
        _line(
            "a step",
            f"{in_words(audit.step_seconds)} for {audit.step_rows} rows at most, "
            f"{in_words(audit.step_seconds * audit.steps)} for {audit.steps} steps",
        )
    )
    return "\n".join(lines)


def _line(name: str, *parts: str) -> str:
    text = "; ".join(one for one in parts if one)
    return "\n".join(wrap(text, _WIDTH, initial_indent=f"  {name:<18}", subsequent_indent=" " * 20))


def _rewards(mean: Mean | None) -> str:
    return "" if mean is None else f"reward {mean.value:.3f} ± {mean.error:.3f}"


def _facts(one: Measured) -> list[tuple[str, ...]]:
    """What was measured, by topic."""
    tenths = [value for value in one.by_tenth if not math.isnan(value)]
    found: list[tuple[str, ...]] = [
        ("divergence", f"{one.loss:.3g} nats per token", f"KL {one.reverse:.3g} reverse, {one.forward:.3g} forward"),
        ("noise floor", f"{one.floor:.1g} nats", f"{one.in_bfloat16:.1g} in bfloat16"),
        ("where", f"80 % in {one.carries:.0%} of the tokens"),
        ("by tenths", " ".join(f"{value:.2g}" for value in tenths), "of the completion"),
        ("by entropy", " ".join(f"{value:.2g}" for value in one.by_entropy), "quarters of the student's"),
    ]
    if one.apart_from:
        found.append(("context", ", ".join(f"{value:.2g} nats from {name}" for name, value in one.apart_from.items())))
    if one.correlation is not None:
        found.append(
            (
                "with the reward",
                f"correlation {one.correlation.value:+.2f} ± {one.correlation.error:.2f} over rows",
                f"{one.beyond_control or 0:+.2f} beyond the control",
            )
        )
    found.append(("control", f"a constant advantage explains {one.explained:.0%} of what it says"))
    if one.own is not None and one.knows is not None:
        found.append(("own completions", _rewards(one.own), f"{one.knows.value:+.2f} ± {one.knows.error:.2f}"))
    if one.after is not None:
        of_teacher, of_student = one.after
        found.append(
            ("after a mistake", f"{of_teacher.value:.2f}, student {of_student.value:.2f}", f"{of_teacher.rows} rows")
        )
    return found


def document(audit: Audit) -> str:
    """As JSON, with the verdicts; `null` where a number is not known."""
    values: dict[str, Any] = asdict(audit)
    del values["samples"]
    values["step_seconds"] = audit.step_seconds
    for one, candidate in zip(audit.candidates, values["candidates"], strict=True):
        candidate["verdict"] = asdict(verdict(one, audit))
    return json.dumps(rounded(values), indent=2, ensure_ascii=False, allow_nan=False)


def write_page(audit: Audit, name: str, file: Path) -> Path:
    """Writes the page, one HTML file."""

    def curves(which: str) -> tuple[Curve, ...]:
        return tuple(
            Curve(one.name, tuple((at, value) for at, value in enumerate(getattr(one, which), 1) if value == value))
            for one in audit.candidates
        )

    charts = [
        Chart("Divergence by position", "nats per token", "tenth of the completion", curves("by_tenth")),
        Chart("Divergence by entropy", "nats per token", "quarter of the student's entropy", curves("by_entropy")),
    ]
    figures, described = [], {}
    for one in audit.candidates:
        found = verdict(one, audit)
        figures.append((one.name, found.word))
        described[f"{one.name}: verdict"] = f"{found.why} {found.remedy}"
        described |= {f"{one.name}: {topic}": "; ".join(parts) for topic, *parts in _facts(one)}
    file.parent.mkdir(parents=True, exist_ok=True)
    recorded = [Recorded(0, "the student's completions", audit.samples)] if audit.samples else []
    return published(rendered(name, figures, described, charts, recorded), file)
