"""All teachers of a run by name: sends each row to its own, and checks the targets that come back.

B rows · C completion tokens · n tokens of one completion · H hidden width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import final

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd._compat.sharding import is_split_model
from trl_opsd.models.backbone import shape_of
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.teacher.base import Teacher, innermost
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.self_teacher import Average, with_candidates
from trl_opsd.types import OutputHead, Rollout, RowTargets, TeacherTargets
from trl_opsd.types.known import TokenHead
from trl_opsd.types.targets import check_targets, kept_by_row

logger = get_logger(__name__)


@final
class Teachers(dict[str, Teacher]):
    """The teachers by name, with the average behind an `"ema"` teacher, and checks that others have not changed."""

    def __init__(
        self,
        by_name: Mapping[str, Teacher],
        average: Average | None = None,
        checks: Sequence[Callable[[], None]] = (),
        origin: Teacher | None = None,
        proposer: Teacher | None = None,
    ) -> None:
        super().__init__(by_name)
        self.average = average
        self._checks = checks
        self.origin = origin
        """The student as it was passed or what stands in its place, where the loss uses it."""
        self._proposer = proposer  # the current student, whose likeliest tokens some teachers score
        its_own = {name: innermost(one) for name, one in by_name.items()}
        self._sharded = {
            name for name, one in its_own.items() if isinstance(one, FrozenTeacher) and is_split_model(one.model)
        }
        self._unproved = {name for name, one in by_name.items() if not is_ours(one)}
        self.are_whole = not any(isinstance(one.head, TokenHead) for one in by_name.values())
        """Whether whole distributions of all are known, not the probabilities of some tokens alone."""
        every = {id(own := innermost(one)): own for one in (*by_name.values(), origin) if one is not None}.values()
        self.models = [one for own in every if (one := getattr(own, "model", None)) is not None]
        """Those in this process, the student's too where it is its own teacher."""
        self._prefixes = [one for own in every if (one := getattr(own, "prefix", None)) is not None]

    @property
    def only(self) -> Teacher | None:
        """The teacher if there is exactly one, else `None`."""
        return next(iter(self.values())) if len(self) == 1 else None

    def proposed(self, rollout: Rollout, chunk_tokens: int | None, vocabulary: int | None) -> Rollout:
        """The student's rollout, with the candidates that teachers need of it. Collective."""
        k = max(getattr(one, "student_k", 0) for one in self.values())
        if not k:
            return rollout
        assert self._proposer is not None, "built with teachers behind servers"
        return with_candidates(rollout, self._proposer, k, chunk_tokens, vocabulary)

    @property
    def noise(self) -> float | None:
        """Nats between two answers of a teacher's servers for the same tokens, the most of all; `None` without any."""
        each = [noise for one in self.values() if (noise := getattr(one, "noise", None)) is not None]
        return max(each, default=None)

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Tokens that teachers with shared prefixes have read so far, and that they have not; `None` without any."""
        each = [one for one in self._prefixes if one.works is not False]
        return (sum(one.computed for one in each), sum(one.saved for one in each)) if each else None

    @property
    def heads(self) -> list[OutputHead]:
        """The output head of each, in order."""
        return [teacher.head for teacher in self.values()]

    @property
    def origin_head(self) -> OutputHead | None:
        """The output head of `origin`."""
        return None if self.origin is None else self.origin.head

    def targets(
        self, rollout: Rollout, names: Sequence[str], references: Mapping[str, Rollout] = MappingProxyType({})
    ) -> TeacherTargets:
        """The targets of each row from its teacher in `names`, and states of the same tokens in rollouts `references`.

        Those of `"origin"` are of the student as it was passed, all others of the teachers.
        """
        found = self._of(rollout, names)
        if not references:
            return found
        more = {
            name: self._of(one, names) if name != "origin" or self.origin is None else scored(self.origin, one)
            for name, one in references.items()
        }
        found = kept_by_row(found, rollout.weights)
        return found.with_references({name: kept_by_row(one, rollout.weights).rows or () for name, one in more.items()})

    def _of(self, rollout: Rollout, names: Sequence[str]) -> TeacherTargets:
        if self.only is not None:
            return self._checked(next(iter(self)), rollout)
        number_of = {name: number for number, name in enumerate(self)}
        found: dict[int, RowTargets] = {}
        for name in self:  # one teacher at a time, so that only one has to be on the device
            rows = [row for row, one in enumerate(names) if one == name]
            if not rows:
                if name in self._sharded:  # other processes may have some, and it is read in all together
                    scored(self[name], rollout.select([0]))
                continue
            of_theirs = rollout.select(rows)
            theirs = kept_by_row(self._checked(name, of_theirs), of_theirs.weights)
            found.update(zip(rows, theirs.rows or (), strict=True))
        numbers_B = torch.tensor([number_of[name] for name in names])
        return TeacherTargets.by_row([found[row] for row in range(len(names))], rollout.weights.size(1), numbers_B)

    def _checked(self, name: str, rollout: Rollout) -> TeacherTargets:
        teacher = self[name]
        targets = scored(teacher, rollout)
        if targets.rows is None or type(targets.rows[0]) is RowTargets:  # of others their teacher has looked
            check_depends_on_input(rollout, targets, name)
        if name in self._unproved:
            if targets.rows is None:  # the teacher may reuse the tensor for its next answer
                targets = replace(targets, hidden=targets.hidden.clone())
            prove_alignment(partial(scored, teacher), rollout, targets, f"{type(teacher).__name__}.targets")
            self._unproved.remove(name)  # the proof costs one more call
        return targets

    def expect(self, rollout: Rollout, names: Sequence[str]) -> None:
        """Announces to each teacher its rows, by the teacher's name of each row."""
        for name in dict.fromkeys(names):
            self[name].expect(rollout.select([row for row, one in enumerate(names) if one == name]))

    def forget_expected(self) -> None:
        """Announces to each teacher that the rows it expects will not be needed."""
        for teacher in self.values():
            teacher.forget_expected()

    def check(self) -> None:
        """Raises `ValueError` if a teacher has changed since the start. Collective."""
        for check in self._checks:
            check()

    def save(self, folder: str) -> None:
        """Writes the teachers' state to a checkpoint folder."""
        if self.average is not None:
            self.average.save(folder)

    def load(self, folder: str) -> None:
        """Loads the teachers' state from a checkpoint folder."""
        if self.average is not None:
            self.average.load(folder)


