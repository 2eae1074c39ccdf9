"""Counts the rows of an optimizer step or an evaluation and times its phases; all is reduced over processes once.

R rows of a generation batch, over all processes · B rows of a micro-batch · G prompts · n completions of each ·
C tokens of the longest completion
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from transformers.trainer_utils import PredictionOutput

from trl_opsd._compat.versions import replaced
from trl_opsd.methods.base import Part
from trl_opsd.methods.collapse import is_repetition
from trl_opsd.methods.rows import BatchRow, Written
from trl_opsd.methods.targets import Anchor
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.types import LossParts, Rollout
from trl_opsd.types.loss import OF_AUTHORS, columns
from trl_opsd.types.metrics import Metric

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

NO_TOKEN = -100
"""Padding of predictions, as everywhere in transformers."""
_OF_STUDENT = ("tokens_student", "divergence_student")
"""Statistics that are those of all tokens where the student wrote all."""
_BY_TEACHER = ("weight", "divergence", "student_entropy", "teacher_entropy", "tokens")
"""Statistics that are also kept by teacher, where there are several."""


# ---- Time and sums ------------------------------------------------------------------------------------------------


class PhaseClock:
    """Accumulates seconds per named phase, excluding phases nested inside it.

    `watches` give contexts for each phase, and `explain` adds to an error of one. Nothing waits for a device, so work
    that is still queued counts for the phase in which the host waits for it: generating and teaching end with reads of
    their results. A `now` that synchronizes makes it exact; `time.process_time` counts processor time.
    """

    def __init__(
        self,
        *watches: Callable[[str], AbstractContextManager[Any]],
        explain: Callable[[Exception, str], None] = lambda error, phase: None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._watches, self._explain, self._now = watches, explain, now
        self._inside: list[float] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        self._inside.append(0.0)
        try:
            with ExitStack() as watched:
                for watch in self._watches:
                    watched.enter_context(watch(phase))
                yield
        except Exception as error:
            self._explain(error, phase)
            raise
        finally:
            inside = self._inside.pop()
            elapsed = self._now() - start
            self.seconds[phase] += elapsed - inside
            if self._inside:
                self._inside[-1] += elapsed


class _Accounts:
    """Sums over the tokens of all processes, by the names in [`~types.LossParts`], and the seconds of each phase."""

    def __init__(self, clock: PhaseClock, known: Mapping[str, Metric]) -> None:
        self.clock, self._known = clock, known
        self.totals: Counter[str] = Counter()
        self.batches = 0
        """Number of generation batches."""

    def clear(self) -> None:
        self.totals.clear()
        self.batches = 0
        self.clock.seconds.clear()

    def metrics(self, per_batch: bool) -> dict[str, float]:
        """Means over tokens and seconds of each phase, by their names in the log; empty if the weights sum to 0."""
        seconds = self.clock.seconds
        if not self.totals["weight"]:
            return {}
        # Training logs the mean of generation batches, and an evaluation the sum.
        batches = max(self.batches, 1) if per_batch else 1
        totals = Counter({**self.totals, "batches": batches})
        teachers = [name.removeprefix("weight/") for name in totals if name.startswith("weight/")]
        means = {}
        for name, metric in self._known.items():
            for teacher in teachers if "<name>" in name else [""]:
                of, _, by = metric.mean_of.replace("<name>", teacher).partition(" / ")
                if (
                    of in totals
                    and totals[by]
                    and not (of in _OF_STUDENT and totals["tokens_student"] == totals["tokens"])
                ):
                    means[name.replace("<name>", teacher)] = totals[of] / totals[by]
        return {
            **means,
            **{f"time/{phase}": spent / batches for phase, spent in seconds.items()},
            # Tokens of all processes by the seconds of this one, which waits for the others in each phase.
            "tokens_per_second": totals["tokens"] / max(sum(seconds.values()) - seconds.get("save", 0.0), 1e-9),
        }


# ---- Rows ---------------------------------------------------------------------------------------------------------


@final
class StepStats:
    """Statistics of a training since its last log, and of evaluations, which it makes repeatable.

    An evaluation's loss is a mean over tokens, and all of its metrics are named by dataset.
    """

    def __init__(self, trainer: OPSDTrainer, clock: Callable[[], PhaseClock]) -> None:
        self._trainer = trainer
        self._accounts = {mode: _Accounts(clock(), trainer.known_metrics) for mode in ("train", "eval")}
        self._waiting: list[Part] = []
        """Micro-batches that are not reduced yet."""
        self._step: tuple[Counter[str], list[np.ndarray | None]] = Counter(), []
        """Sums over the step, and what methods have tallied of it."""
        self._completed: list[dict[str, Tensor]] | None = None
        """What is counted of the completions of each batch of the evaluation in progress."""
        self.completions: Tensor | None = None
        """[B, C], the completions of an evaluation's last batch, padded with -100."""

    @property
    def now(self) -> _Accounts:
        """Sums and seconds of the training, or of the evaluation, by the mode of the model."""
        return self._accounts["train" if self._trainer.model.training else "eval"]

    def phase(self, name: str, mode: str | None = None) -> AbstractContextManager[None]:
        """Times a phase; of a training (`"train"`), an evaluation (`"eval"`), or as the model is."""
        return (self.now if mode is None else self._accounts[mode]).clock(name)

    def clear(self) -> None:
        """Drops what an interrupted training left."""
        self._accounts["train"].clear()
        self._waiting = []

    def means(self) -> dict[str, float]:
        """Means over tokens of the training since its last log, and seconds of each phase; empty without tokens."""
        if found := self._accounts["train"].metrics(per_batch=True):
            self._accounts["train"].clear()
        return found

    def by_teacher(self, rows: Tensor, teacher: Tensor | None) -> Tensor:
        """The statistics of rows, [B, columns], and again by teacher; does not wait for the device."""
        number = len(self._trainer.teaching.names)
        if not number:
            return rows
        # `teacher` is in host memory: the comparison runs there, and its result is copied without waiting.
        is_its_BT = torch.zeros(len(rows), number) if teacher is None else teacher[:, None] == torch.arange(number)
        is_its_B1T = is_its_BT[:, None].to(rows.device, rows.dtype, non_blocking=True)
        return torch.cat([rows, (columns(rows, *_BY_TEACHER)[..., None] * is_its_B1T).flatten(1)], dim=1)

    def add(self, part: Part) -> None:
        """Adds a micro-batch of the step; its `sums` are those of `by_teacher`."""
        self._waiting.append(part)

    def reduced(self) -> list[dict[str, float]]:
        """Of each micro-batch that was added since, sums over its rows in all processes by name, without those of
        options that are off. Waits for the device; collective.
        """
        waiting, self._waiting = self._waiting, []
        # Processes that share rows count parts of them.
        tallied = [] if self._trainer.row_group is not None else [self._trainer.methods.tally(one) for one in waiting]
        tallied_of = [None if each[0] is None else torch.stack(each).sum(0) for each in zip(*tallied, strict=True)]
        # One reduction of everything that is known by now, before the backward pass that the step follows.
        known = torch.stack([one.sums.sum(0) for one in waiting])
        more = [one.to(known).flatten() for one in tallied_of if one is not None]
        found = self._trainer.accelerator.reduce(torch.cat([known.flatten(), *more]), "sum")
        values = iter(found.tolist())  # the one wait of a step
        sums = [self._named(one.rollout, list(islice(values, len(one.sums[0])))) for one in waiting]
        tallies = [
            None if one is None else np.array(list(islice(values, one.numel())), dtype=np.float32).reshape(one.shape)
            for one in tallied_of
        ]
        totals: Counter[str] = Counter()
        for named in sums:
            totals.update(named)  # a sum of counters would drop what is below 0
        self._step = totals, tallies
        return sums

    def evaluated(self, rollout: Rollout, distinct: Tensor) -> dict[str, float]:
        """As [`reduced`], of a batch of an evaluation, by its `distinct` rows. Waits for the device."""
        self.completions = rollout.completion_ids.masked_fill(rollout.completion_mask == 0, NO_TOKEN)
        return self._named(rollout, distinct.sum(0).tolist())

    def _named(self, rollout: Rollout, sums: Sequence[float]) -> dict[str, float]:
        teachers = self._trainer.teaching.names
        of_teachers = [f"{name}/{teacher}" for name in _BY_TEACHER for teacher in teachers]
        named = dict(zip((*LossParts.ROW_NAMES, *of_teachers), sums, strict=True))
        weighs = self._trainer.learns_from_draws and rollout.logprobs is not None
        are_whole, cross = self._trainer.teaching.teachers.are_whole, self._trainer.cross
        # The sums of an option that is off are 0, which would be logged as if measured.
        is_on = {
            "clipped": self._trainer.args.kl_clip is not None,
            "nll": rollout.nll_weight is not None,
            "anchored": self._trainer.methods.get(Anchor) is not None,
            "importance": weighs,
            "gated": weighs and getattr(self._trainer.divergence, "clip_min", None) is not None,
            # 0 at each token is what a divergence that does not tell leaves.
            "accepted": are_whole and named["accepted"] > 0,
            "outcomes": cross is not None,
            **{tokens: named[tokens] > 0 for *_, tokens in OF_AUTHORS},
            **dict.fromkeys(("same_first", "teacher_first", "ranked"), are_whole and cross is None),
        }
        return {name: one for name, one in named.items() if is_on.get(name, True)}

    # ---- What a step logs besides means over tokens -------------------------------------------------------------

    def completed(self, rows: Sequence[BatchRow], written: Written) -> dict[str, Tensor]:
        """What is counted of each completion of a generation batch, [R] each. Collective."""
        trainer, table = self._trainer, list[dict[str, int]]()
        ends = {*trainer.eos_token_ids, trainer.processing_class.pad_token_id}
        assert written.authors is not None, "it is of whole rows"
        teachers = trainer.teaching.names
        by_student = [row.by_student for row in rows]
        turns = (trainer.turns and trainer.turns.counts) or [(1, 0, 0)] * len(rows)
        for number, (row, prompt) in enumerate(zip(rows, written.prompt_ids, strict=True)):
            # An empty completion counts as one token, of padding; what the student went on with is not its own.
            start = len(row.given.ids) if by_student[number] else 0
            ids, authors = written.completions[number][start:], written.authors[number][start:]
            is_generated = bool(ids) and (trainer.args.seq_kd or by_student[number])
            ids = ids or [trainer.processing_class.pad_token_id]
            length = max(sum(map(bool, authors)), 1)
            of_row = {
                "prompt": len(prompt) + start,
                "length": length,
                "generated": length * is_generated,
                "ids": len(ids),
            }
            of_row |= {"ended": ids[-1] in ends, "repeats": is_repetition(ids), "by_student": by_student[number]}
            of_row |= {"asked": row.prompt_weight > 0}
            of_row |= {"teacher": teachers.index(row.request.teacher) if teachers else 0}
            of_row |= dict(zip(("turns", "calls", "failures"), turns[number], strict=True))
            table.append(of_row)
        values = torch.tensor([[*of_row.values()] for of_row in table], device=trainer.accelerator.device)
        return dict(zip(table[0], trainer.gather_distinct_rows(values).cpu().T, strict=True))

    def of_completions(self, of: dict[str, Tensor]) -> dict[str, float]:
        """The metrics of a batch's completions, by their names in the log; of an evaluation, its end has them."""
        if self._completed is None or self._trainer.model.training:
            return self._completion_metrics(of)
        self._completed.append(of)
        return {}

    def _completion_metrics(self, of: Mapping[str, Tensor]) -> dict[str, float]:
        """TRL's metrics of completions and ours, by their names in the log; NaN where there are no rows."""
        lengths_R, is_ended_R, by_student_R = of["length"].float(), of["ended"] > 0, of["by_student"] > 0
        found = {"completions/clipped_ratio": _mean(~is_ended_R)}
        for kind, each in {"": lengths_R, "terminated_": lengths_R[is_ended_R]}.items():
            known = each if len(each) else torch.full((1,), 0.0 if len(lengths_R) else torch.nan)  # as TRL does
            for name, value in {"mean": known.mean(), "min": known.min(), "max": known.max()}.items():
                found[f"completions/{name}_{kind}length"] = float(value)
        for number, teacher in enumerate(self._trainer.teaching.names):
            if len(its := lengths_R[of["teacher"] == number]):
                found[f"completions/mean_length/teacher/{teacher}"] = float(its.mean())
        if by_student_R.any():
            found["completions/repeated_ratio"] = _mean(of["repeats"][by_student_R])
        if self._trainer.tools:
            calls = int(of["calls"].sum())
            found["turns/mean"] = _mean(of["turns"][by_student_R])
            found["tools/call_frequency"] = _mean(of["calls"][by_student_R])
            found["tools/failure_frequency"] = float(of["failures"].sum() / calls) if calls else 0.0
        return found

    def end_step(self) -> None:
        """Tells methods of the step, whose loss is finite."""
        self._trainer.methods.stepped(*self._step)

    # ---- Evaluations --------------------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self, prefix: str, recorded: dict[str, list[float]]) -> Iterator[dict[str, float]]:
        """Evaluates with a fixed seed, and leaves training's random state untouched; fills the metrics at its end.

        `recorded` are TRL's numbers of the evaluation, and those of `record`.
        """
        args, accounts, metrics = self._trainer.args, self._accounts["eval"], dict[str, float]()
        recorded.clear()  # left by an interrupted evaluation, as are the accounts
        accounts.clear()
        batches = list[dict[str, Tensor]]()
        with preserved_rng(self._trainer.accelerator.device), replaced(self, _completed=batches):
            # The same samples in each evaluation, other ones per process.
            set_seed(args.seed, device_specific=True)
            yield metrics
        of = {name: torch.cat([one[name] for one in batches]) for name in (batches or [{}])[0]}
        self._trainer.methods.evaluated(accounts.totals)
        weight = accounts.totals["weight"]
        found = {
            **accounts.metrics(per_batch=False),
            **of_all_processes(recorded, weighted=True),
            **(self._completion_metrics(of) if of else {}),
            "loss": accounts.totals["divergence"] / weight if weight else math.nan,
        }
        # TRL would add them when it logs, under "eval_" for every dataset, and never for `predict`.
        metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        recorded.clear()

    def with_best(self, found: dict[str, float]) -> dict[str, float]:
        """The metrics, with NaN for a `metric_for_best_model` that an earlier one had, and this evaluation has not.

        NaN is never the best, and is not logged; transformers ends a training that lacks the metric.
        """
        best = f"eval_{(self._trainer.args.metric_for_best_model or '').removeprefix('eval_')}"
        if any(best in log for log in self._trainer.state.log_history):
            found.setdefault(best, math.nan)
        return found


