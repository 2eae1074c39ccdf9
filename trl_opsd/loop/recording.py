"""Records what a report is made of while a trainer trains and evaluates, and writes it at the end.

A record that cannot be written costs the report, never the training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, final
from zlib import crc32

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.monitor.progress import evaluated
from trl_opsd.report.files import Recorded, append, keep_until, log_traces, state_file, tell
from trl_opsd.report.page import write
from trl_opsd.report.samples import Sample

__all__ = ["Recording"]

logger = get_logger(__name__)

_TRAIN = "train"
_ROWS = 4
"""Completions kept of an evaluation or a step."""


@final
class Recording(TrainerCallback):
    """Keeps samples of the first and the last step of a training and of each evaluation, in the main process.

    Of the rows of an evaluation those whose prompts have the lowest checksums: the same ones each time, however rows
    are assigned to micro-batches. `about` gives models, objective and settings by topic; if `is_traced`, samples are
    also logged to the run that trackio has open.
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
        prompts: Callable[[], list[list[int]]],
        samples: Callable[[list[int]], Sequence[Sample]],
    ) -> None:
        """Takes samples of a micro-batch; `samples`, by row number, is called only for rows that are kept."""
        if not (self._works and state.is_world_process_zero):
            return
        if not is_training:
            self._evaluation = _lowest(self._evaluation, prompts(), samples)
            return
        step = state.global_step
        # The first micro-batch of the first and of the last step.
        if step != self._trained_at and (self._trained_at is None or step == state.max_steps - 1):
            self._trained_at = step
            found = _lowest({}, prompts(), samples, self._first)
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
            self._try(write, self._run, state.log_history)

    def _keep(self, recorded: Recorded) -> None:
        self._try(append, self._run, recorded)
        if self._is_traced:
            try:
                log_traces(recorded)
            except (ImportError, RuntimeError) as error:
                self._is_traced = False
                logger.warning(f"`report=True`: samples are no traces of trackio: {error}")

    def _keep_log(self, state: TrainerState) -> None:
        if state.is_world_process_zero and self._works:
            self._try(_save, state, state_file(self._run))

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
    prompts: Sequence[Sequence[int]],
    samples: Callable[[list[int]], Sequence[Sample]],
    seen: Collection[int] = (),
) -> dict[int, Sample]:
    """The samples with the lowest checksums of their prompts, of those kept and of more rows; `seen` ones first."""
    rows = {crc32(repr(ids).encode()): row for row, ids in enumerate(prompts)}
    lowest = sorted({*kept, *rows}, key=lambda one: (one not in seen, one))[:_ROWS]
    new = [key for key in lowest if key not in kept]
    made = dict(zip(new, samples([rows[key] for key in new]), strict=True)) if new else {}
    return {key: made[key] if key in made else kept[key] for key in lowest}


def _save(state: TrainerState, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    state.save_to_json(str(file))
