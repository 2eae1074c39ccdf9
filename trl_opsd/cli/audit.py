"""`trl-opsd audit`: on a few dozen completions of the student, whether a teacher knows better, and what it teaches.

B rows · C completion tokens · H hidden size · n tokens that count
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from pandas import DataFrame, concat
from torch import Tensor

from trl_opsd._compat.sharding import gathered_head, whole_head
from trl_opsd._compat.versions import replaced
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import build, leave_nothing, read
from trl_opsd.loop.batch import Batch
from trl_opsd.losses import ForwardKL
from trl_opsd.losses.objective import Objective
from trl_opsd.losses.streamed import streamed_entropy
from trl_opsd.methods.rewards import Rewards
from trl_opsd.models.backbone import preserved_mode, shape_of
from trl_opsd.parallel.precision import autocast
from trl_opsd.report.samples import rounded
from trl_opsd.teacher.comparison import tokens_by_teacher
from trl_opsd.teacher.self_teacher import OwnTeacher
from trl_opsd.teacher.teachers import scored
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import LazyLogits, OutputHead, Rollout, RowTargets, TeacherTargets
from trl_opsd.types.rollout import PromptIds
from trl_opsd.types.targets import kept_by_row

Complete = Callable[[list[list[int]]], list[list[int]]]
"""Completes prompts, as token ids."""
FEW = 4
"""Rows below which a mean says nothing."""
_FLOORS = 10
"""Multiple of the noise floor below which a divergence is in part rounding."""
_UNLIKELY = 1e-3
"""Probability of an end token that a teacher would not give where it ends itself."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of some rows."""

    value: float
    error: float
    """Its standard error."""
    rows: int

    @classmethod
    def of(cls, values: np.ndarray) -> Mean:
        known = values[~np.isnan(values)]
        spread = known.std(ddof=1) if len(known) > 1 else np.nan
        return cls(float(known.mean()) if len(known) else np.nan, float(spread / max(len(known), 1) ** 0.5), len(known))

    @property
    def sign(self) -> int:
        """1 or -1 where it is above or below 0 by more than twice its standard error, else 0."""
        return int(np.sign(self.value)) if self.rows >= FEW and abs(self.value) > 2 * self.error else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was measured of a run; nats are per token."""

    rows: int
    tokens: int
    student: Mean | None
    """Its rewards; `None` without reward functions."""
    student_clipped: float
    """Share of its completions that did not end."""
    forward: float
    """The forward KL over the whole vocabulary, whatever the run minimises."""
    floor: float
    """KL in nats between two computations of the same teacher: each row alone and together, or two replicas."""
    context: float | None
    """KL of the teacher from itself where it reads the student's prompt; `None` where it reads nothing else."""
    at_ends: float
    """The mean probability that the teacher gives the student's end tokens, geometric; NaN without any."""
    teacher_nats: float
    """Mean log-probability of the student's tokens under the teacher."""
    vocabulary: int
    own: Mean | None = None
    """The teacher's own rewards on the same prompts; this and what follows are `None` where they were not measured."""
    knows: Mean | None = None
    """Those minus the student's."""
    clipped: float | None = None
    """Share of the teacher's own completions that did not end."""
    recovers: Mean | None = None
    """Rewards where the teacher goes on after a mistake of the student, minus those where the student does."""
    after: tuple[Mean, Mean] | None = None
    """The two terms of that difference: of the teacher, of the student."""
    cannot: str = ""
    """Why the teacher was not asked to generate."""


