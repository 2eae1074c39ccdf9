"""Records what a report is made of while a trainer trains, in a folder of the run, and reads it again.

A record that cannot be written costs the report, never the training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final
from zlib import crc32

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd._compat.strict_json import loads
from trl_opsd.checkpoints.resume import newest_complete
from trl_opsd.monitor.progress import evaluated
from trl_opsd.report.samples import Sample, Token
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import RowImages

FOLDER = "report"
"""Folder in that of the run, for what is recorded while it trains."""
_ABOUT = "about.json"
PAGE = "report.html"
"""The page, beside that folder."""


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
        raise ValueError(f"{file} is not a valid recording of a run.")
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
            raise ValueError(f"Line {number} of {file} is not a valid recording of a run: {error}") from error
    return found


def _recorded(value: Any) -> Recorded:
    step, split = value["step"], value["split"]
    if not (isinstance(step, int) and isinstance(split, str)):
        raise TypeError("its step is no number, or its split no text")
    samples = (
        {
            **one,
            "tokens": tuple(map(_token, one["tokens"])),
            # Earlier versions recorded neither images nor answers.
            "images": tuple(one.get("images", ())),
            "answers": tuple((at, text) for at, text in one.get("answers", ())),
        }
        for one in value["samples"]
    )
    return Recorded(step, split, tuple(Sample(**one) for one in samples))


def _token(value: Any) -> Token:
    return Token(**{**value, "choices": tuple((text, p or 0.0) for text, p in value["choices"])})


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
    return max(states, key=lambda state: state["global_step"], default={"log_history": []})["log_history"]


def _state(file: Path) -> Any:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))  # not strict: transformers writes NaN
        entries = state["log_history"]
        if not (isinstance(state["global_step"], int) and all(isinstance(one["step"], int) for one in entries)):
            raise ValueError("its steps are not numbers")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is not a `TrainerState` of transformers: {error}") from error
    return state


def log_traces(recorded: Recorded) -> None:
    """Logs samples to trackio's open run, each as a trace with a span per token."""
    import trackio  # optional
    from trackio import Trace

    traces = {}
    for number, sample in enumerate(recorded.samples):
        messages = [{"role": "user", "content": sample.prompt}]
        for tokens, answer in sample.turns:
            messages.append({"role": "assistant", "content": "".join(token.text for token in tokens)})
            if answer is not None:
                messages.append({"role": "tool", "content": answer})
        messages[-1]["content"] += " …" if sample.is_cut else ""
        facts: dict[str, Any] = {"optimizer_steps": recorded.step}
        if nats := [token.divergence for token in sample.tokens if token.divergence is not None]:
            facts["divergence"] = f"{sum(nats) / len(nats):.3g}"
        if sample.teacher is not None:
            facts["teacher"] = sample.teacher
        spans = [_span(place, token) for place, token in enumerate(sample.tokens)]
        traces[f"{recorded.split}/sample_{number}"] = Trace(messages, facts, spans)
    trackio.log(traces)


def _span(place: int, token: Token) -> dict[str, Any]:
    said = "not in the loss" if token.divergence is None else f"{token.divergence:.2f} nats"
    span: dict[str, Any] = {"id": str(place), "name": f"{_visible(token.text)}  ·  {said}", "kind": "generation"}
    if token.divergence is None:
        return span
    numbers = {"divergence": token.divergence, "student": token.student, "teacher": token.teacher}
    choices = "\n".join(f"{_percent(share)}  {_visible(text)}" for text, share in token.choices)
    given = f"student  {_percent(token.student)}\nteacher  {_percent(token.teacher)}"
    return {**span, "input": given, "output": f"The teacher's top tokens:\n{choices}", "metadata": numbers}


def _visible(text: str) -> str:
    shown = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in shown) or "part of a character"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:6.1%}"


logger = get_logger(__name__)

_TRAIN = "train"
_ROWS = 4
"""Completions kept of an evaluation or a step."""


