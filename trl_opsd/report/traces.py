"""Logs samples as traces of trackio, whose dashboard lists their tokens with both models' numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_opsd.report.files import Recorded
from trl_opsd.report.samples import Sample, Token

__all__ = ["log_traces"]


def log_traces(recorded: Recorded) -> None:
    """Logs samples to trackio's open run, each as a trace with a span per token."""
    import trackio  # optional
    from trackio import Trace

    traces = {}
    for number, sample in enumerate(recorded.samples):
        completion = "".join(token.text for token in sample.tokens) + (" …" if sample.is_cut else "")
        messages = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": completion}]
        traces[f"{recorded.split}/sample_{number}"] = Trace(messages, _facts(recorded, sample), list(_spans(sample)))
    trackio.log(traces)


def _facts(recorded: Recorded, sample: Sample) -> dict[str, Any]:
    nats = [token.divergence for token in sample.tokens if token.divergence is not None]
    facts: dict[str, Any] = {"optimizer_steps": recorded.step}
    if nats:
        facts["divergence"] = f"{sum(nats) / len(nats):.3g}"
    return facts if sample.teacher is None else {**facts, "teacher": sample.teacher}


def _spans(sample: Sample) -> Iterator[dict[str, Any]]:
    for place, token in enumerate(sample.tokens):
        span: dict[str, Any] = {"id": str(place), "name": _name(token), "kind": "generation"}
        if token.divergence is not None:
            numbers = {"divergence": token.divergence, "student": token.student, "teacher": token.teacher}
            choices = "\n".join(f"{_percent(share)}  {_visible(text)}" for text, share in token.choices)
            given = f"student  {_percent(token.student)}\nteacher  {_percent(token.teacher)}"
            span |= {"input": given, "output": f"The teacher's first choices:\n{choices}", "metadata": numbers}
        yield span


def _name(token: Token) -> str:
    said = "not in the loss" if token.divergence is None else f"{token.divergence:.2f} nats"
    return f"{_visible(token.text)}  ·  {said}"


def _visible(text: str) -> str:
    shown = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in shown) or "part of a character"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:6.1%}"