def audit(trainer: OPSDTrainer, rows: int = 32) -> Audit:
    """Measures a trainer's teachers on completions of its student, which is not changed. In one process.

    Args:
        trainer ([`OPSDTrainer`]):
            With the student, teachers, rewards and rows of a run.
        rows (`int`, *optional*, defaults to 32):
            Rows of the training dataset that are completed.

    Raises:
        ValueError: There are too few rows, several processes, or teachers with other tokenizers.
    """
    if trainer.accelerator.num_processes > 1 or trainer.cross is not None:
        raise ValueError("An audit runs in one process, and compares teachers that have the student's tokenizer.")
    inputs = _rows_of(trainer.train_dataset, rows, trainer.args.seed)
    if len(inputs) < FEW:
        raise ValueError(f"An audit of {len(inputs)} rows of the `train_dataset`: expected at least {FEW}.")
    with (
        replaced(trainer.args, eval_temperature=None),  # evaluations sample as trainings do
        replaced(trainer, log_completions=False),
        preserved_mode(trainer.model),
        trainer.rollout.session(),
    ):
        trainer.model.eval()
        batch, rewards = _completed(trainer, inputs)
        rollout, teachers, objective = batch.rollout, trainer.teachers, trainer.current_objective
        itself = OwnTeacher(trainer.model, trainer.in_student, nullcontext, lambda: trainer.batching_to_learn)
        with autocast(trainer.accelerator):
            hidden_BCH = scored(itself, rollout).hidden.to(rollout.weights.device)
            floor, context = _noise(trainer, batch), _without_context(trainer, batch)
        with whole_head(trainer.model) as head, gathered_head(*teachers.heads, origin := teachers.origin_head):
            tokens = tokens_of(hidden_BCH, head, teachers.heads, rollout, batch.targets, objective, origin)
        ends = tokens[tokens.token.isin(trainer.eos_token_ids)]
        found = Audit(
            rows=len(inputs),
            tokens=len(tokens),
            student=None if rewards is None else Mean.of(rewards),
            student_clipped=_clipped(trainer, rollout),
            forward=tokens.forward.mean(),
            floor=floor,
            context=context,
            at_ends=float(np.exp(ends.teacher.mean())),
            teacher_nats=tokens.teacher.mean(),
            vocabulary=trainer.teaching.vocabulary or shape_of(teachers.heads[0])[0],
        )
        if rewards is None or np.isnan(rewards).all():
            return replace(found, cannot="there are no rewards" if rewards is None else "no completion got a reward")
        return replace(found, **_tried(trainer, inputs, batch, rewards, tokens))


def of_run(arguments: Sequence[str], rows: int) -> Audit:
    """The audit of the run that these arguments of `trl-opsd train` describe."""
    with TemporaryDirectory(prefix="trl_opsd-audit-") as nowhere:
        given, task = read(arguments, OptionParser(prog="trl-opsd audit"))
        leave_nothing(given.config, nowhere)
        trainer = build(given, task)
        found = audit(trainer, rows)
        trainer.rollout.close()
    return found


# ---- Completions -----------------------------------------------------------------------------------------------------


