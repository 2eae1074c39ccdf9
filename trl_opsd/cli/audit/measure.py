"""Measures on a few dozen completions of the student what a teacher says of them, and whether it knows better.

B rows · N tokens of all rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from trl_opsd._compat.sharding import gathered_head, whole_head
from trl_opsd.cli.audit.episodes import Episode, completer, episode, tried
from trl_opsd.cli.audit.tokens import FEW, Compared, Mean, Tokens, apart, tokens_of, with_rewards
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import preserved_mode, shape_of
from trl_opsd.parallel.precision import autocast
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.report.samples import Sample, samples_of
from trl_opsd.teacher.checks import check_tokenizers, teachers_processors
from trl_opsd.teacher.self_teacher import OwnTeacher
from trl_opsd.teacher.teachers import scored
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.loss import TENTHS
from trl_opsd.types.targets import kept_by_row

_SHOWN = 8
"""Rows on the page."""
CONTEXTS = ("none", "shuffled")
"""What teachers read in place of their contexts: the student's prompt, and the context of another row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one candidate, the teachers of a run with what each reads, says of the student's completions."""

    name: str
    loss: float
    """The run's divergence, in nats per token; the next two are KLs over the whole vocabulary."""
    reverse: float
    forward: float
    floor: float
    """KL in nats between two computations of the same teacher: each row alone and together, or two replicas."""
    in_bfloat16: float
    """The same, where it computes in bfloat16."""
    by_tenth: list[float]
    by_entropy: list[float]
    """The run's divergence by quarter of the student's entropy."""
    at_ends: float
    """The mean probability that the teacher gives the student's end tokens, geometric; NaN without any."""
    first_three: float
    """The run's divergence at the first three tokens."""
    teacher_nats: float
    """Mean log-probability of the student's tokens under the teacher."""
    vocabulary: int
    carries: float
    """The share of tokens that carries 80 % of the divergence."""
    below_floor: float
    """The share of tokens whose KL is below the floor."""
    explained: float
    correlation: Mean | None = None
    """Over rows, of the reward with the mean of log(p_T / p_S); `None` without rewards."""
    beyond_control: float | None = None
    """The same with what the control does not explain of that."""
    apart_from: dict[str, float] = field(default_factory=dict)
    """KL of the teacher, as it reads its rows, from itself in another context, by its name."""
    knows: Mean | None = None
    """The teacher's own rewards on the same prompts minus the student's; the next three too `None` if not measured."""
    own: Mean | None = None
    recovers: Mean | None = None
    """Rewards where the teacher goes on after a mistake of the student, minus those where the student does."""
    after: tuple[Mean, Mean] | None = None
    """The two terms of that difference: of the teacher, of the student."""
    clipped: float | None = None
    """Share of the teacher's own completions that did not end."""
    cannot: str = ""
    """Why it was not asked to generate."""
    seconds: float = 0.0
    """Of scoring the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was measured of a run."""

    rows: int
    tokens: int
    objective: str
    student: Mean | None
    """Its rewards; `None` without reward functions."""
    student_clipped: float
    entropy: float
    """Of the student, in nats per token."""
    candidates: list[Measured]
    seconds: dict[str, float]
    """Of completing, scoring and learning from these rows, the last estimated as three forward passes."""
    step_rows: int
    steps: int
    samples: tuple[Sample, ...] = ()
    """The first rows, token by token."""

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step, at most: larger batches cost less per row."""
        return sum(self.seconds.values()) * self.step_rows / self.rows


def audit(trainer: OPSDTrainer, rows: int = 32, candidates: Sequence[str] = ()) -> Audit:
    """Measures a trainer's teachers on completions of its student, which is not changed. In one process.

    Args:
        trainer ([`OPSDTrainer`]):
            With the student, teachers, rewards and rows of a run.
        rows (`int`, *optional*, defaults to 32):
            Rows of the training dataset that are completed.
        candidates (`Sequence[str]`, *optional*):
            Paths of more teachers, each in the place of the only one.

    Raises:
        ValueError: There are too few rows, several processes, or teachers with other tokenizers.
    """
    _check(trainer, rows, candidates)
    with _left_as_it_was(trainer):
        inputs = _chosen(trainer, rows)
        written = episode(trainer, inputs)
        student = Student(trainer, written.rollout)
        measured, tokens, said = _measured(trainer, inputs, written, student, "as configured")
        samples = student.samples(trainer, written.rollout, said)
        found = [measured]
        for path in candidates:
            _take(trainer, path)
            found.append(_measured(trainer, inputs, written, student, path)[0])
    args = trainer.args
    epoch = len(trainer.train_dataset) * args.num_generations if isinstance(trainer.train_dataset, Dataset) else 0
    step_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return Audit(
        rows=len(inputs),
        tokens=len(tokens.row),
        objective=str(trainer.divergence),
        student=None if written.rewards is None else Mean.of(written.rewards),
        student_clipped=written.clipped,
        entropy=float(tokens.entropy.mean()),
        candidates=found,
        seconds={"complete": written.seconds, "teach": measured.seconds, "compare": 3 * student.seconds},
        step_rows=step_rows,
        samples=tuple(samples),
        steps=args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * epoch // step_rows),
    )


# ---- The rows -------------------------------------------------------------------------------------------------------


def _check(trainer: OPSDTrainer, rows: int, candidates: Sequence[str]) -> None:
    if rows < FEW:
        raise ValueError(f"An audit of {rows} rows: expected at least {FEW}, and 32 or more for a verdict.")
    if trainer.train_dataset is None:
        raise ValueError("An audit needs a `train_dataset`, whose prompts the student completes.")
    if trainer.accelerator.num_processes > 1:
        raise ValueError("An audit runs in one process: call it without a launcher.")
    if trainer.cross is not None:
        raise ValueError("`cross_tokenizer`: an audit compares tokens, but these models share none.")
    if candidates and (trainer.teacher is None or trainer.args.teacher_model_kind is not None):
        raise ValueError("Candidates take the place of the only teacher, but there are several, or it is the student.")


def _take(trainer: OPSDTrainer, path: str) -> None:
    """Puts a candidate in the place of the only teacher."""
    models = {"teacher": path}
    check_tokenizers(trainer.processing_class, models, None, trainer.args)
    if trainer.reads_images and teachers_processors(trainer.processor, models, None, trainer.args):
        raise ValueError(f"The candidate {path!r} reads images with another processor: audit it in a run of its own.")
    trainer.teaching.build_teachers(models)


def _chosen(trainer: OPSDTrainer, rows: int) -> list[dict[str, Any]]:
    """Rows of the dataset, the same in each audit of a run."""
    dataset = trainer.train_dataset
    if isinstance(dataset, Dataset):
        order = np.random.default_rng(trainer.args.seed).permutation(len(dataset))
        stream: Iterator[Any] = (dataset[int(number)] for number in order)
    else:
        stream = iter(dataset)
    found = list(islice(stream, rows))
    if len(found) < FEW:
        raise ValueError(f"train_dataset has {len(found)} rows: expected at least {FEW} for an audit.")
    return found


@contextmanager
def _left_as_it_was(trainer: OPSDTrainer) -> Iterator[None]:
    """Restores random state, mode, teachers, logs and options, so that a training after it is as one without."""
    args, teaching, numbers = trainer.args, dict(vars(trainer.teaching)), trainer._metrics["eval"]
    given, log = args.eval_temperature, {name: list(each) for name, each in numbers.items()}
    seen, batches = trainer.state.num_input_tokens_seen, trainer._stats.now.batches
    texts = {name: list(trainer._logs[name]) for name in ("prompt", "completion")}
    args.eval_temperature = None
    with preserved_rng(trainer.accelerator.device), preserved_mode(trainer.model), trainer.rollout.session():
        trainer.model.eval()
        try:
            yield
        finally:
            args.eval_temperature = given
            vars(trainer.teaching).clear()
            vars(trainer.teaching).update(teaching)
            for name, before in texts.items():
                trainer._logs[name].clear()
                trainer._logs[name].extend(before)
            numbers.clear()
            numbers.update(log)
            trainer.state.num_input_tokens_seen, trainer._stats.now.batches = seen, batches


# ---- What is compared -----------------------------------------------------------------------------------------------


class Student:
    """The student's states on its completions."""

    def __init__(self, trainer: OPSDTrainer, rollout: Rollout) -> None:
        reader = OwnTeacher(trainer.model, trainer.in_student, nullcontext, lambda: trainer.batching_to_learn)
        start = perf_counter()
        with autocast(trainer.accelerator):
            self.targets = kept_by_row(scored(reader, rollout), rollout.weights)
        self.seconds = perf_counter() - start

    def beside(self, trainer: OPSDTrainer, rollout: Rollout, targets: TeacherTargets) -> Tokens:
        """Its tokens compared with these targets."""
        teachers = trainer.teachers
        with whole_head(trainer.model) as head, gathered_head(*teachers.heads, teachers.origin_head):
            compared = Compared(self.targets, head, targets, teachers.heads, teachers.origin_head)
            return tokens_of(compared, rollout, trainer.current_objective)

    def samples(self, trainer: OPSDTrainer, rollout: Rollout, targets: TeacherTargets) -> list[Sample]:
        """The first rows with the numbers of each token."""
        teachers, some = trainer.teachers, range(min(_SHOWN, len(rollout.weights)))
        first = TeacherTargets.by_row((self.targets.rows or ())[: len(some)], rollout.weights.size(1))
        with whole_head(trainer.model) as head, gathered_head(*teachers.heads, teachers.origin_head):
            return samples_of(
                *(first.hidden.to(rollout.weights.device), head, teachers.heads, rollout, targets, some),
                objective=trainer.current_objective,
                origin=teachers.origin_head,
                tokenizer=trainer.processing_class,
                placeholders=trainer.placeholders,
                names=list(teachers),
            )


