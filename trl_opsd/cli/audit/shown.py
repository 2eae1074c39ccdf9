"""Audits on a screen, as JSON, and as a page in the style of a report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap

from pandas import DataFrame

from trl_opsd.cli.audit.measure import Audit, Mean
from trl_opsd.cli.audit.verdict import verdict
from trl_opsd.report.page import Chart, published, rendered
from trl_opsd.report.records import Recorded, rounded

_WIDTH = 80


def screen(audits: Sequence[Audit]) -> str:
    """At most 80 columns."""
    lines = []
    for one in audits:
        found = verdict(one)
        lines += [f"{found.word.upper()}: {one.name}"]
        lines += wrap(f"{found.why} {found.remedy}", _WIDTH, initial_indent="  ", subsequent_indent="  ")
        for topic, text in _facts(one).items():
            lines += wrap(text, _WIDTH, initial_indent=f"  {topic:<18}", subsequent_indent=" " * 20)
    return "\n".join(lines)


def _facts(one: Audit) -> dict[str, str]:
    """What was measured, by topic."""
    tenths = " ".join(f"{nats:.2g}" for nats in one.by_tenth if not math.isnan(nats))
    found = {
        "student": f"{_reward(one.student)}entropy {one.entropy:.3g} nats; {one.rows} completions, {one.tokens} tokens",
        "divergence": f"{one.loss:.3g} nats per token; KL {one.reverse:.3g} reverse, {one.forward:.3g} forward",
        "noise floor": f"{one.floor:.1g} nats",
        "where": f"80 % in {one.carries:.0%} of the tokens",
        "by tenths": f"{tenths} of the completion",
        "by entropy": f"{' '.join(f'{nats:.2g}' for nats in one.by_entropy)}, quarters of the student's",
    }
    if one.context is not None:
        found["context"] = f"{one.context:.2g} nats from without"
    if one.correlation is not None:
        found["with the reward"] = f"correlation {one.correlation.value:+.2f} ± {one.correlation.error:.2f} over rows"
    if one.own is not None and one.knows is not None:
        found["own completions"] = f"{_reward(one.own)}{one.knows.value:+.2f} ± {one.knows.error:.2f}"
    if one.after is not None:
        of_teacher, of_student = one.after
        found["after a mistake"] = f"{of_teacher.value:.2f}, student {of_student.value:.2f}; {of_teacher.rows} rows"
    return found


def _reward(mean: Mean | None) -> str:
    return "" if mean is None else f"reward {mean.value:.3f} ± {mean.error:.3f}; "


def document(audits: Sequence[Audit]) -> str:
    """As JSON, with the verdicts; `null` where a number is not known."""
    values = [{**asdict(one), "verdict": verdict(one)._asdict()} for one in audits]
    for one in values:
        del one["samples"]
    return json.dumps({"candidates": rounded(values)}, indent=2, ensure_ascii=False, allow_nan=False)


def write_page(audits: Sequence[Audit], name: str, file: Path) -> Path:
    """Writes the page, one HTML file."""
    by_tenth, by_entropy = (
        DataFrame({one.name: nats for one, nats in zip(audits, each, strict=True)}).rename(lambda at: at + 1)
        for each in zip(*((one.by_tenth, one.by_entropy) for one in audits), strict=True)
    )
    charts = [
        Chart("Divergence by position", "nats per token", "tenth of the completion", by_tenth),
        Chart("Divergence by entropy", "nats per token", "quarter of the student's entropy", by_entropy),
    ]
    figures, described = [], dict[str, str]()
    for one in audits:
        found = verdict(one)
        figures.append((one.name, found.word))
        facts = {"verdict": f"{found.why} {found.remedy}", **_facts(one)}
        described |= {f"{one.name}: {topic}": text for topic, text in facts.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    recorded = [Recorded(0, "the student's completions", audits[0].samples)]
    return published(rendered(name, figures, described, charts, recorded), file)