def _rows_of(dataset: Any, rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of the dataset, the same in each audit of a run."""
    if isinstance(dataset, Dataset):
        return [dataset[int(row)] for row in np.random.default_rng(seed).permutation(len(dataset))[:rows]]
    return list(islice(dataset or (), rows))


def _completed(trainer: OPSDTrainer, inputs: list[dict[str, Any]]) -> tuple[Batch, np.ndarray | None]:
    """The rows as an evaluation of their own completes and scores them, and their rewards, NaN for one without any.

    Environments are reset with the same seeds in each, so that a row is the same task whoever completes it.
    """
    rewards = trainer.methods.get(Rewards)
    with trainer.evaluating("audit"):
        batch = trainer.score(inputs)
        return batch, rewards.of_evaluation().numpy() if rewards is not None and rewards.given else None


def _clipped(trainer: OPSDTrainer, rollout: Rollout) -> float:
    ends = {*trainer.eos_token_ids}
    return float(np.mean([not ids or ids[-1] not in ends for ids in rollout.completion_lists()]))


def _prompts(rollout: Rollout) -> list[list[int]]:
    """The prompts, with their images."""
    images = rollout.images or [None] * len(rollout.weights)
    return [PromptIds(ids, seen) for ids, seen in zip(rollout.prompt_lists(), images, strict=True)]


def _tried(
    trainer: OPSDTrainer, inputs: list[dict[str, Any]], batch: Batch, rewards: np.ndarray, tokens: DataFrame
) -> dict[str, Any]:
    """What teachers make of the same prompts, and of the places where the student's mistakes have led it."""
    rollout, names = batch.rollout, [row.request.teacher for row in batch.rows]
    try:
        writers = {one: trainer.teacher_rollout(one).complete for one in dict.fromkeys(names)}
    except ValueError as error:
        return {"cannot": str(error)}
    mine, theirs = _prompts(rollout), _prompts(trainer.teaching.prompts.read(rollout, batch.rows))
    of_teacher: tuple[list[list[int]], list[Complete]] = theirs, [writers[one] for one in names]
    of_student: tuple[list[list[int]], list[Complete]] = mine, [trainer.complete] * len(names)
    ends, most = trainer.eos_token_ids, trainer.limits.completion

    def after(begun: Sequence[list[int]], by: tuple[list[list[int]], list[Complete]]) -> tuple[Batch, np.ndarray]:
        with trainer.generating_with(Replay(mine, begun, *by, ends, most)):
            done, their_rewards = _completed(trainer, inputs)
        assert their_rewards is not None, "there are reward functions"
        return done, their_rewards

    start, own = after([[]] * len(mine), of_teacher)
    found: dict[str, Any] = {
        "own": Mean.of(own),
        "knows": Mean.of(own - rewards),
        "clipped": _clipped(trainer, start.rollout),
    }
    # After the sampled token that the teacher likes least against the student, which is the mistake: where both differ
    # most the token may be right, and so what follows. In rows that are worse than others, where something is left.
    cuts = {}
    for row, ids in enumerate(rollout.completion_lists()):
        its = tokens[tokens.row == row]
        if len(its) and rewards[row] < max(np.nanmax(own), np.nanmax(rewards)):
            end = int(its.place[(its.teacher - its.student).idxmin()]) + 1
            if end < len(ids) - 1 or (end < len(ids) and ids[end] not in ends):
                cuts[row] = ids[:end]
    if len(cuts) >= FEW:
        # All rows, so that environments get the same seeds; the others end at once.
        begun, some = [cuts.get(row, ends[:1]) for row in range(len(mine))], list(cuts)
        (_, their_rewards), (_, my_rewards) = after(begun, of_teacher), after(begun, of_student)
        found["recovers"] = Mean.of(their_rewards[some] - my_rewards[some])
        found["after"] = Mean.of(their_rewards[some]), Mean.of(my_rewards[some])
    return found


# ---- Rows that begin as they were recorded -------------------------------------------------------------------------


class Replay:
    """Generates in place of the student: each row begins as recorded, and its writer goes on.

    A turn that was recorded whole is returned as it is, so that tools and environments are called as they were then;
    where a record ends within a turn, or another state was reached, the turn is written from there.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],  # of the student
        recorded: Sequence[list[int]],  # with which each completion begins
        read: Sequence[list[int]],  # in place of the student's prompt, by whoever goes on with the row
        writers: Sequence[Complete],
        ends: Collection[int],
        most: int,  # tokens of a completion
    ) -> None:
        self._so_far: list[list[int]] = [[] for _ in prompts]
        """Of each row, what was returned, and what tools answered before that."""
        self._prompts, self._recorded, self._read = prompts, recorded, read
        self._writers, self._ends, self._most = writers, ends, most

    def complete(self, contexts: list[list[int]]) -> list[list[int]]:
        """A turn for each context: the prompts of all rows first, then those of some with the turns so far."""
        rows = self._rows_of(contexts)
        so_far = {row: list(ids[len(self._prompts[row]) :]) for row, ids in zip(rows, contexts, strict=True)}
        turns = {row: self._told(row, so_far[row]) for row in rows}
        unfinished = [row for row in rows if not turns[row] or turns[row][-1] not in self._ends]
        for writer in dict.fromkeys(self._writers[row] for row in unfinished):
            theirs = [row for row in unfinished if self._writers[row] == writer]
            written = writer([self._read[row] + so_far[row] + turns[row] for row in theirs])
            turns.update({row: turns[row] + ids for row, ids in zip(theirs, written, strict=True)})
        for row in rows:
            turns[row] = turns[row][: max(1, self._most - len(so_far[row]))]
            self._so_far[row] = so_far[row] + turns[row]
        return [turns[row] for row in rows]

    def _rows_of(self, contexts: Sequence[list[int]]) -> list[int]:
        """The row of each context: that of its place, or the one that has come so far."""
        if [*map(list, contexts)] == [*map(list, self._prompts)]:
            return list(range(len(contexts)))
        begun = [list(prompt) + so_far for prompt, so_far in zip(self._prompts, self._so_far, strict=True)]
        left = sorted(range(len(begun)), key=lambda row: -len(begun[row]))  # one may be the beginning of another
        found = []
        for context in contexts:
            found.append(next(row for row in left if list(context[: len(begun[row])]) == begun[row]))
            left.remove(found[-1])
        return found

    def _told(self, row: int, so_far: list[int]) -> list[int]:
        """What is recorded of the turn that follows; nothing where the row has come to another state."""
        recorded = self._recorded[row]
        told = recorded[len(so_far) :] if recorded[: len(so_far)] == so_far else []
        end = next((place for place, token in enumerate(told) if token in self._ends), len(told) - 1)
        return told[: end + 1]


# ---- Tokens ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def tokens_of(
    hidden_BCH: Tensor,
    head: OutputHead,
    heads: Sequence[OutputHead],
    rollout: Rollout,
    targets: TeacherTargets,
    objective: Objective,
    origin: OutputHead | None = None,
) -> DataFrame:
    """A line for every token that counts, in nats: the `forward` KL over the whole vocabulary, and both models'
    log-probabilities of the sampled `token`.
    """
    parts, device = [], head.weight.device
    for share in tokens_by_teacher(heads, targets, rollout.weights, origin=origin):
        its, how = heads[share.teacher], (objective.chunk_tokens, objective.vocabulary)
        mine, theirs = (share.of_student(hidden_BCH, device), head), (share.of_teacher(device), its)
        ids_n = share.of_tokens(rollout, device).ids
        row_n, place_n = share.places_N // rollout.weights.size(1), share.places_N % rollout.weights.size(1)
        of_teacher_n = -streamed_entropy(LazyLogits(*theirs, objective.temperatures[1]), *how, ids_n)
        of_student_n = -streamed_entropy(LazyLogits(*mine, objective.temperatures[0]), *how, ids_n)
        nats = {"forward": _kl(objective, mine, theirs), "student": of_student_n, "teacher": of_teacher_n}
        index = {"row": row_n, "place": place_n, "token": ids_n}
        numbers = {name: one.cpu().double() for name, one in nats.items()}
        parts.append(DataFrame({name: one.cpu() for name, one in index.items()} | numbers))
    return concat(parts, ignore_index=True)


def _kl(of: Objective, student: tuple[Tensor, OutputHead], teacher: tuple[Tensor, OutputHead]) -> Tensor:
    return replace(of, divergence=ForwardKL(), kl_clip=None).of(student, teacher, None, None).divergence


@torch.no_grad()
def _apart(trainer: OPSDTrainer, rollout: Rollout, one: TeacherTargets, other: TeacherTargets) -> float:
    """The mean KL of a computation of the teachers from another; NaN where only some tokens are known."""
    nats, objective, teachers = [], trainer.current_objective, trainer.teachers
    objective = replace(objective, temperatures=(objective.temperatures[1],) * 2)
    if not teachers.are_whole:
        return float("nan")
    with gathered_head(*teachers.heads):
        both = (tokens_by_teacher(teachers.heads, each, rollout.weights) for each in (one, other))
        for first, second in zip(*both, strict=True):
            head = teachers.heads[first.teacher]
            read = [(each.of_teacher(head.weight.device), head) for each in (second, first)]
            nats.append(_kl(objective, *read))
    return float(torch.cat(nats).mean())


def _without_context(trainer: OPSDTrainer, batch: Batch) -> float | None:
    """KL of the teachers from themselves where they read the student's prompt, if they read something else."""
    rollout, read = batch.rollout, trainer.teaching.prompts.read(batch.rollout, batch.rows)
    if read.prompt_lists() == rollout.prompt_lists() and not any(read.images or ()):
        return None
    other = trainer.teachers.targets(rollout, [row.request.teacher for row in batch.rows])
    return _apart(trainer, rollout, batch.targets, kept_by_row(other, rollout.weights))


def _noise(trainer: OPSDTrainer, batch: Batch) -> float:
    """KL between two computations of the same targets: of all rows together and each alone, or of replicas."""
    read, teachers = trainer.teaching.prompts.read(batch.rollout, batch.rows), trainer.teachers
    known: list[RowTargets] = []
    for row, of_row in enumerate(batch.rows):
        alone = read.select([row])
        known += kept_by_row(teachers.targets(alone, [of_row.request.teacher]), alone.weights).rows or ()
    again = TeacherTargets.by_row(known, read.weights.size(1), batch.targets.teacher)
    # Servers that tell some tokens have no states to compare, but their own noise.
    return max(0.0, float(np.fmax(_apart(trainer, read, batch.targets, again), teachers.noise or np.nan)))


# ---- What it concludes ---------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Whether to train with a teacher, why, and what to do."""

    word: str
    """`"helps"`, `"off-policy"`, `"harms"`, `"no better"`, `"nothing"`, `"broken"`, or `"unknown"`."""
    why: str
    remedy: str


def verdict(of: Audit) -> Verdict:
    """The verdict on the teacher of an audit."""
    knows, recovers = of.knows is not None and of.knows.sign > 0, of.recovers
    never_ends = of.clipped is None or (of.clipped > 0.9 and of.student_clipped < 0.5)
    if of.at_ends < _UNLIKELY and never_ends:
        return Verdict(
            "broken",
            f"The teacher gives the student's end token a probability of {of.at_ends:.1g} where the student ends.",
            "Give both the same end token: `generation_kwargs={'eos_token_id': ...}`, or another template.",
        )
    if of.teacher_nats < -math.log(of.vocabulary) and not knows:
        return Verdict(
            "broken",
            f"The student's tokens are less likely to the teacher ({of.teacher_nats:.2g} nats) than if it guessed.",
            "Its tokenizer is probably another one (`teacher_processing_class`, docs/tokenizers.md), or it is not "
            "trained.",
        )
    if of.forward < max(_FLOORS * of.floor, 1e-6):
        return Verdict(
            "nothing",
            f"Both models say the same: {of.forward:.2g} nats apart, of which {of.floor:.1g} are noise.",
            "Give the teacher a context that the student does not have, or take another teacher.",
        )
    if of.context is not None and of.context < _FLOORS * max(of.floor, 1e-7):
        return Verdict(
            "nothing",
            f"The teacher's context changes nothing of what it says ({of.context:.1g} nats).",
            "Look at the template (`teacher_prompt_template`) and at what `privileged_context` says.",
        )
    if of.own is None or of.knows is None:
        return Verdict(
            "unknown",
            f"They differ by {of.forward:.2g} nats; whether the teacher is better was not measured: {of.cannot}.",
            "Pass `Rewards` of what you want, and a teacher that can generate (`teacher_offload='none'` or 'cpu').",
        )
    rewards = f"(reward {of.own.value:.2f}, {of.knows.value:+.2f} ± {of.knows.error:.2f})"
    if knows and (recovers is None or of.after is None):
        why = "there was too little after the student's mistakes to see whether it recovers"
        return Verdict("helps", f"It knows {rewards}; {why}.", "Train on-policy.")
    if knows and recovers is not None and of.after is not None:
        after = f"the student's mistakes ({of.after[0].value:.2f}; the student {of.after[1].value:.2f})"
        if recovers.sign > 0:
            return Verdict("helps", f"It knows {rewards}, and goes on well from {after}.", "Train on-policy.")
        return Verdict(
            "off-policy",
            f"It knows {rewards}, but does not recover from {after}: its completions should teach as much for less.",
            "Learn from its own completions: `seq_kd=True` with `lmbda=0`, or supervised; or find a teacher that "
            "recovers.",
        )
    if of.knows.sign < 0:
        return Verdict(
            "harms",
            f"The teacher's own completions are worse than the student's {rewards}, and training moves the student to "
            "them.",
            "Do not train with it: take another teacher or context, or look at the template that it was trained with "
            "(`teacher_chat_template_kwargs`, `teacher_prompt_template`).",
        )
    return Verdict(
        "no better",
        f"The teacher's own completions are no better than the student's {rewards}.",
        "Take another teacher or another context, or more rows if the error is large.",
    )


# ---- What is printed -----------------------------------------------------------------------------------------------


def document(one: Audit) -> dict[str, Any]:
    """What was measured, by the name of its field, and the verdict; `None` where a number is not known."""
    return dict(rounded({**asdict(one), "verdict": verdict(one)._asdict()}))
