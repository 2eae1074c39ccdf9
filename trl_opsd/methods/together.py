"""Completions that student and teacher write together: the student proposes blocks of tokens, which the teacher reads.

n tokens of a block · B rows · C completion tokens · V vocabulary · H hidden width; log-probabilities in nats
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled

from trl_opsd._compat.sharding import gathered_head, whole_head
from trl_opsd._compat.values import Natural, Share
from trl_opsd._compat.versions import replaced
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow, Complete
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
    """A completion that is being written; its row has the authors and log-probabilities of the tokens."""

    row: BatchRow
    context: list[int]
    """The student's prompt, with the given beginning of the completion."""
    room: int
    """Maximum number of tokens that may follow; 0 once it has ended."""
    random: torch.Generator
    """Draws the teacher's tokens, by seed, step and place of the row; the student draws with torch's own."""
    coins: list[float]
    """Uniform in [0, 1), one for each token."""
    ids: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _Together(Method):
    """The teacher reads each block once, and writes the first token that it does not leave to the student."""

    until_step: Natural | None = None
    block: Natural = 16

    by_token = needs_whole = True
    _share = 0.0
    """Probability that the teacher writes a token, whatever the student proposes."""
    metrics: ClassVar = {
        "together/teacher": Metric("1", "Share of the generated tokens that the teacher wrote.", _LOGS),
        "together/reads": Metric("1", "Forward passes of the teacher per completion while generating.", _LOGS),
    }

    @abstractmethod
    def _mixed(self, log_student_nV: Tensor, log_teacher_nV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the tokens in the result, and whether each stands if the student proposes it; [n, V]."""

    def check(self, args: Any, teachers: Sequence[str]) -> None:
        others = [*drawn_otherwise(args), *([] if args.temperature == 1 else [f"temperature={args.temperature}"])]
        url, is_sharded = "teacher_server_url", is_deepspeed_zero3_enabled() or is_fsdp_enabled()
        refuse(
            (is_met, f"`{type(self).__name__}` with {beside}", why)
            for is_met, beside, why in (
                (args.teacher_server_url is not None, shown(args, url), "a server would be asked for each block"),
                (is_sharded, "ZeRO-3 or FSDP", "each process needs the whole student; use DDP or ZeRO-2"),
                (bool(others), f"`{', '.join(others)}`", "both draw from whole distributions at temperature 1"),
            )
        )

    def complete(self, rows: Sequence[BatchRow], prompt_ids: list[list[int]], alone: Complete) -> list[list[int]]:
        host, step, reads = self.host, self.host.state.global_step, 0
        if self.until_step is not None and step >= self.until_step:
            return alone(prompt_ids)
        drafts = []
        for row, ids in zip(rows, prompt_ids, strict=True):
            room = min(host.limits.room(len(ids)), host.generation_config.max_new_tokens)
            random = torch.Generator().manual_seed(derived_seed(host.args.seed, step, row.place, _SALT))
            drafts.append(_Draft(row, ids, room, random, torch.rand(room, generator=random).tolist()))
            row.authors, row.logprobs = [], []
        # Teachers may be collective, so a process that has ended goes through the motions until all have.
        while host.accelerator.gather(torch.tensor([any(one.room for one in drafts)], device=host.model.device)).any():
            going = [one for one in drafts if one.room]
            self._go_on(going or drafts[:1], alone)
            reads += len(going)
        authors = [author for one in drafts if not one.row.is_padding for author in one.row.authors or ()]
        if authors:
            host.record("together/teacher", authors.count(Author.TEACHER) / len(authors))
            host.record("together/reads", reads / len(drafts))
        return [one.ids for one in drafts]

    def _go_on(self, drafts: list[_Draft], alone: Complete) -> None:
        """Adds a block to each draft."""
        host, rows, most = self.host, [one.row for one in drafts], []
        for one in drafts:
            coins = one.coins[len(one.ids) :][: self.block] if one.room else []
            most.append(next((place + 1 for place, coin in enumerate(coins) if coin < self._share), len(coins)))
        with replaced(host.generation_config, max_new_tokens=max(*most, 1)):
            proposed = alone([one.context + one.ids for one in drafts])
        blocks = [ids[:tokens] for ids, tokens in zip(proposed, most, strict=True)]
        begun = [[*one.row.given.ids, *one.ids] for one in drafts]
        rollout = host.padded(
            [one.context[: len(one.context) - len(one.row.given.ids)] for one in drafts],
            [ids + block for ids, block in zip(begun, blocks, strict=True)],
            # What stands already has no weight, as if it were an environment's.
            [[0] * len(ids) + [1] * len(block) for ids, block in zip(begun, blocks, strict=True)],
        )
        rollout = replace(rollout, authors=None, images=images_of(rows))
        with preserved_mode(host.model), torch.no_grad(), autocast(host.accelerator):
            with host.phase("teach"):
                targets = host.teach(rollout, rows)
            heads, size = host.teaching.teachers.heads, host.args.per_device_train_batch_size
            host.model.eval()
            with whole_head(host.model) as head, gathered_head(*heads):
                heads = [one.to(head.weight.device) for one in heads]  # several that are offloaded are in host memory
                for first in range(0, len(drafts), size):  # as many rows as fit into memory in training
                    some = range(len(drafts))[first : first + size]
                    hidden_BCH = completion_hidden(host.model, rollout.select(some).cut(), host.batching)
                    for number, hidden_CH in zip(some, hidden_BCH, strict=True):
                        places_n = torch.arange(len(begun[number]), len(begun[number]) + len(blocks[number]))
                        student_nV = self._log_probabilities(hidden_CH[places_n.to(hidden_CH.device)], head)
                        its = heads[0 if targets.teacher is None else int(targets.teacher[number])]
                        teacher_nV = self._log_probabilities(targets.of(number, places_n).to(student_nV.device), its)
                        self._add(drafts[number], blocks[number], student_nV, teacher_nV)

    def _log_probabilities(self, states_nH: Tensor, head: OutputHead) -> Tensor:
        """[n, V], of the tokens that the student may generate."""
        logits_nV = logits_of(states_nH, head)[:, : self.host.limits.vocabulary]
        logits_nV[:, self.host.placeholders] = -torch.inf
        return logits_nV.log_softmax(-1)

    def _add(self, draft: _Draft, block: list[int], log_student_nV: Tensor, log_teacher_nV: Tensor) -> None:
        """Keeps what stands of a block, and what the teacher writes in place of the next token."""
        drawn_nV, stands_nV = self._mixed(log_student_nV, log_teacher_nV)
        places, coins = list(range(len(block))), draft.coins[len(draft.ids) :]
        stands = [one and coins[place] >= self._share for place, one in enumerate(stands_nV[places, block].tolist())]
        kept = stands.index(False) if False in stands else len(block)
        ids, authors = block[:kept], [int(Author.STUDENT)] * kept
        if kept < len(block):
            teacher_V = log_teacher_nV[kept].cpu().double().exp()
            ids.append(int(torch.multinomial(teacher_V, 1, generator=draft.random)))
            authors.append(int(Author.TEACHER))
        draft.ids += ids
        draft.row.authors = [*(draft.row.authors or ()), *authors]
        draft.row.logprobs = [*(draft.row.logprobs or ()), *drawn_nV[places[: len(ids)], ids].tolist()]
        draft.room = 0 if not ids or ids[-1] in self.host.eos_token_ids else draft.room - len(ids)


@final
@dataclass
class Blend(_Together):
    """Draws each token from a mixture of the student's and the teacher's distribution (arXiv 2605.31159).

    Args:
        teacher (`float`): Weight of the teacher's distribution; at 1 the teacher writes all.
        until_step (`int`, *optional*): Optimizer steps after which the student generates alone; `None` is never.
        block (`int`, *optional*, defaults to 16): Maximum tokens the student proposes per forward pass of the teacher.
    """

    teacher: Share

    @property
    def _share(self) -> float:  # type: ignore[override]
        return self.teacher

    def _mixed(self, log_student_nV: Tensor, log_teacher_nV: Tensor) -> tuple[Tensor, Tensor]:
        log_rest = math.log1p(-self.teacher) if self.teacher < 1 else -math.inf
        drawn_nV = torch.logaddexp(log_student_nV + log_rest, log_teacher_nV + math.log(self.teacher))
        return drawn_nV, torch.ones_like(drawn_nV, dtype=torch.bool)


@final
@dataclass
class Speculative(_Together):
    """Keeps the student's tokens that are among the teacher's likeliest, and replaces others by samples from the
    teacher (speculative knowledge distillation, arXiv 2410.11325).

    Args:
        top_k (`int`, *optional*, defaults to 25): Number of the teacher's likeliest tokens accepted from the student.
        until_step (`int`, *optional*): Optimizer steps after which the student generates alone; `None` is never.
        block (`int`, *optional*, defaults to 16): Maximum tokens the student proposes per forward pass of the teacher.
    """

    top_k: Natural = 25

    def _mixed(self, log_student_nV: Tensor, log_teacher_nV: Tensor) -> tuple[Tensor, Tensor]:
        least_n1 = log_teacher_nV.topk(min(self.top_k, log_teacher_nV.size(1))).values[:, -1:]
        stands_nV = log_teacher_nV >= least_n1
        log_rest_n1 = log_student_nV.masked_fill(stands_nV, -torch.inf).logsumexp(1, keepdim=True)
        stands_by_nV = log_student_nV.masked_fill(~stands_nV, -torch.inf)
        return torch.logaddexp(stands_by_nV, log_rest_n1 + log_teacher_nV), stands_nV
