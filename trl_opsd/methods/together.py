"""Completions that the student and its teacher write together: it is asked before each of its own tokens is known.

n tokens of a block · C completion tokens · V vocabulary · H hidden width; log-probabilities in nats
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled

from trl_opsd._compat.sharding import gathered_head, whole_head
from trl_opsd._compat.values import Natural, Share
from trl_opsd._compat.versions import replaced
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import completion_hidden, logits_of, preserved_mode
from trl_opsd.options.normalize import drawn_otherwise
from trl_opsd.options.rules import refuse, shown
from trl_opsd.parallel.precision import autocast
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.types import OutputHead
from trl_opsd.types.metrics import BATCHES, Logs, Metric
from trl_opsd.types.rollout import Author, images_of

_SALT = 3
"""Separates the seeds of these draws from those of `lmbda`, token selection and environments."""
_LOGS = Logs(BATCHES, "the methods `blend` and `speculative`, until their `until_step`", evaluated=False)


@dataclass(slots=True, eq=False)
class _Draft:
    """A completion that is being written."""

    row: BatchRow
    context: list[int]
    """The student's prompt, with the beginning of the completion that is given."""
    room: int
    """Most tokens that may still follow; 0 once it has ended."""
    random: torch.Generator
    """Of the teacher's draws; it follows from seed, step and place, so that torch's own is the student's."""
    ids: list[int] = field(default_factory=list)
    authors: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    coins: list[float] = field(init=False)
    """A number from 0 to 1 for each token."""
    reads: int = 0
    """How often the teacher has read it."""

    def __post_init__(self) -> None:
        self.coins = torch.rand(max(self.room, 0), dtype=torch.float64, generator=self.random).tolist()


@dataclass(kw_only=True)
class _Together(Method):
    """The student proposes blocks of tokens; the teacher reads each, and replaces a token, after which it ends."""

    until_step: Natural | None = None
    block: Natural = 16

    by_token = needs_whole = True
    metrics: ClassVar = {
        "together/teacher": Metric("1", "Share of the tokens of a generation batch that the teacher wrote.", _LOGS),
        "together/reads": Metric("1", "How often the teacher reads a completion while it is written.", _LOGS),
    }

    @abstractmethod
    def _most(self, draft: _Draft) -> int:
        """The length of the next block, unless `block` or the room is less."""

    @abstractmethod
    def _stands(self, draft: _Draft, ids_n: Tensor, log_teacher_nV: Tensor) -> list[bool]:
        """Whether each token that the student proposes stands."""

    @abstractmethod
    def _drawn(self, log_student_nV: Tensor, log_teacher_nV: Tensor) -> Tensor:
        """[n, V], the log-probabilities of what is kept of both."""

    def check(self, args: Any, teachers: Sequence[str]) -> None:
        others = [*drawn_otherwise(args), *([] if args.temperature == 1 else [f"temperature={args.temperature}"])]
        is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_enabled()
        refuse(
            (is_met, f"`{type(self).__name__}` with {beside}", why)
            for is_met, beside, why in (
                (args.has_engine, "an engine", "has `transformers` generate; remove `use_vllm` or `sglang_server_url`"),
                (
                    args.teacher_server_url is not None,
                    shown(args, "teacher_server_url"),
                    "asks teachers block by block; load them here",
                ),
                (is_sharded, "ZeRO-3 or FSDP", "needs the whole student in each process; use DDP or ZeRO-2"),
                (bool(others), f"`{''.join(others[:1])}`", "draws from whole distributions at temperature 1"),
            )
        )

    def complete(
        self, rows: Sequence[BatchRow], prompt_ids: list[list[int]], alone: Callable[[list[list[int]]], list[list[int]]]
    ) -> list[list[int]]:
        host, step, device = self.host, self.host.state.global_step, self.host.accelerator.device
        if self.until_step is not None and step >= self.until_step:
            return alone(prompt_ids)
        drafts = []
        for row, ids in zip(rows, prompt_ids, strict=True):
            room = min(host.limits.room(len(ids)), host.generation_config.max_new_tokens)
            seed = derived_seed(host.args.seed, step, row.place, _SALT)
            drafts.append(_Draft(row, ids, room, torch.Generator().manual_seed(seed)))
        # Teachers may be collective: a process reads its first row while others go on.
        while host.accelerator.gather(torch.tensor([sum(one.room > 0 for one in drafts)], device=device)).any():
            self._go_on([one for one in drafts if one.room > 0] or drafts[:1], alone)
        for one in drafts:
            one.row.authors, one.row.logprobs = one.authors, one.logprobs
        authors = [author for one in drafts if not one.row.is_padding for author in one.authors]
        if authors:
            host.record("together/teacher", authors.count(Author.TEACHER) / len(authors))
            host.record("together/reads", sum(one.reads for one in drafts) / len(drafts))
        return [one.ids for one in drafts]

    def _go_on(self, drafts: list[_Draft], alone: Callable[[list[list[int]]], list[list[int]]]) -> None:
        """Adds a block to each draft."""
        host, rows = self.host, [one.row for one in drafts]
        most = [min(self.block, one.room, self._most(one)) for one in drafts]
        with replaced(host.generation_config, max_new_tokens=max(*most, 1)):
            proposed = alone([one.context + one.ids for one in drafts])
        blocks = [torch.tensor(ids[:tokens], dtype=torch.long) for ids, tokens in zip(proposed, most, strict=True)]
        starts = [len(one.row.given.ids) + len(one.ids) for one in drafts]
        rollout = host.padded(
            [one.context[: len(one.context) - len(one.row.given.ids)] for one in drafts],
            [[*one.row.given.ids, *one.ids, *block.tolist()] for one, block in zip(drafts, blocks, strict=True)],
        )
        weights_BC = torch.zeros(rollout.weights.shape)
        for weights_C, start, block in zip(weights_BC, starts, blocks, strict=True):
            weights_C[start : start + len(block)] = 1
        rollout = replace(rollout, weights=weights_BC.to(rollout.weights.device), images=images_of(rows))
        with preserved_mode(host.model), torch.no_grad(), autocast(host.accelerator):
            with host.phase("teach"):
                targets = host.teach(rollout, rows)
            heads, size = host.teaching.teachers.heads, host.args.per_device_train_batch_size
            host.model.eval()
            with whole_head(host.model) as head, gathered_head(*heads):
                for first in range(0, len(drafts), size):  # as many rows as in training fit into memory
                    some = range(first, min(first + size, len(drafts)))
                    hidden_BCH = completion_hidden(host.model, rollout.select(some).cut(), host.batching)
                    for number, hidden_CH in zip(some, hidden_BCH, strict=True):
                        block, start = blocks[number], starts[number]
                        its = heads[0 if targets.teacher is None else int(targets.teacher[number])]
                        states_nH = targets.of(number, torch.arange(start, start + len(block)))
                        student_nV = self._log_probabilities(hidden_CH[start : start + len(block)], head)
                        self._add(drafts[number], block, student_nV, self._log_probabilities(states_nH, its))

    def _log_probabilities(self, states_nH: Tensor, head: OutputHead) -> Tensor:
        """[n, V], of the tokens that the student may generate."""
        logits_nV = logits_of(states_nH.to(head.weight.device), head)[:, : self.host.limits.vocabulary]
        logits_nV[:, self.host.placeholders] = -torch.inf
        return logits_nV.log_softmax(-1)

    def _add(self, draft: _Draft, ids_n: Tensor, log_student_nV: Tensor, log_teacher_nV: Tensor) -> None:
        """Keeps what stands of a block, and what the teacher writes in place of the next token."""
        ids_n = ids_n.to(log_student_nV.device)
        stands = [*self._stands(draft, ids_n, log_teacher_nV), False]
        kept, replaces = (tokens := stands.index(False)) + (tokens < len(ids_n)), tokens < len(ids_n)
        if replaces:
            ids_n[tokens] = torch.multinomial(log_teacher_nV[tokens].cpu().double().exp(), 1, generator=draft.random)
        ids_n, drawn_nV = ids_n[:kept], self._drawn(log_student_nV[:kept], log_teacher_nV[:kept])
        draft.ids += ids_n.tolist()
        draft.authors += [int(Author.STUDENT)] * tokens + [int(Author.TEACHER)] * replaces
        draft.logprobs += drawn_nV.gather(1, ids_n[:, None]).squeeze(1).tolist()
        draft.reads += kept > 0
        has_ended = not kept or draft.ids[-1] in self.host.eos_token_ids
        draft.room = 0 if has_ended else draft.room - kept


