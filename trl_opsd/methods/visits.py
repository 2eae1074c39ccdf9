"""The last visit of each prompt, which decides before generation whether to skip the prompt, or its weight.

R rows of a generation batch, over all processes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import astuple, dataclass, replace
from hashlib import sha256
from numbers import Real
from typing import Annotated, Any, ClassVar, final

from accelerate.utils import gather_object
from numpy import ndarray
from torch import Tensor

from trl_opsd._compat.sharding import launched
from trl_opsd.data.datasets import comparable
from trl_opsd.data.outcomes import Visit
from trl_opsd.methods.base import Generated, Method, Part
from trl_opsd.methods.groups import by_place
from trl_opsd.methods.rows import BatchRow
from trl_opsd.monitor.metrics import STEPS, Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import (
    Rule,
    Stage,
    compared_in_groups,
    of_student,
    prompts_of_step,
    together,
    undivided,
    with_functions,
)
from trl_opsd.options.table import LARGEST_WEIGHT, SET, Need, Option, Values, above, one_of, shown

_SKIPPED = Values(
    "'flat_groups', or a finite number above 0", lambda value: value == "flat_groups" or above(0).fits(value)
)
_NO_WEIGHT_FN = Need("`prompt_weight_fn` decides", lambda now: now.prompt_weight_fn is None)
_VISITS = "`skip_prompts`, or a `prompt_weight_fn`"


@with_help
@dataclass
class VisitOptions:
    skip_prompts: Annotated[
        float | str | None,
        Option(_SKIPPED | None, (_NO_WEIGHT_FN,), resumed=True, words="prompts skipped by their last visit ({})"),
    ] = None
    """In training, which prompts to skip when they come up again (GRESO, arXiv 2506.02177): `"flat_groups"`, those
    whose completions all had the same reward; a number, those whose divergence (a mean weighted as the loss) was below
    it, in nats per token. The trainer samples a skipped prompt again at its next visit. When `None`, none."""


def _comes_once(now: Any) -> bool:
    """Whether no prompt of a dataset comes twice in a training."""
    if not isinstance(now.train_dataset, Sized):
        return False
    return 0 < now.max_steps * prompts_of_step(now.args) <= len(now.train_dataset) or (
        now.max_steps <= 0 and now.num_train_epochs <= 1
    )


@final
class Visits(Method):
    """Last visits of the prompts of a training, the same in all processes; a resumed training goes on with them.

    A prompt is known by the columns of its row: rows that are alike are one prompt.
    """

    name = "visits"
    skips = True
    rules = (
        undivided(lambda args: args.skip_prompts is not None and shown("skip_prompts", args.skip_prompts)),
        with_functions("skip_prompts", one_of("flat_groups")),
        compared_in_groups("skip_prompts", one_of("flat_groups")),
        of_student("skip_prompts", one_of("flat_groups")),
        together(
            ": which prompts are skipped is known when the step before has ended: remove one of them.",
            skip_prompts=SET,
            overlap=SET,
        ),
        together(
            ": a step that skips prompts may have one alone: remove one of them.",
            skip_prompts=SET,
            teacher_control="shuffled",
        ),
        Rule(
            lambda now: (
                now.prompt_weight_fn is not None
                and (
                    (now.overlap is not None and shown("overlap", now.overlap))
                    or (now.teacher_control == "shuffled" and shown("teacher_control", now.teacher_control))
                    or (launched(now.args).sp_enabled and "`sp_size`")
                )
            ),
            "`prompt_weight_fn` with {1}, which needs completions of every prompt: remove one of them.",
            at=Stage.ARGUMENTS,
        ),
        Rule(
            lambda now: now.skip_prompts is not None and now.prompt_weight_fn is None and _comes_once(now),
            "`skip_prompts={0.skip_prompts!r}` skips prompts that come again, but in this training none does: train "
            "for more than an epoch, or remove the option.",
            warns=True,
            at=Stage.SURPRISES,
        ),
    )
    metrics: ClassVar = {
        "prompts/skipped": Metric("1", "Share of prompts that were skipped.", Logs(STEPS, _VISITS, evaluated=False)),
        "prompts/tokens_saved": Metric(
            "tokens",
            "Tokens that the completions of skipped prompts had at their last visits.",
            Logs(STEPS, _VISITS, evaluated=False),
        ),
        "prompts/tokens_saved_total": Metric(
            "tokens",
            "Sum of `prompts/tokens_saved`.",
            Logs("all processes; total since the run began", _VISITS, evaluated=False),
        ),
    }

    def __init__(self, weight_fn: Callable[..., Any] | None, needs_rewards: bool) -> None:
        self._weight_fn, self.needs_rewards = weight_fn, needs_rewards
        self.begin()

    @classmethod
    def of(cls, now: Any) -> Visits | None:
        function, kind = now.prompt_weight_fn, now.skip_prompts
        is_off = function is None and kind is None
        return None if is_off else cls(function, function is not None or kind == "flat_groups")

    def begin(self) -> None:
        self._last: dict[str, Visit] = {}
        self.tokens_saved = 0
        """Tokens that the completions of skipped prompts had at their last visits, since the run began."""
        self._keys: list[str] = []
        self._are_asked: list[bool] = []
        self._tokens: list[int] = []
        self._rewards: Sequence[float | None] = ()

    def before(self, rows: Sequence[BatchRow]) -> None:
        # The rows of a prompt are adjacent, and may be in several processes: the one with the first of them decides.
        first, number = self.host.accelerator.process_index * len(rows), self.host.args.num_generations
        firsts = [row for place, row in enumerate(rows, first) if place % number == 0]
        prompts = gather_object([(key := _key(row), self._weight(row, key)) for row in firsts])
        self._keys = [key for key, _ in prompts]
        for place, row in enumerate(rows, first):
            row.prompt_weight *= prompts[place // number][1]

    def _weight(self, row: BatchRow, key: str) -> float:
        last, kind = self._last.get(key), self.host.args.skip_prompts
        if self._weight_fn is None:
            return float(kind is None or not is_skipped(kind, last))
        try:
            weight = self._weight_fn(dict(row), last)
        except Exception as error:
            error.add_note(f"`prompt_weight_fn` raised this for {row.request.where}.")
            raise
        if not (isinstance(weight, Real) and 0 <= float(weight) <= LARGEST_WEIGHT):
            raise ValueError(
                f"`prompt_weight_fn` returned {weight!r} for {row.request.where}: expected a number from 0, which "
                f"skips the prompt, to {LARGEST_WEIGHT:g}."
            )
        return float(weight)

    def generated(self, batch: Generated) -> None:
        if not batch.is_training:
            return
        self._tokens, self._rewards = batch.counts["generated"].tolist(), batch.rewards
        # Whoever has skipped them.
        self._are_asked = (batch.counts["asked"].view(len(self._keys), -1) > 0).any(1).tolist()
        skipped, saved = [key for key, asked in zip(self._keys, self._are_asked, strict=True) if not asked], 0
        for key in skipped:
            if (last := self._last.get(key)) is not None:
                saved += last.tokens
                self._last[key] = replace(last, skipped=last.skipped + 1)
        self.tokens_saved += saved
        self.host.record("prompts/skipped", len(skipped) / len(self._keys))
        self.host.record("prompts/tokens_saved", saved)
        self.host.record_total("prompts/tokens_saved_total", self.tokens_saved)

    def tally(self, part: Part) -> Tensor:
        return by_place(part, self.host)

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        assert tally is not None, "processes that share rows skip no prompts"
        number = self.host.args.num_generations
        for place, (key, asked) in enumerate(zip(self._keys, self._are_asked, strict=True)):
            mine = slice(place * number, (place + 1) * number)
            total, divergence, _ = tally[mine].sum(0).tolist()
            if asked:
                self._last[key] = Visit(
                    step=self.host.state.global_step + 1,
                    gap=divergence / total if total else None,
                    rewards=tuple(self._rewards[mine]),
                    tokens=sum(self._tokens[mine]),
                )

    def state(self) -> Mapping[str, Any]:
        return {"tokens_saved": self.tokens_saved, "last": {key: astuple(one) for key, one in self._last.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.tokens_saved = state["tokens_saved"]
        self._last = {
            key: Visit(step, gap, tuple(rewards), *counts)
            for key, (step, gap, rewards, *counts) in state["last"].items()
        }


def is_skipped(kind: float | str, last: Visit | None) -> bool:
    """Whether a prompt is skipped by its last visit: `OPSDConfig.skip_prompts`."""
    if last is None or last.skipped:  # whether it is still so, only completions tell
        return False
    if isinstance(kind, str):
        known = [one for one in last.rewards if one is not None]
        return len(known) > 1 and len(set(known)) == 1
    return last.gap is not None and abs(last.gap) < kind


def _key(row: Mapping[str, Any]) -> str:
    return sha256(repr(comparable(row)).encode()).hexdigest()[:16]
