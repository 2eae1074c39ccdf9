"""Plans the passes of a static teacher whose rows share prefixes, and keeps the keys and values of these between steps.

P tokens of a prefix · S of a segment, the part of it that is read at once · L tokens of a row
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
import torch
from accelerate.logging import get_logger

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import reshard
from trl_opsd.models.backbone import Run
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.models.prefix import CONTINUING, Pair, Past, keys_and_values
from trl_opsd.models.probes import Probed
from trl_opsd.models.weights import cached_per_token, state_of
from trl_opsd.teacher.prefix_choice import Ids, chosen_prefixes, in_common
from trl_opsd.types import Rollout

logger = get_logger(__name__)

Split: TypeAlias = Callable[[Sequence[int], int], list[list[int]]]
"""`split(lengths, before)`: the rows of each pass, of these lengths after a prefix of `before` tokens."""

PASS_TOKENS = {"cpu": 128, "accelerator": 512}
"""Tokens of a pass below which fewer take as long: an accelerator reads its weights once for all of them."""
COPIED_PASS_TOKENS = 4096
"""The same on an accelerator to which each pass copies the weights."""
REMEMBERED = 256
"""Prompts of earlier calls whose ids are remembered, to find what rows of different calls share."""


@dataclass(eq=False, slots=True)
class Kept:
    """A segment with kept keys and values, after those of the prefix that it extends."""

    ids: Ids
    """[P], of the whole prefix."""
    parent: Kept | None
    begin: int
    """Tokens before the segment; the parent may have more."""
    layers: list[Pair]
    used: int
    """The last call that used it."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for pair in self.layers for one in pair)

    @property
    def chain(self) -> list[Kept]:
        """This segment and those that it extends."""
        return [self, *(self.parent.chain if self.parent is not None else ())]

    def past(self, tokens: int) -> Past:
        """The first tokens of the prefix, not copied."""
        pairs: list[list[Pair]] = [[] for _ in self.layers]
        for one in self.chain:
            if tokens > one.begin:
                for of_layer, (keys, values) in zip(pairs, one.layers, strict=True):
                    length = tokens - one.begin
                    of_layer.insert(0, (keys[..., :length, :], values[..., :length, :]))
                tokens = one.begin
        whole = sum(pair[0].size(-2) for pair in pairs[0])
        return Past(whole, tuple(map(tuple, pairs)))


class PrefixMemory:
    """Bounds the bytes that all teachers of a trainer keep; the least recently used prefixes are dropped first."""

    def __init__(self, limit: float) -> None:
        self.limit = int(limit)
        self._calls = itertools.count(1)
        self._teachers: WeakSet[SharedPrefixes] = WeakSet()

    def add(self, teacher: SharedPrefixes) -> None:
        self._teachers.add(teacher)

    def next_call(self) -> int:
        return next(self._calls)

    @property
    def held(self) -> int:
        """Bytes that are kept."""
        return sum(one.nbytes for teacher in self._teachers for one in teacher.kept)

    def make_room(self, nbytes: float, call: int | None = None) -> None:
        """Drops prefixes until so many bytes are free, or only those are left that this call uses."""
        while self.held + nbytes > self.limit:
            found = [(one, teacher) for teacher in self._teachers for one in teacher.kept]
            extended = {id(one.parent) for one, _ in found}
            ends = [(one, of) for one, of in found if id(one) not in extended and one.used != call]
            if not ends:
                return
            oldest, teacher = min(ends, key=lambda end: end[0].used)
            teacher.kept.remove(oldest)


@dataclass(frozen=True, slots=True)
class Plan:
    """The passes over the rows of a rollout: those that read segments, and after them those that read rows."""

    shared: SharedPrefixes
    call: int
    rows: list[list[int]] = field(default_factory=list)
    """The rows of each pass."""
    prefixes: list[Ids] = field(default_factory=list)
    """What the rows of each of these passes have in common and do not read, perhaps nothing."""
    segments: list[list[Ids]] = field(default_factory=list)
    """The prefixes whose ends are read by each pass before."""
    begins: list[int] = field(default_factory=list)
    """Where the segments of each pass begin; the tokens before are the same, and read or kept before it."""