def _measured(
    trainer: OPSDTrainer, inputs: list[dict[str, Any]], written: Episode, student: Student, name: str
) -> tuple[Measured, Tokens, TeacherTargets]:
    """Everything of the trainer's present teachers, and their targets."""
    rollout, rows, teachers = written.rollout, written.rows, trainer.teachers
    names = [row.request.teacher for row in rows]
    start = perf_counter()
    with autocast(trainer.accelerator):
        targets = kept_by_row(trainer.teach(rollout, rows), rollout.weights)
    seconds = perf_counter() - start
    tokens = student.beside(trainer, rollout, targets)
    read = trainer.teaching.prompts.read(rollout, rows)
    floor, in_bfloat16 = _noise(trainer, read, names, targets)
    ends = np.isin(_sampled(rollout), trainer.eos_token_ids)
    found = Measured(
        name=name,
        loss=float(tokens.loss.mean()),
        reverse=float(tokens.reverse.mean()),
        forward=float(tokens.forward.mean()),
        floor=floor,
        in_bfloat16=in_bfloat16,
        by_tenth=tokens.by(tokens.tenth, TENTHS, tokens.loss),
        by_entropy=tokens.by(tokens.quartile, 4, tokens.loss),
        at_ends=float(np.exp(tokens.teacher[ends].mean())) if ends.any() else float("nan"),
        first_three=float(tokens.loss[tokens.place < 3].mean()) if (tokens.place < 3).any() else float("nan"),
        teacher_nats=float(tokens.teacher.mean()),
        vocabulary=trainer.teaching.vocabulary or shape_of(teachers.heads[0])[0],
        carries=tokens.share_for(0.8),
        below_floor=float((tokens.forward <= floor).mean()),
        explained=tokens.explained,
        apart_from=_contexts(trainer, written, targets),
        seconds=seconds,
    )
    if written.rewards is None:
        return replace(found, cannot="there are no rewards"), tokens, targets
    if np.isnan(written.rewards).all():
        return replace(found, cannot="no completion got a reward"), tokens, targets
    both = [
        with_rewards(tokens.of_rows(one, len(rows)), written.rewards) for one in (tokens.advantage, tokens.unexplained)
    ]
    found = replace(found, correlation=both[0], beyond_control=both[1].value)
    try:
        complete = {one: completer(trainer, one) for one in dict.fromkeys(names)}
    except ValueError as error:
        return replace(found, cannot=str(error)), tokens, targets
    return replace(found, **tried(trainer, inputs, written, tokens, complete)), tokens, targets


