"""A server that scores tokens, in this process: what a [`ServedTeacher`] asks, answered by a model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from trl_opsd.teacher.answers import Row, Tokens
from trl_opsd.teacher.served import ServedTeacher

OFFERS = ("student_top_k", "teacher_top_k")


class Scores:
    """Answers as a `TeacherServer` does."""

    api, url, name, context = "a model in this process", "http://here", "a model", None

    def __init__(self, model: Any, offers: Sequence[str] = OFFERS, limit: int | None = None):
        self.model, self.limits = model.eval(), dict.fromkeys(offers, limit)
        self.asked: list[list[int]] = []

    @torch.no_grad()
    def start(self, answers: Tokens, row: Row) -> Future[Tensor]:
        self.asked.append(list(row.ids))
        before_n = torch.tensor(row.places) - 1
        log_nV = self.model(input_ids=torch.tensor([row.ids])).logits[0, before_n].log_softmax(-1)
        own_n1 = torch.tensor(row.ids)[before_n + 1][:, None]
        wanted = [torch.tensor(row.wanted)] if row.wanted else []
        ids_nM = torch.cat([own_n1, *wanted, log_nV.topk(answers._teacher_k).indices], 1)
        again_nM = torch.stack([(ids_nM[:, :at] == ids_nM[:, at : at + 1]).any(1) for at in range(ids_nM.size(1))], 1)
        ids_nM = ids_nM.masked_fill(again_nM, -1)
        logs_nM = log_nV.gather(1, ids_nM.clamp(min=0)).masked_fill(ids_nM < 0, -torch.inf)
        found: Future[Tensor] = Future()
        found.set_result(answers.packed(row, ids_nM, logs_nM))
        return found


def known_teacher(model: Any, targets: str, top_k: int | None = None, **given: Any) -> ServedTeacher:
    """A teacher of which servers tell some tokens."""
    server, rows = Scores(model, **given), model.get_output_embeddings().weight.size(0)
    answers = Tokens(server, targets, "nowhere", {}, torch.device("cpu"), rows, top_k)
    return ServedTeacher("nowhere", server, answers)
