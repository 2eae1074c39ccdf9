"""Records what a report is made of while a trainer trains, in the folder of the run, and writes its page at the end.

A record that cannot be written costs the report, never the training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, final
from zlib import crc32

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.progress import evaluated
from trl_opsd.report.records import Recorded, append, keep_until, state_file, tell
from trl_opsd.report.samples import Sample, Token
from trl_opsd.types import Rollout

logger = get_logger(__name__)

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
        step = state.global_step
        if not is_training:
            self._evaluation = _lowest(self._evaluation, rollout, samples)
        # The first micro-batch of the first and of the last step.
        elif step != self._trained_at and (self._trained_at is None or step == state.max_steps - 1):
            self._trained_at = step
            found = _lowest({}, rollout, samples, self._first)
            self._first = frozenset(found)
            self._keep(Recorded(step, "train", tuple(found.values())))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._works, self._trained_at, self._evaluation, self._first = True, None, {}, frozenset()
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
            self._keep(recorded)
            self._before += [] if has_begun else [recorded]
        if has_begun:
            self._keep_log(state)

    def on_predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._evaluation = {}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._keep_log(state)
        if state.is_world_process_zero and self._works:
            from trl_opsd.report.page import write  # large

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
            self._try(state.save_to_json, str(state_file(self._run)))

    def _try(self, do: Callable[..., Any], *given: Any) -> None:
        try:
            do(*given)
        except (OSError, ValueError, ImportError) as error:
            self._works = False
            logger.warning(f"`report=True`: the rest of this training is not recorded: {error}")


def _lowest(
    kept: Mapping[int, Sample],
    rollout: Rollout,
    samples: Callable[[list[int]], Sequence[Sample]],
    seen: Collection[int] = (),
) -> dict[int, Sample]:
    """The samples with the lowest checksums of their prompts, of those kept and of more rows; `seen` ones first."""
    # The same rows in each evaluation, however they are assigned to micro-batches.
    rows, is_there = (
        {},
        rollout.completion_mask.any(1).tolist(),
    )  # of a prompt that was skipped there is nothing to show
    for row, prompt in enumerate(rollout.prompt_lists()):
        key, images = crc32(repr(prompt).encode()), rollout.images[row] if rollout.images else None
        for image in images.originals if images else ():  # prompts often differ in their images alone
            key = crc32(image.tobytes(), key)
        if is_there[row]:
            rows[key] = row
    lowest = sorted({*kept, *rows}, key=lambda one: (one not in seen, one))[:_ROWS]
    new = [key for key in lowest if key not in kept]
    made = dict(zip(new, samples([rows[key] for key in new]), strict=True)) if new else {}
    return {key: kept.get(key) or made[key] for key in lowest}


def log_traces(recorded: Recorded) -> None:
    """Logs samples to trackio's open run, each as a trace with a span per token."""
    import trackio  # optional
    from trackio import Trace

    traces = {}
    for number, sample in enumerate(recorded.samples):
        messages = [{"role": "user", "content": sample.prompt}]
        for tokens, answer in sample.turns:
            messages.append({"role": "assistant", "content": "".join(token.text for token in tokens)})
            messages += [] if answer is None else [{"role": "tool", "content": answer}]
        messages[-1]["content"] += " …" if sample.is_cut else ""
        facts: dict[str, Any] = {"optimizer_steps": recorded.step}
        if nats := [token.divergence for token in sample.tokens if token.divergence is not None]:
            facts["divergence"] = f"{sum(nats) / len(nats):.3g}"
        if sample.teacher is not None:
            facts["teacher"] = sample.teacher
        spans = [{"id": str(place), "kind": "generation", **_span(token)} for place, token in enumerate(sample.tokens)]
        traces[f"{recorded.split}/sample_{number}"] = Trace(messages, facts, spans)
    trackio.log(traces)


def _span(token: Token) -> dict[str, Any]:
    if token.divergence is None:
        return {"name": f"{_visible(token.text)}  ·  not in the loss"}
    choices = "\n".join(f"{share:6.1%}  {_visible(text)}" for text, share in token.choices)
    shares = {"student": token.student, "teacher": token.teacher}
    return {
        "name": f"{_visible(token.text)}  ·  {token.divergence:.2f} nats",
        "input": "\n".join(f"{name}  {'–' if one is None else format(one, '6.1%')}" for name, one in shares.items()),
        "output": f"The teacher's top tokens:\n{choices}",
        "metadata": {"divergence": token.divergence, **shares},
    }


def _visible(text: str) -> str:
    shown = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in shown) or "part of a character"