def is_ours(teacher: Teacher) -> bool:
    """Whether its targets are made in this package, which aligns them."""
    # A class made by `exec` may have no module at all.
    return str(type(teacher).targets.__module__).startswith(f"{str(__package__).partition('.')[0]}.")


def scored(teacher: Teacher, rollout: Rollout) -> TeacherTargets:
    """The targets of a rollout; those of a user's teacher after the check of their shape."""
    with torch.no_grad():
        targets = teacher.targets(rollout)
    if not is_ours(teacher):
        check_targets(targets, rollout, f"{type(teacher).__name__}.targets", width=shape_of(teacher.head)[1])
    return targets


def check_depends_on_input(rollout: Rollout, targets: TeacherTargets, teacher: str) -> None:
    """Refuses hidden states that are the same after different tokens; waits for the weights and one comparison."""
    counts_BC = rollout.weights.cpu() != 0
    places = {row: counts_BC[row].nonzero().squeeze(1) for row in counts_BC.any(1).nonzero().flatten().tolist()}
    first = None
    for row, of_row in places.items():
        states = targets.of(row, of_row)
        first = states[:1] if first is None else first
        # Not bit for bit: attention rounds the average of equal values.
        if not ((states - first).abs() <= _ROUNDING * first.abs().max().clamp(max=1e3)).all():
            return  # as of nearly all teachers, in the first row with two tokens
    if first is None:
        return
    read_BC = torch.cat([rollout.prompt_ids[:, -1:], rollout.completion_ids[:, :-1]], dim=1)
    read_N = read_BC.cpu()[counts_BC]
    if (read_N != read_N[0]).any():
        raise ValueError(
            f"The {teacher} has the same hidden state at all {len(read_N)} tokens of a generation batch, whatever its "
            "input: its weights are zeroed or were not loaded; reload it. The student was not changed."
        )


