"""Records what a report is made of while a trainer trains, in the folder of the run, and writes its page at the end.

A record that cannot be written costs the report, never the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final
from zlib import crc32

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.progress import evaluated
from trl_opsd.report.samples import Recorded, Sample, append, keep_until, state_file, tell
from trl_opsd.types import Rollout

logger = get_logger(__name__)

_ROWS = 4
"""Completions kept of an evaluation or a step."""


@final
class Recording(TrainerCallback):
    """Keeps samples of the first and the last step of a training and of each evaluation, in the main process.

    `about` gives models, objective and settings by topic.
    """

    def __init__(self, folder: str, about: Callable[[], Mapping[str, str]]) -> None:
        self._run, self._about = Path(folder), about
        self._works = True
        self._evaluation: dict[int, Sample] = {}
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
        step = state.global_step
        if not is_training:
            self._evaluation = _lowest(self._evaluation, rollout, samples)
        # The first micro-batch of the first and of the last step.
        elif step != self._trained_at and (self._trained_at is None or step == state.max_steps - 1):
            self._trained_at = step
            self._try(append, self._run, Recorded(step, "train", tuple(_lowest({}, rollout, samples).values())))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._works, self._trained_at, self._evaluation = True, None, {}
        before, self._before = self._before, []
        if state.is_world_process_zero:
            self._try(keep_until, self._run, state.global_step)
            for one in before if state.global_step == 0 else ():
                self._try(append, self._run, one)
            if self._works:
                self._try(tell, self._run, self._about())

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        has_begun = state.max_steps > 0  # the log of an evaluation alone must not replace that of an earlier training
        samples, self._evaluation = self._evaluation, {}
        if samples:
            recorded = Recorded(
                state.global_step, evaluated(of.get("metrics") or {}) or "eval", tuple(samples.values())
            )
            self._try(append, self._run, recorded)
            self._before += [] if has_begun else [recorded]
        if has_begun:
            self._keep_log(state)

    def on_predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._evaluation = {}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._keep_log(state)
        if state.is_world_process_zero and self._works:
            from trl_opsd.report.page import write  # large

            self._try(partial(write, log=state.log_history), self._run)

    def _keep_log(self, state: TrainerState) -> None:
        if state.is_world_process_zero and self._works:
            self._try(state.save_to_json, str(state_file(self._run)))

    def _try(self, do: Callable[..., Any], *given: Any) -> None:
        try:
            do(*given)
        except Exception as error:  # whatever is in that folder
            self._works = False
            logger.warning(f"`report=True`: the rest of this training is not recorded: {error}")


def _lowest(
    kept: Mapping[int, Sample], rollout: Rollout, samples: Callable[[list[int]], Sequence[Sample]]
) -> dict[int, Sample]:
    """The samples with the lowest checksums of their prompts, of those kept and of more rows."""
    # The same rows in each evaluation, however they are assigned to micro-batches.
    rows = {}
    is_there = rollout.completion_mask.any(1).tolist()  # of a prompt that was skipped there is nothing to show
    for row, prompt in enumerate(rollout.prompt_lists()):
        key, images = crc32(repr(prompt).encode()), rollout.images[row] if rollout.images else None
        for image in images.originals if images else ():  # prompts often differ in their images alone
            key = crc32(image.tobytes(), key)
        if is_there[row]:
            rows[key] = row
    lowest = sorted({*kept, *rows})[:_ROWS]
    new = [key for key in lowest if key not in kept]
    made = dict(zip(new, samples([rows[key] for key in new]), strict=True)) if new else {}
    return {key: kept.get(key) or made[key] for key in lowest}