def _contexts(trainer: OPSDTrainer, written: Episode, targets: TeacherTargets) -> dict[str, float]:
    """How far teachers are from themselves where they read the student's prompt, or the context of the next row."""
    rollout, rows, teaching = written.rollout, written.rows, trainer.teaching
    read = teaching.prompts.read(rollout, rows)
    if all(one is None for one in (read.images or [None])) and read.prompt_lists() == rollout.prompt_lists():
        return {}
    found, names = {}, [row.request.teacher for row in rows]
    own, intake = teaching.prompts.own(rows, rollout.completion_lists()), teaching.readers.intake
    others = zip(rows, [*rows[1:], rows[0]], [*own[1:], own[0]], strict=True)
    for name in CONTEXTS:
        other = rollout
        if name == "shuffled":
            other = teaching.prompts.read(rollout, [_in_context_of(intake, *one) for one in others])
        with suppress(ValueError), autocast(trainer.accelerator):  # a context that does not fit another row
            found[name] = apart(
                targets,
                kept_by_row(trainer.teachers.targets(other, names), rollout.weights),
                trainer.teachers.heads,
                rollout,
                trainer.current_objective,
            )
    return found


def _in_context_of(intake: Any, row: BatchRow, other: BatchRow, prompt: Any) -> BatchRow:
    """The row, whose teacher reads the context of another, or its whole prompt where that is no column."""
    if (column := "privileged_context") in row and column in other:
        return replace(row, request=intake.read({**row, column: other[column]}, row.request.where))
    processor = intake.processors.get(row.request.teacher, intake.processors.get("", ""))
    if prompt.has_images and processor is None:
        raise ValueError("The teacher reads text only, and the other row has images.")
    prompt = replace(prompt, processor=processor) if prompt.has_images else prompt
    return replace(row, request=replace(row.request, of_teacher=prompt))


