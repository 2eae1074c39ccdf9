"""A teacher behind a server that generates: of each position, the log-probabilities of some tokens, and the rest.

B rows · C completion tokens · n tokens of a row that count · K requested tokens · V vocabulary size
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed
from transformers import AutoConfig

from trl_opsd.http.client import WrongAnswerError, warn_in_main
from trl_opsd.losses import Divergence, ForwardKL, SampledReverseKL, SkewedForwardKL
from trl_opsd.models.backbone import check_no_holes
from trl_opsd.teacher.asked import Asked, rows_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.servers import probe_ids, smallest
from trl_opsd.teacher.token_servers import TokenServer, are_same, kl
from trl_opsd.types import OutputHead, Rollout, TeacherTargets
from trl_opsd.types.known import MOST_IDS, KnownTokens, TokenHead
from trl_opsd.types.targets import Keeper

TOP_K = 64
"""K where neither the option nor a server's limit says otherwise."""
_BOTH = ("student_top_k", "teacher_top_k")
"""What a server that generates can offer."""


def parts_of(targets: str) -> tuple[str, ...]:
    """What a value of `teacher_server_targets` asks a server for."""
    return _BOTH if targets == "both_top_k" else (targets,)


def chosen_targets(offers: Collection[str], divergence: Divergence) -> str:
    """The value of `teacher_server_targets` where it is not set: states, or what tells the divergence most."""
    if "states" in offers:
        return "states"
    # The student's tokens alone leave to its tail what the teacher would say instead: trained so, a student came hardly
    # nearer (benchmarks/notes/teachers.md). A sampled token is always told.
    of_student = isinstance(divergence, SampledReverseKL)
    of_teacher = isinstance(divergence, ForwardKL | SkewedForwardKL)
    wanted = ("student_top_k",) if of_student else ("teacher_top_k",) if of_teacher else _BOTH
    found = [one for one in wanted if one in offers] or [one for one in _BOTH if one in offers]
    return "both_top_k" if len(found) == 2 else found[0]


class _Row(NamedTuple):
    """What a server has to score for the targets of a row; equal where its request is."""

    ids: tuple[int, ...]
    """Prompt and completion up to the last token that counts."""
    places: tuple[int, ...]
    """Indices in `ids` of the tokens that count."""
    wanted: tuple[tuple[int, ...], ...]
    """The student's candidates at each; empty where none are requested."""


