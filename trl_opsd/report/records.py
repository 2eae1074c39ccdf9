"""The files in the folder of a run that a report is made of: samples, a description, and transformers' log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd.checkpoints import newest_complete
from trl_opsd.report.samples import Sample, Token

FOLDER = "report"
"""Folder in that of the run, for what is recorded while it trains."""
PAGE = "report.html"
"""The page, beside that folder."""
_SAMPLES, _ABOUT = Path(FOLDER, "samples.jsonl"), Path(FOLDER, "about.json")


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
    (run / _ABOUT).write_text(json.dumps(dict(what), ensure_ascii=False, indent=1), encoding="utf-8")


def about(run: Path) -> dict[str, str]:
    """What [`tell`] wrote; empty where nothing was recorded."""
    file = run / _ABOUT
    found = json.loads(file.read_text(encoding="utf-8", errors="replace")) if file.exists() else {}
    if not (isinstance(found, dict) and all(isinstance(one, str) for one in found.values())):
        raise ValueError(f"{file} is not a valid recording of a run.")
    return found


def append(run: Path, recorded: Recorded) -> None:
    """Appends a line; numbers are rounded to four digits, and `null` where they are not finite."""
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    with (run / _SAMPLES).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(rounded(asdict(recorded)), ensure_ascii=False, allow_nan=False) + "\n")


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def keep_until(run: Path, step: int) -> None:
    """Removes what was recorded after a step from which the run resumes; after step 0, everything."""
    state_file(run).unlink(missing_ok=True)
    # Lines after the step come from the training that the resumed run replaces.
    kept = [one for one in recorded_in(run) if one.step <= step] if step else []
    (run / _SAMPLES).unlink(missing_ok=True)
    for one in kept:
        append(run, one)


def recorded_in(run: Path) -> list[Recorded]:
    """All recorded samples, in order; refuses a damaged line."""
    file, found = run / _SAMPLES, []
    # What follows the last line break is empty, or a line that a killed run did not finish.
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if not (isinstance(value["step"], int) and isinstance(value["split"], str)):
                raise TypeError("its step is no number, or its split no text")
            found.append(Recorded(**{**value, "samples": tuple(map(_sample, value["samples"]))}))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"Line {number} of {file} is not a valid recording of a run: {error}") from error
    return found


def _sample(value: Any) -> Sample:
    # Earlier versions recorded neither images nor answers.
    lists = {name: tuple(value.get(name, ())) for name in ("tokens", "images", "answers")}
    choices = ([(text, share or 0.0) for text, share in one["choices"]] for one in lists["tokens"])
    tokens = [Token(**{**one, "choices": tuple(of)}) for one, of in zip(lists["tokens"], choices, strict=True)]
    answers = tuple((at, text) for at, text in lists["answers"])
    return Sample(**{**value, **lists, "tokens": tuple(tokens), "answers": answers})


def log_of(run: Path) -> list[dict[str, Any]]:
    """The `log_history` of a run or a checkpoint, from whichever file has the latest step; empty if there is none."""
    newest, _ = newest_complete(run)
    # The folder may be a run with its own record, a checkpoint, or a run with checkpoints.
    files = [state_file(run), run / TRAINER_STATE_NAME, *([newest / TRAINER_STATE_NAME] if newest else [])]
    latest: dict[str, Any] = {"global_step": -1, "log_history": []}
    for file in (one for one in files if one.exists()):
        try:
            state = json.loads(file.read_text(encoding="utf-8"))  # not strict: transformers writes NaN
            steps = [state["global_step"], *(entry["step"] for entry in state["log_history"])]
            if not all(isinstance(one, int) for one in steps):
                raise ValueError("its steps are not numbers")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{file} is not a `TrainerState` of transformers: {error}") from error
        latest = max(latest, state, key=lambda one: one["global_step"])
    return latest["log_history"]