def _noise(trainer: OPSDTrainer, read: Rollout, names: Sequence[str], targets: TeacherTargets) -> tuple[float, float]:
    """KL between computations of the same targets: of each row alone, or of replicas; and in bfloat16."""
    teachers, objective = trainer.teachers, trainer.current_objective

    def alone() -> TeacherTargets:
        each = [teachers.targets(read.select([row]), [names[row]]) for row in range(len(names))]
        rows = [kept_by_row(one, read.weights[row : row + 1]).rows for row, one in enumerate(each)]
        return TeacherTargets.by_row(
            [row for some in rows for row in some or ()], read.weights.size(1), targets.teacher
        )

    with autocast(trainer.accelerator):
        floor = apart(targets, alone(), teachers.heads, read, objective)
    device = trainer.accelerator.device.type
    with torch.autocast(device, dtype=torch.bfloat16):
        halved = kept_by_row(teachers.targets(read, names), read.weights)
    in_bfloat16 = apart(targets, halved, teachers.heads, read, objective)
    # Servers that tell some tokens have no states to compare, but their own noise.
    return max(0.0, float(np.fmax(floor, np.nan if teachers.noise is None else teachers.noise))), in_bfloat16


def _sampled(rollout: Rollout) -> np.ndarray:
    """[N], the ids of the tokens that count."""
    return rollout.completion_ids.cpu()[rollout.weights.cpu() != 0].numpy()