class SharedPrefixes:
    """Finds what the rows of a static teacher share, reads it where that saves time, and keeps it as memory allows.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher. If its frozen parameters change, nothing is kept.
        memory ([`PrefixMemory`]):
            Bounds what all teachers keep.
        device (`torch.device`):
            Where the teacher computes.
        where (`torch.device`):
            Where keys and values are kept.
        copies (`bool`, *optional*, defaults to `False`):
            Whether each pass copies or gathers the weights again.
    """

    def __init__(
        self, model: CausalLM, memory: PrefixMemory, device: torch.device, where: torch.device, copies: bool = False
    ) -> None:
        self.kept: list[Kept] = []
        self.computed = self.saved = 0
        """Tokens that were read, and that were not because prefixes are shared, in all."""
        self.works: bool | None = None
        """Whether the model can continue from keys and values; `None` until that is tried."""
        self._model, self._memory, self._device, self._where = model, memory, device, where
        kind = "cpu" if device.type == "cpu" else "accelerator"
        self._pass_tokens = COPIED_PASS_TOKENS if copies and kind != "cpu" else PASS_TOKENS[kind]
        self._prompts: dict[bytes, None] = {}  # ids as bytes, the last ones at the end
        self._state: Any = None
        # Of keys and values; once a segment was read, what it took.
        self._token_bytes = float(cached_per_token(model.config) * model.dtype.itemsize)
        memory.add(self)

    def prove(self, run: Run, policy: BatchPolicy) -> None:
        """Tries whether the model continues from keys and values, in five passes; warns if not."""
        self.works = True
        try:
            if policy.padded_up_to != math.inf:
                raise ValueError(f"The teacher ({type(self._model).__name__}) reads rows {policy}.")
            Probed(self._model, "teacher", run).prove(CONTINUING)
        except ValueError as error:
            self.works = False
            logger.warning(f"`teacher_prefix_cache_gb` has no effect on this teacher. {error}")

    @contextmanager
    def planned(self, rollout: Rollout, split: Split, policy: BatchPolicy) -> Iterator[Plan | None]:
        """The passes over these rows; what they have read is kept when the context ends. `None` if the model cannot."""
        if not self.works:
            yield None
            return
        call = self._memory.next_call()
        reshard(self._model)  # FSDP2 leaves some parameters gathered, whose values are others than those of a shard
        state = state_of([one for one in self._model.parameters() if not one.requires_grad])
        state = state, torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)
        if state != self._state:
            self._state, self.kept = state, []
        prompts, lengths = _prompts(rollout, policy), [one.total for one in rollout.measured()]
        earlier, kept = [np.frombuffer(key, np.int64) for key in self._prompts], [one.ids for one in self.kept]
        wanted = chosen_prefixes(prompts, lengths, earlier, kept, self._pass_tokens)
        plan = Plan(self, call)
        _fill(plan, prompts, rollout.sizes, self._affordable(wanted, call), split)
        read = sum(len(ids) - at for some, at in zip(plan.segments, plan.begins, strict=True) for ids in some)
        unread = sum(len(ids) * len(rows) for ids, rows in zip(plan.prefixes, plan.rows, strict=True))
        self.computed += sum(lengths) - unread + read
        self.saved += unread - read
        try:
            yield plan
        finally:
            self._memory.make_room(0)
            now = dict.fromkeys(ids.tobytes() for ids in prompts if len(ids))
            others = [key for key in self._prompts if key not in now]
            self._prompts = dict.fromkeys([*others, *now][-REMEMBERED:])

    def read(self, plan: Plan, run: Run) -> list[Past]:
        """Makes the passes that read segments, and returns what is before the rows of each of the others."""
        for some, begin in zip(plan.segments, plan.begins, strict=True):
            parent = self._longest(some[0][:begin])
            past = Past() if parent is None else parent.past(begin)
            ends = [ids[begin:].tolist() for ids in some]
            self._memory.make_room(sum(map(len, ends)) * self._token_bytes, plan.call)
            found: list[list[Pair]] = run(keys_and_values, ends, past, self._device, self._where)
            for ids, layers in zip(some, found, strict=True):
                one = Kept(ids, parent, begin, layers, plan.call)
                self._token_bytes = one.nbytes / (len(ids) - begin)
                self.kept.append(one)
        before = ((self._longest(ids), len(ids)) for ids in plan.prefixes)
        return [Past() if prefix is None else prefix.past(tokens) for prefix, tokens in before]

    def _longest(self, ids: Ids) -> Kept | None:
        """The kept prefix that has the most tokens in common with these; `None` without any."""
        best = max(self.kept, key=lambda one: (in_common(one.ids, ids), one.used), default=None)
        return best if best is not None and in_common(best.ids, ids) else None

    def _affordable(self, wanted: Sequence[Ids], call: int) -> dict[bytes, int]:
        """Where the segment of each prefix begins that is used, of those that are wanted, shorter ones first.

        All that a call uses fits into the memory at once.
        """
        begins: dict[bytes, int] = {}
        used: dict[int, Kept] = {}
        new: list[Ids] = []
        nbytes = 0.0
        for ids in wanted:
            kept = self._longest(ids)
            known = 0 if kept is None else in_common(kept.ids, ids)
            begin = max([known, *(len(one) for one in new if in_common(one, ids) == len(one))])
            chain = {id(one): one for one in (kept.chain if kept is not None and begin == known else ())}
            more = (len(ids) - begin) * self._token_bytes
            if sum(one.nbytes for one in (used | chain).values()) + nbytes + more > self._memory.limit:
                continue
            used, nbytes = used | chain, nbytes + more
            begins[ids.tobytes()] = begin
            if begin < len(ids):
                new.append(ids)
        for one in used.values():
            one.used = call
        return begins