@final
class Recording(TrainerCallback):
    """Keeps samples of the first and the last step of a training and of each evaluation, in the main process.

    `about` gives models, objective and settings by topic; if `is_traced`, samples are also logged to trackio's run.
    """

    def __init__(self, folder: str, about: Callable[[], Mapping[str, str]], is_traced: bool) -> None:
        self._run, self._about, self._is_traced = Path(folder), about, is_traced
        self._works = True
        self._evaluation: dict[int, Sample] = {}
        self._first: frozenset[int] = frozenset()  # checksums of the training's first samples
        self._trained_at: int | None = None
        self._before: list[Recorded] = []  # of evaluations before a training, which belong to it

    def note(
        self,
        state: TrainerState,
        is_training: bool,
        rollout: Rollout,
        samples: Callable[[list[int]], Sequence[Sample]],
    ) -> None:
        """Takes samples of a micro-batch; `samples`, by row number, is called only for rows that are kept."""
        if not (self._works and state.is_world_process_zero):
            return
        if not is_training:
            self._evaluation = _lowest(self._evaluation, rollout, samples)
            return
        step = state.global_step
        # The first micro-batch of the first and of the last step.
        if step != self._trained_at and (self._trained_at is None or step == state.max_steps - 1):
            self._trained_at = step
            found = _lowest({}, rollout, samples, self._first)
            self._first = frozenset(found)
            self._keep(Recorded(step, _TRAIN, tuple(found.values())))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._works, self._trained_at, self._evaluation, self._first = True, None, {}, frozenset()
        before, self._before = self._before, []
        if state.is_world_process_zero:
            self._try(keep_until, self._run, state.global_step)
            for one in before if state.global_step == 0 else ():
                self._try(append, self._run, one)
            if self._works:
                self._try(tell, self._run, self._about())

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        samples, self._evaluation = self._evaluation, {}
        if samples:
            recorded = Recorded(state.global_step, evaluated(metrics or {}) or "eval", tuple(samples.values()))
            self._keep(recorded)
            if not _has_begun(state):
                self._before.append(recorded)
        if _has_begun(state):
            self._keep_log(state)

    def on_predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._evaluation = {}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._keep_log(state)
        if state.is_world_process_zero and self._works:
            from trl_opsd.report.page import write  # large, and it reads what is recorded here

            self._try(write, self._run, state.log_history)

    def _keep(self, recorded: Recorded) -> None:
        self._try(append, self._run, recorded)
        if self._is_traced:
            try:
                log_traces(recorded)
            except (ImportError, RuntimeError) as error:
                self._is_traced = False
                logger.warning(f"`report=True`: samples cannot be sent to trackio: {error}")

    def _keep_log(self, state: TrainerState) -> None:
        if state.is_world_process_zero and self._works:
            self._try(lambda: state.save_to_json(str(state_file(self._run))))

    def _try(self, do: Callable[..., Any], *given: Any) -> None:
        try:
            do(*given)
        except (OSError, ValueError, ImportError) as error:
            self._works = False
            logger.warning(f"`report=True`: the rest of this training is not recorded: {error}")


def _has_begun(state: TrainerState) -> bool:
    """Whether this trainer has trained; the log of an evaluation alone must not replace that of an earlier training."""
    return state.max_steps > 0


def _lowest(
    kept: Mapping[int, Sample],
    rollout: Rollout,
    samples: Callable[[list[int]], Sequence[Sample]],
    seen: Collection[int] = (),
) -> dict[int, Sample]:
    """The samples with the lowest checksums of their prompts, of those kept and of more rows; `seen` ones first."""
    # The same rows in each evaluation, however they are assigned to micro-batches.
    prompts = rollout.prompt_lists()
    images = rollout.images or [None] * len(prompts)
    is_there = (rollout.completion_mask != 0).any(1).tolist()  # of a prompt that was skipped there is nothing to show
    rows = {key: row for row, key in enumerate(map(_checksum, prompts, images)) if is_there[row]}
    lowest = sorted({*kept, *rows}, key=lambda one: (one not in seen, one))[:_ROWS]
    new = [key for key in lowest if key not in kept]
    made = dict(zip(new, samples([rows[key] for key in new]), strict=True)) if new else {}
    return {key: made[key] if key in made else kept[key] for key in lowest}


def _checksum(prompt: list[int], images: RowImages | None) -> int:
    value = crc32(repr(prompt).encode())
    for image in images.originals if images else ():  # prompts often differ in their images alone
        value = crc32(image.tobytes(), value)
    return value