class KnownTeacher(Teacher):
    """A frozen causal language model behind a server that scores tokens.

    `targets` is a value of `teacher_server_targets` but `"states"`, `top_k` the number of tokens of each kind. Its
    vocabulary is that of the config at `path`, or else `vocabulary`, the student's.
    """

    def __init__(
        self,
        path: str,
        server: TokenServer,
        targets: str,
        top_k: int | None,
        device: torch.device,
        vocabulary: int,
        options: Mapping[str, Any] | None = None,
        cache_device: str = "auto",
        progress: bool = False,
    ) -> None:
        self._path, self._server, self._parts = path, server, parts_of(targets)
        self._cache_device, self._progress = cache_device, progress
        if missing := [one for one in self._parts if one not in server.limits]:
            raise ValueError(
                f"`teacher_server_targets={targets!r}`: the teacher's server at {server.url} ({server.api}) "
                f"offers {sorted(server.limits)} only: set one of these. It lacks {missing[0]!r}: "
                f"{server.missing.get(missing[0])}."
            )
        self._context = server.context
        try:
            self.config: Any = AutoConfig.from_pretrained(path, **(options or {}))
            text = self.config.get_text_config()
            vocabulary = text.vocab_size
            self._context = smallest(self._context, getattr(text, "max_position_embeddings", None))
        except (OSError, ValueError):  # somebody else's server: the checkpoint need not be here
            warn_in_main(f"No config is found at {path!r}: assuming that the teacher has the student's vocabulary.")
        if vocabulary > MOST_IDS:
            raise ValueError(f"The teacher has {vocabulary} tokens, more than the {MOST_IDS} that can be sent.")
        limits = [limit for one in self._parts if (limit := server.limits.get(one)) is not None]
        self.top_k = min(top_k or min(TOP_K, *limits, TOP_K), vocabulary)
        if top_k is not None and limits and top_k > min(limits):
            raise ValueError(
                f"`teacher_server_top_k={top_k}`: the teacher's server tells {min(limits)} tokens per position at "
                f"most: set {min(limits)}, or start it with `--max-logprobs {top_k}`."
            )
        self.student_k, self._teacher_k = (self.top_k * (one in self._parts) for one in _BOTH)
        server.warn_of_name(path, "it has the student's tokens, and is causal")
        self.probe_row = probe_ids(vocabulary)
        self.probe = server.prove(vocabulary, self.student_k, self._teacher_k)
        self._width = self.student_k + self._teacher_k + 1
        self._head = TokenHead.sized(vocabulary, self._width, device)
        self._asked = Asked[_Row](self._start, lambda row: len(row.places), 4 * (2 * self._width + 1))
        warn_in_main(
            f"The teacher's server tells the log-probabilities of {self._in_words()} at each position; all others "
            "are one token to the loss: it is at most that of the whole vocabulary, which "
            "docs/teachers.md#what-a-generating-server-tells has figures for."
        )

    def __str__(self) -> str:
        rows, width = self._head.weight.shape
        return (
            f"{self._path!r} behind {self._server.api} at {self._server.url}, which tells {self._in_words()} "
            f" of {rows}, {4 * width} bytes per token"
        )

    def _in_words(self) -> str:
        whose = {"student_top_k": "the student's", "teacher_top_k": "its own"}
        return " and ".join(f"{whose[one]} {self.top_k} likeliest tokens" for one in self._parts)

    def compare_processes(self) -> None:
        """Raises `WrongAnswerError` if the server of another process has another teacher. Collective."""
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        found = gather_object([(self._server.url, self.probe, self.top_k, self._server.context)])
        url, probe, top_k, _ = found[0]
        for process, (their_url, theirs, their_k, _) in enumerate(found):
            if their_k != top_k or not are_same(probe, theirs):
                raise WrongAnswerError(
                    f"The teacher's servers of process 0 ({url}) and of process {process} ({their_url}) give "
                    f"different log-probabilities for the same tokens, or tell {top_k} and {their_k} of them: "
                    "start all alike, with the same checkpoint; 127.0.0.1 is a different server on each machine."
                )
        self._context = smallest(*(context for *_, context in found), self._context)

    @property
    def spelling(self) -> str:
        """What a fingerprint says of it, beside its vocabulary: another choice is another objective."""
        return f"{' and '.join(self._parts)} {self.top_k}"

    @property
    def noise(self) -> float | None:
        """Nats between two answers for the same tokens; `None` if not measured."""
        return self._server.noise

    def told_apart(self, logs_LV: Tensor) -> float:
        """Nats between what the server tells and these log-probabilities, [L - 1, V], of `probe_row`."""
        each = zip(self.probe, logs_LV, strict=True)
        return kl(self.probe, [{token: float(log_V[token]) for token in told} for told, log_V in each])

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def context(self) -> int | None:
        return self._context

    def expect(self, rollout: Rollout) -> None:
        if not self.student_k:  # whose tokens are known only when the student has read the rows
            self._asked.expect(self._rows(rollout))

    def forget_expected(self) -> None:
        self._asked.forget()

    def targets(self, rollout: Rollout) -> TeacherTargets:
        check_no_holes(rollout.measured())
        rows = self._rows(rollout)
        keeper = Keeper(rollout.weights, self._cache_device)
        with closing(self._asked.answers(rows, self._progress)) as answers:
            for number, (row, known_nW) in enumerate(zip(rows, answers, strict=True)):
                tokens = 0 if row is None else len(row.ids) - int(rollout.prompt_mask[number].sum())
                packed_CW = torch.zeros(tokens, self._head.weight.size(1))
                if row is not None and known_nW is not None:
                    packed_CW[torch.tensor(row.places) - (len(row.ids) - tokens)] = known_nW
                keeper.put([number], packed_CW[None])
        return keeper.targets()

    def _start(self, row: _Row) -> Future[Tensor]:
        wanted_nK = torch.tensor(row.wanted) if row.wanted else None
        asked = self._server.start(row.ids, row.places, wanted_nK, self._teacher_k)
        found: Future[Tensor] = Future()

        def read(done: Future[tuple[Tensor, Tensor]]) -> None:
            try:
                found.set_result(self._packed(row, *done.result()))
            except BaseException as error:
                found.set_exception(error)

        asked.add_done_callback(read)
        found.cancel = asked.cancel  # type: ignore[method-assign]
        return found

    def _packed(self, row: _Row, ids_nM: Tensor, logprobs_nM: Tensor) -> Tensor:
        sampled_n1 = torch.tensor([row.ids[place] for place in row.places])[:, None]
        # The row's token first, since the loss may need its probability.
        first_nM = (ids_nM != sampled_n1).int().sort(dim=1, stable=True).indices
        return KnownTokens.of(ids_nM.gather(1, first_nM), logprobs_nM.gather(1, first_nM), self._width).packed()

    def _rows(self, rollout: Rollout) -> list[_Row | None]:
        """What to score of each row; `None` where no token counts."""
        candidates = None if rollout.candidates is None or not self.student_k else rollout.candidates.cpu()

        def row(number: int, prompt: list[int], completion: list[int], places: list[int]) -> _Row:
            wanted = [] if candidates is None else candidates[number, places, : self.student_k].tolist()
            ids = (*prompt, *completion[: places[-1] + 1])
            return _Row(ids, tuple(place + len(prompt) for place in places), tuple(map(tuple, wanted)))

        return rows_of(rollout, self._head.weight.size(0), row)