def _fill(plan: Plan, prompts: Sequence[Ids], sizes: Sequence[int], begins: dict[bytes, int], split: Split) -> None:
    """Adds the passes over rows of these sizes, with the prefixes in `begins`, and where the segment of each begins."""
    used = [np.frombuffer(key, np.int64) for key in begins]
    ends: dict[tuple[int, bytes], list[Ids]] = {}
    for ids, begin in zip(used, begins.values(), strict=True):
        if begin < len(ids):
            ends.setdefault((begin, ids[:begin].tobytes()), []).append(ids)
    for (begin, _), some in sorted(ends.items(), key=lambda item: item[0][0]):
        for group in split([len(ids) - begin for ids in some], begin):
            plan.segments.append([some[number] for number in group])
            plan.begins.append(begin)
    alike: dict[bytes, list[int]] = {}
    for row, ids in enumerate(prompts):
        fitting = [one for one in used if in_common(one, ids) == len(one)]
        alike.setdefault(max(fitting, key=len, default=ids[:0]).tobytes(), []).append(row)
    for key, rows in alike.items():
        prefix = np.frombuffer(key, np.int64)
        for group in split([sizes[row] - len(prefix) for row in rows], len(prefix)):
            plan.rows.append([rows[number] for number in group])
            plan.prefixes.append(prefix)


def _prompts(rollout: Rollout, policy: BatchPolicy) -> list[Ids]:
    """The ids of each prompt but the last, whose state predicts a token; none of rows that are read whole."""
    columns, ids_BP = rollout.prompt_ids.size(1), rollout.prompt_ids.cpu().numpy().astype(np.int64)
    images = rollout.images or [policy.dummy_image_prompt] * len(ids_BP)
    return [
        ids_P[columns - one.prompt : columns - 1] if seen is None and not one.masked else ids_P[:0]
        for ids_P, one, seen in zip(ids_BP, rollout.measured(), images, strict=True)
    ]
