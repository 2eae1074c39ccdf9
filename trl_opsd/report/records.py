"""The files in the folder of a run that a report is made of: samples, a description, and transformers' log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd.checkpoints import newest_complete
from trl_opsd.report.samples import Sample

FOLDER = "report"
"""Folder in that of the run, for what is recorded while it trains."""
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
    return json.loads((run / _ABOUT).read_text(encoding="utf-8")) if (run / _ABOUT).exists() else {}


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
    kept = [line for line in _lines(run) if json.loads(line)["step"] <= step] if step else []
    (run / _SAMPLES).unlink(missing_ok=True)
    if kept:
        (run / _SAMPLES).write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _lines(run: Path) -> list[str]:
    # What follows the last line break is empty, or a line that a killed run did not finish.
    file = run / _SAMPLES
    return file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if file.exists() else []


def recorded_in(run: Path) -> list[Any]:
    """All that was recorded, in order, with the attributes of [`Recorded`], [`Sample`] and [`Token`]."""
    return [json.loads(line, object_hook=lambda one: SimpleNamespace(**one)) for line in _lines(run)]


def log_of(run: Path) -> list[dict[str, Any]]:
    """The `log_history` of a run or a checkpoint, from whichever file has the latest step; empty if there is none."""
    newest, _ = newest_complete(run)
    # The folder may be a run with its own record, a checkpoint, or a run with checkpoints.
    files = [state_file(run), run / TRAINER_STATE_NAME, *([newest / TRAINER_STATE_NAME] if newest else [])]
    states = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return max(states, key=lambda one: one["global_step"])["log_history"] if states else []