@final
class Predictions(PredictionOutput):
    """What transformers' `predict` returns, three values, and the completions as text.

    Attributes:
        texts (`list[str]`): without special tokens, in the order of the rows; empty where there are no `predictions`.
    """

    texts: list[str]

    @classmethod
    def of(cls, output: PredictionOutput, decode: Callable[..., list[str]]) -> Predictions:
        """The same values, with token ids as text."""
        self = cls(*output)
        ids = [row[row != NO_TOKEN] for row in (() if output.predictions is None else output.predictions)]
        self.texts = decode(ids, skip_special_tokens=True) if ids else []
        return self


def of_all_processes(recorded: Mapping[str, Sequence[float]], weighted: bool) -> dict[str, float]:
    """The mean of each recorded number over all processes, without NaN as in TRL's log; `weighted` by its count.

    Collective: a name may be known in some of the processes only.
    """
    sums = {}
    for name, values in recorded.items():
        known = [one for one in values if not math.isnan(one)]
        counts = [getattr(one, "count", 1.0) for one in known]  # TRL's have none; 0 where there were no tokens
        products = [one * count for one, count in zip(known, counts, strict=True)]
        sums[name] = sum(products), sum(counts), sum(known), len(known)
    found = {}
    everyone = gather_object([sums])
    for name in dict.fromkeys(chain.from_iterable(everyone)):
        product, count, total, number = map(sum, zip(*(one[name] for one in everyone if name in one), strict=True))
        if number:
            found[name] = product / count if weighted and count else total / number
    return found


def _mean(values_R: Tensor) -> float:
    return float(values_R.float().mean())
