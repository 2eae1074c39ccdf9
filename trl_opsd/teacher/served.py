"""A teacher behind a server, which returns states or log-probabilities of tokens; only its head is in this process.

B rows · C completion tokens · n tokens of a row that count · W numbers of each in an answer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed
from tqdm import tqdm

from trl_opsd._compat.http import WrongAnswerError
from trl_opsd.losses import Divergence, ForwardKL, SampledReverseKL, SkewedForwardKL
from trl_opsd.models.backbone import check_no_holes
from trl_opsd.teacher.answers import KINDS, Answers, Row, difference, kl, without
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.checkpoint_head import predictions_of
from trl_opsd.teacher.servers import TeacherServer
from trl_opsd.types import OutputHead, Rollout, TeacherTargets
from trl_opsd.types.targets import Keeper

_EXPECTED_BYTES = 4_000_000_000
"""Byte limit for answers to rows that were requested ahead; others are requested when their targets are needed."""
_LEAST_MOVED = 1e-7
"""Nats by which another token moves the prediction after it at least; rounding in float32 is below."""


def chosen_targets(offers: Collection[str], divergence: Divergence) -> str:
    """The value of `teacher_server_targets` where it is not set: states, or what tells the divergence most."""
    if "states" in offers:
        return "states"
    # The student's tokens alone leave to its tail what the teacher would say instead: trained so, a student came hardly
    # nearer (benchmarks/notes/teachers.md). A sampled token is always told.
    of_student = isinstance(divergence, SampledReverseKL)
    of_teacher = isinstance(divergence, ForwardKL | SkewedForwardKL)
    wanted = KINDS[:1] if of_student else KINDS[1:] if of_teacher else KINDS
    found = [one for one in wanted if one in offers] or [one for one in KINDS if one in offers]
    return "both_top_k" if len(found) == 2 else found[0]


class ServedTeacher(Teacher):
    """A frozen causal language model behind a server; `path` names its checkpoint."""

    def __init__(
        self, path: str, server: TeacherServer, answers: Answers, cache_device: str = "auto", progress: bool = False
    ) -> None:
        self._path, self._server, self._answers = path, server, answers
        self._cache_device, self._progress = cache_device, progress
        self._expected: dict[Row, Future[Tensor]] = {}
        self.config, self.student_k, self.form = answers.config, answers.student_k, answers.form
        most = self.config and getattr(self.config.get_text_config(), "max_position_embeddings", None)
        self._context = min((one for one in (server.context, most) if one is not None), default=None)
        self._probes = answers.probes()
        first, other = found = [one.result() for one in [self._start(probe) for probe in self._probes]]
        answers.settle(found)
        self._told = [answers.told(first), answers.told(other)]
        self._prove(*self._told)
        server.is_proved = True

    def _prove(self, one: list[dict[int, float]], other: list[dict[int, float]]) -> None:
        """Raises `WrongAnswerError` unless another token changes the prediction after it, and none before."""
        tokens = [probe.ids[-2] for probe in self._probes]  # each told of its own row alone
        mine, theirs = (without(told[:-1], *tokens) for told in (one, other))
        before, after = kl(mine[-1:], theirs[-1:]), kl(one[-1:], other[-1:])
        if after <= max(4 * before, _LEAST_MOVED) or difference(mine, theirs):
            raise WrongAnswerError(
                f"The teacher's server at {self._server.url} returns predictions that do not match the tokens: another "
                f"token changes the prediction of that token by {before:.2g} nats (expected 0), and of the next by "
                f"{after:.2g}. Predictions are a position ahead or behind, attention is bidirectional, as in embedding "
                "models, or weights are zeroed or were not loaded."
            )
        self.noise = kl(one[:-2], other[:-2])
        """Nats between two answers for the same tokens."""

    def check_predictions(self, options: Mapping[str, Any]) -> None:
        """Raises `WrongAnswerError` if the server has another model than the checkpoint, or in another process.

        The checkpoint is run once, on the CPU of the first process. Collective.
        """
        told, theirs = [*self._told[0], *self._told[1]], None
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            logs = predictions_of(self._path, options, [one.ids[:-1] for one in self._probes])
            if logs is not None:
                pairs = zip(told, logs.flatten(0, 1), strict=True)
                theirs = [{token: float(log_V[token]) for token in one} for one, log_V in pairs]
        # Processes may reach different servers at the same address.
        said = str(self._answers).partition(";")[0]
        found = gather_object([(self._server.url, said, told, self._context, theirs)])
        url, said, told, _, theirs = found[0]
        of = f"process 0 ({url}; {said})" if theirs is None else f"the checkpoint {self._path!r}"
        for process, (their_url, they_say, they_told, *_) in enumerate(found):
            apart = difference(they_told, told if theirs is None else theirs) if they_say == said else "different"
            if apart:
                raise WrongAnswerError(
                    f"The teacher's server of process {process} ({their_url}; {they_say}) is {apart} from {of} for the "
                    "same tokens: it serves another model, revision, dtype or layer, such as a fine-tune, or changes "
                    "what it returns: name the checkpoint that it serves; 127.0.0.1 is another server on each machine."
                )
        self._context = min((one for *_, one, _ in found if one is not None), default=None)

    def __str__(self) -> str:
        return f"{self._path!r} behind {self._server.url}, which reports {self._server.name!r}: {self._answers}"

    @property
    def head(self) -> OutputHead:
        return self._answers.head

    @property
    def context(self) -> int | None:
        return self._context

    def expect(self, rollout: Rollout) -> None:
        if self.student_k:  # whose tokens are known only when the student has read the rows
            return
        numbers = self.head.weight.size(1) * self.head.weight.element_size()
        kept = sum(len(row.ids) for row in self._expected) * numbers
        for row in self._rows(rollout):
            if row is None or row in self._expected:
                continue
            kept += len(row.ids) * numbers
            if kept > _EXPECTED_BYTES:  # the rest is requested when it is needed
                return
            self._expected[row] = self._start(row)

    def forget_expected(self) -> None:
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()

    def targets(self, rollout: Rollout) -> TeacherTargets:
        check_no_holes(rollout.measured())
        # Equal completions of one prompt give equal rows, which are requested once.
        numbers: dict[Row | None, list[int]] = {}
        for number, row in enumerate(self._rows(rollout)):
            numbers.setdefault(row, []).append(number)
        keeper = Keeper(rollout.weights, self._cache_device)
        nothing_0W = torch.empty(0, self.head.weight.size(1), dtype=self.head.weight.dtype)
        asked = sorted((row for row in numbers if row is not None), key=lambda row: -len(row.ids))  # the longest first
        answers = {row: self._begun(row) for row in asked}
        probe = self._start(self._probes[0]) if asked else None
        try:
            for row in tqdm(numbers, desc="teach", unit="row", delay=5, leave=False, disable=not self._progress):
                found_nW = nothing_0W if row is None else answers.pop(row).result()  # else all would be held twice
                for number in numbers[row]:
                    keeper.put_tokens(number, found_nW)
            if probe is not None and (apart := difference(self._answers.told(probe.result()), self._told[0])):
                raise WrongAnswerError(
                    f"The teacher's server at {self._server.url} is {apart} from its answer at the start for the same "
                    "tokens: it was started with another model, or changed. Nothing of this batch was learned."
                )
        finally:
            for future in (*answers.values(), *([] if probe is None else [probe])):
                future.cancel()
        return keeper.targets()

    def _begun(self, row: Row) -> Future[Tensor]:
        """The answer to a row that was requested ahead; else the row is requested now."""
        found = self._expected.pop(row, None)
        # A request that failed since then, perhaps in an earlier training, is repeated.
        if found is not None and not (found.done() and (found.cancelled() or found.exception())):
            return found
        return self._start(row)

    def _start(self, row: Row) -> Future[Tensor]:
        return self._server.start(self._answers, row)

    def _rows(self, rollout: Rollout) -> list[Row | None]:
        """What to score of each row; `None` where no token counts."""
        candidates = None if rollout.candidates is None or not self.student_k else rollout.candidates.cpu()
        found: list[Row | None] = []
        lists = zip(rollout.prompt_lists(), rollout.completion_lists(), rollout.counts.cpu(), strict=True)
        for number, (prompt, completion, counts_C) in enumerate(lists):
            places = counts_C.nonzero().flatten().tolist()
            if not places:
                found.append(None)
                continue
            wanted = [] if candidates is None else candidates[number, places, : self.student_k].tolist()
            ids = (*prompt, *completion[: places[-1] + 1])
            found.append(Row(ids, tuple(place + len(prompt) for place in places), tuple(map(tuple, wanted))))
            if max(ids) >= self._answers.vocabulary:  # vLLM would use a row of its padded embeddings
                raise ValueError(
                    f"A row has the token id {max(ids)}, but the teacher's vocabulary has {self._answers.vocabulary}: "
                    "was another tokenizer used? Nothing of this batch was sent."
                )
        return found
