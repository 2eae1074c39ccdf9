"""Formats findings for a person, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from trl_opsd.cli.doctor.pair import LAYERS, Pair
from trl_opsd.models.probe_runner import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def verdict(findings: Sequence[Finding]) -> str:
    """All findings in a sentence."""
    of = {kind: [one.name for one in findings if one.verdict == kind] for kind in _COLOURS}
    rest = f"; {len(of['warning'])} warned" if of["warning"] else ""
    rest += f"; {len(of['skipped'])} could not be made" if of["skipped"] else ""
    if of["failed"]:
        return f"Not ready: {len(of['failed'])} of {len(findings)} checks failed ({', '.join(of['failed'])}){rest}."
    return f"Ready: {len(of['ok'])} of {len(findings)} checks passed{rest}."


def document(pair: Pair, findings: Sequence[Finding]) -> str:
    """The findings as JSON."""
    found = {
        "student": pair.student.source,
        "teacher": pair.teacher.source,
        "tiny": pair.tiny,
        "ready": all(one.verdict != "failed" for one in findings),
        "verdict": verdict(findings),
        "checks": [asdict(one) for one in findings],
    }
    return json.dumps(found, indent=2)


def show(pair: Pair, findings: Sequence[Finding]) -> None:
    """Prints a table and the verdict."""
    console = Console()
    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for one in findings:
        colour = _COLOURS[one.verdict]
        # Rich reads brackets as markup.
        table.add_row(one.name, f"[{colour}]{one.verdict}[/]", f"{one.seconds:.1f}", one.said.replace("[", r"\["))
    console.print(table)
    if pair.tiny:
        console.print(
            f"\nBoth models were built with {LAYERS} random layers and narrow feed-forward parts: heads, tokenizers "
            "and templates are as they are, weights are not."
        )
    console.print(f"\n{verdict(findings)}", highlight=False)