_ROUNDING = 1e-5
"""Largest difference of equal states, relative to the largest value up to 1,000: beyond lie ids of known tokens."""
_CHANGED = 0.05
"""Minimum difference of states of different inputs, relative to the spread within a row; rounding stays below."""
_QUOTED = 200
"""Characters quoted of an error."""
_CALLED_AGAIN = (
    "(This check calls the teacher a second time, for two rows: a teacher that replays recorded answers is now one "
    "call ahead.)"
)


def prove_alignment(
    read: Callable[[Rollout], TeacherTargets], rollout: Rollout, targets: TeacherTargets, where: str
) -> None:
    """Refuses targets that have read the token they should predict; `where` is their method, for messages."""
    # A teacher may be collective, so every process calls it, also without the three such tokens that a verdict needs.
    row = int(rollout.counts.sum(-1).argmax())
    places = rollout.counts[row].nonzero().flatten().tolist()
    up_to_last = rollout.completion_mask[row, : places[-1] + 1 if places else 0].nonzero().flatten().tolist()
    # A row is scored again beside a copy with another token before its last one. Only the last target may differ: an
    # earlier difference means that states are shifted towards later tokens, none that they are shifted back.
    pair = _with_another_token(rollout.select([row, row]), up_to_last)
    hidden_2CH, said = None, ""
    try:
        with preserved_rng(rollout.completion_ids.device):
            hidden_2CH = read(pair).hidden
    except Exception as error:  # a teacher that looks targets up has none for the changed row
        reason = next(iter(str(error).splitlines()), "")[:_QUOTED]
        said = f"failed on a row with one changed token ({type(error).__name__}: {reason}), so may not be aligned"
    # Nothing can be concluded without three tokens, without another token, or from NaNs, which other checks report.
    is_telling = len(places) >= 3 and not torch.equal(*pair.completion_ids)
    if is_telling and hidden_2CH is not None and hidden_2CH[:, places].isfinite().all():
        read_nH, changed_nH = hidden_2CH[:, places].float()
        first = next((place for place, one in enumerate(_differ(read_nH, changed_nH).tolist()) if one), None)
        if _differ(read_nH, targets.of(row, torch.tensor(places)).to(read_nH)).any():
            said = "returned different states for a row when called again without the rest of its batch"
        elif first is None:
            said = "returned states that do not depend on the token right before the predicted one: one token behind?"
        elif first == 0:
            said = "returned states that all depend on later tokens, as is right only if teachers see completions"
        elif too_far := len(places) - 1 - first:
            raise ValueError(
                f"`{where}` returned states that are {too_far} token{'s' * (too_far > 1)} ahead: they have seen the "
                "token they should predict. For P prompt tokens and C completion tokens, return the model's `hidden[:, "
                f"P - 1 : -1]`; the student was not changed. {_CALLED_AGAIN}"
            )
    if said:
        logger.warning(f"`{where}` {said}. {_CALLED_AGAIN}")


def _with_another_token(pair: Rollout, places: list[int]) -> Rollout:
    """Replaces the last but one of these tokens in the second row by another token of the row, if it has another."""
    ids_2C = pair.completion_ids.clone()
    last_but_one = places[-2:][:1]
    known = [*ids_2C[1, places].tolist(), *pair.prompt_lists()[1]]
    ids_2C[1, last_but_one] = next((one for one in known if one not in ids_2C[1, last_but_one]), 0)
    return replace(pair, completion_ids=ids_2C)


def _differ(one_nH: Tensor, other_nH: Tensor) -> Tensor:
    """[n], whether states differ by more than rounding."""
    apart = (one_nH - one_nH[:1]).abs().max()
    return (one_nH - other_nH).abs().amax(-1) > _CHANGED * apart