@final
@dataclass
class Blend(_Together):
    """Draws each token from a mixture of the student's and the teacher's distribution (blended sampling, arXiv
    2605.31159).

    Args:
        teacher (`float`): Weight of the teacher's distribution, above 0; at 1 it writes alone.
        until_step (`int`, *optional*): Steps after which the student writes alone. When `None`, it never does.
        block (`int`, *optional*, defaults to 16): Most tokens that the student writes before the teacher reads them.
    """

    teacher: Share

    def _most(self, draft: _Draft) -> int:
        coins = draft.coins[len(draft.ids) :]
        return next((number for number, coin in enumerate(coins, start=1) if coin < self.teacher), len(coins))

    def _stands(self, draft: _Draft, ids_n: Tensor, log_teacher_nV: Tensor) -> list[bool]:
        start = len(draft.ids)
        return [coin >= self.teacher for coin in draft.coins[start : start + len(ids_n)]]

    def _drawn(self, log_student_nV: Tensor, log_teacher_nV: Tensor) -> Tensor:
        log_rest = math.log1p(-self.teacher) if self.teacher < 1 else -math.inf
        return torch.logaddexp(log_student_nV + log_rest, log_teacher_nV + math.log(self.teacher))


@final
@dataclass
class Speculative(_Together):
    """The student proposes tokens; one that is not among the teacher's likeliest is replaced by a draw from the
    teacher's distribution (speculative knowledge distillation, arXiv 2410.11325).

    Args:
        top_k (`int`, *optional*, defaults to 25): How many of the teacher's likeliest tokens stand.
        until_step (`int`, *optional*): Steps after which the student writes alone. When `None`, it never does.
        block (`int`, *optional*, defaults to 16): Tokens that the student proposes at a time.
    """

    top_k: Natural = 25

    def _most(self, draft: _Draft) -> int:
        return self.block

    def _among(self, log_teacher_nV: Tensor) -> Tensor:
        """[n, V], whether tokens are among the teacher's likeliest."""
        least_n1 = log_teacher_nV.topk(min(self.top_k, log_teacher_nV.size(1))).values[:, -1:]
        return log_teacher_nV >= least_n1

    def _stands(self, draft: _Draft, ids_n: Tensor, log_teacher_nV: Tensor) -> list[bool]:
        return self._among(log_teacher_nV).gather(1, ids_n[:, None]).squeeze(1).tolist()

    def _drawn(self, log_student_nV: Tensor, log_teacher_nV: Tensor) -> Tensor:
        among_nV = self._among(log_teacher_nV)
        log_rest_n1 = log_student_nV.masked_fill(among_nV, -torch.inf).logsumexp(1, keepdim=True)
        return torch.logaddexp(log_student_nV.masked_fill(~among_nV, -torch.inf), log_rest_n1 + log_teacher_nV)
