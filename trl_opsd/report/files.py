"""What a report is made of: samples as JSON lines in the folder of a run, its log, and traces for trackio."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd._compat.strict_json import loads
from trl_opsd.checkpoints.resume import newest_complete
from trl_opsd.report.samples import Sample, Token

__all__ = [
    "PAGE",
    "Recorded",
    "about",
    "append",
    "keep_until",
    "log_of",
    "log_traces",
    "recorded_in",
    "state_file",
    "tell",
]

FOLDER = "report"
"""Folder in that of the run, for what is recorded while it trains."""
_ABOUT = "about.json"
PAGE = "report.html"
"""The page, beside that folder."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Samples of one batch."""

    step: int
    """Completed optimizer steps."""
    split: str
    """`"train"`, or the prefix of an evaluation's metrics."""
    samples: tuple[Sample, ...]


def state_file(run: Path) -> Path:
    """File of a run's log, also of one that saves no checkpoints."""
    return run / FOLDER / TRAINER_STATE_NAME


def tell(run: Path, what: Mapping[str, str]) -> None:
    """Writes a description of models, objective and settings, by topic."""
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    (run / FOLDER / _ABOUT).write_text(json.dumps(dict(what), ensure_ascii=False, indent=1), encoding="utf-8")


def about(run: Path) -> dict[str, str]:
    """What [`tell`] wrote; empty where nothing was recorded."""
    file = run / FOLDER / _ABOUT
    found = loads(file.read_text(encoding="utf-8", errors="replace")) if file.exists() else {}
    if not (isinstance(found, dict) and all(isinstance(one, str) for one in found.values())):
        raise ValueError(f"{file} is not what a run has recorded there.")
    return found


def _samples_file(run: Path) -> Path:
    return run / FOLDER / "samples.jsonl"


def append(run: Path, recorded: Recorded) -> None:
    """Appends a line; numbers that are not finite become `null`."""
    file = _samples_file(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(_line(recorded))


def _line(recorded: Recorded) -> str:
    return json.dumps(_finite(asdict(recorded)), ensure_ascii=False, allow_nan=False) + "\n"


def keep_until(run: Path, step: int) -> None:
    """Removes what was recorded after a step from which the run resumes; after step 0, everything."""
    state_file(run).unlink(missing_ok=True)
    file = _samples_file(run)
    if file.exists():
        # Lines after the step come from the training that the resumed run replaces.
        kept = [one for one in recorded_in(run) if one.step <= step] if step else []
        file.write_text("".join(map(_line, kept)), encoding="utf-8")


def recorded_in(run: Path) -> list[Recorded]:
    """All recorded samples, in order; refuses a damaged line."""
    file = _samples_file(run)
    if not file.exists():
        return []
    *lines, rest = file.read_text(encoding="utf-8", errors="replace").split("\n")
    del rest  # empty, or a last line that a killed run did not finish
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_recorded(loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"Line {number} of {file} is not what a run has recorded there: {error}") from error
    return found


def _recorded(value: Any) -> Recorded:
    return Recorded(
        step=_a(int, value["step"]),
        split=_a(str, value["split"]),
        samples=tuple(
            Sample(
                prompt=_a(str, one["prompt"]),
                teacher=None if one["teacher"] is None else _a(str, one["teacher"]),
                tokens=tuple(map(_token, one["tokens"])),
                is_cut=_a(bool, one["is_cut"]),
            )
            for one in value["samples"]
        ),
    )


def _token(value: Any) -> Token:
    numbers = (value[name] for name in ("divergence", "student", "teacher"))
    nats, student, teacher = (None if number is None else float(_a((int, float), number)) for number in numbers)
    choices = tuple((_a(str, text), float(p or 0)) for text, p in value["choices"])
    return Token(_a(str, value["text"]), nats, student, teacher, choices)


def _a(kind: Any, value: Value) -> Value:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', 'number')}")
    return value


def _finite(value: Any) -> Any:
    """A value with numbers rounded to four digits, and `None` for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def log_of(run: Path) -> list[dict[str, Any]]:
    """The `log_history` of a run or a checkpoint, from whichever file has the latest step; empty if there is none."""
    newest, _ = newest_complete(run)
    # The folder may be a run with its own record, a checkpoint, or a run with checkpoints.
    files = [state_file(run), run / TRAINER_STATE_NAME, *([newest / TRAINER_STATE_NAME] if newest else [])]
    states = [_state(file) for file in files if file.exists()]
    return max(states, key=_step, default={"log_history": []})["log_history"]


def _step(state: Any) -> int:
    step: int = state["global_step"]
    return step


def _state(file: Path) -> Any:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))  # not strict: transformers writes NaN
        entries = state["log_history"]
        if not (isinstance(state["global_step"], int) and all(isinstance(one["step"], int) for one in entries)):
            raise ValueError("its steps are no numbers")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is not a `TrainerState` of transformers: {error}") from error
    return state


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
