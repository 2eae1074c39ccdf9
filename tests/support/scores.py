"""Servers that score tokens, in this process: what [`KnownTeacher`] asks, answered by a model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from trl_opsd.teacher.known import KnownTeacher

OFFERS = ("student_top_k", "teacher_top_k")


class Scores:
    """Answers as a `TokenServer` does."""

    api, url, noise, context = "a model in this process", "http://here", 0.0, None

    def __init__(
        self, model: Any, offers: Sequence[str] = ("student_top_k", "teacher_top_k"), limit: int | None = None
    ):
        self.model, self.limits, self.missing = model.eval(), dict.fromkeys(offers, limit), {}
        self.asked: list[list[int]] = []

    def warn_of_name(self, path: str, compared: str) -> None:
        pass

    def prove(self, vocabulary: int, student_k: int, teacher_k: int) -> Tensor:
        return torch.zeros(1, 1)

    @torch.no_grad()
    def start(self, ids: Sequence[int], places: Sequence[int], wanted: Tensor | None, top_k: int) -> Any:
        self.asked.append(list(ids))
        before_n = torch.tensor(places) - 1
        log_nV = self.model(input_ids=torch.tensor([ids])).logits[0, before_n].log_softmax(-1)
        known = [torch.tensor(ids)[before_n + 1][:, None], log_nV.topk(top_k).indices]
        ids_nM = torch.cat(known if wanted is None else [known[0], wanted, *known[1:]], 1)
        again_nM = torch.stack([(ids_nM[:, :at] == ids_nM[:, at : at + 1]).any(1) for at in range(ids_nM.size(1))], 1)
        ids_nM = ids_nM.masked_fill(again_nM, -1)
        logs_nM = log_nV.gather(1, ids_nM.clamp(min=0)).masked_fill(ids_nM < 0, -torch.inf)
        found: Future[tuple[Tensor, Tensor]] = Future()
        found.set_result((ids_nM, logs_nM))
        return found


def known_teacher(model: Any, targets: str, top_k: int | None = None, **given: Any) -> KnownTeacher:
    """A teacher of which servers tell some tokens."""
    rows = model.get_output_embeddings().weight.size(0)
    return KnownTeacher("nowhere", Scores(model, **given), targets, top_k, torch.device("cpu"), rows)
