"""Rows for a teacher behind servers, and what their targets have to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import tiny

from trl_opsd.teacher import FrozenTeacher, Resident
from trl_opsd.teacher.answers import States, Tokens
from trl_opsd.teacher.served import ServedTeacher
from trl_opsd.teacher.servers import TeacherServer
from trl_opsd.types import Rollout
from trl_opsd.types.known import KnownTokens

CPU, V, K = torch.device("cpu"), tiny.VOCABULARY, 8


def rows(number: int = 6, seed: int = 0) -> Rollout:
    """Ragged rows: one twice, one of which nothing counts, one with a token of a tool in it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (number, 12), generator=generator)
    prompt, completion = ids[:, :5], ids[:, 5:]
    prompt_mask, mask = torch.ones_like(prompt), torch.ones_like(completion)
    for row in range(number):
        prompt_mask[row, : row % 4] = 0
        mask[row, 2 + row % 5 :] = 0
    prompt[1], prompt_mask[1], completion[1], mask[1] = prompt[0], prompt_mask[0], completion[0], mask[0]
    weights = mask.float()
    weights[2] = 0
    weights[3, 1] = 0
    return Rollout(
        prompt_ids=prompt, prompt_mask=prompt_mask, completion_ids=completion, completion_mask=mask, weights=weights
    )


def proposed(number: int = 6, seed: int = 0) -> Rollout:
    """Rows with candidates at each token: 7 that follow from the place, and the token itself."""
    rollout = rows(number, seed)
    ids_BC1 = rollout.completion_ids[:, :, None]
    others_BC7 = (ids_BC1 + 31 * torch.arange(1, 8)) % V
    return replace(rollout, candidates=torch.cat([others_BC7, ids_BC1], 2))


def states_teacher(path: str, url: str, deadline: float = 20.0, timeout: float = 0.0) -> ServedTeacher:
    """A teacher whose server returns states, compared with its checkpoint."""
    server = TeacherServer(url, deadline, timeout)
    teacher = ServedTeacher(path, server, States(path, {}, CPU))
    teacher.check_predictions({})
    return teacher


def tokens_teacher(path: str, url: str, targets: str = "both_top_k", top_k: int | None = K) -> ServedTeacher:
    """The same for a server that tells log-probabilities of tokens."""
    server = TeacherServer(url, 60.0, 0.0)
    server.look(tiny.tokenizer())
    teacher = ServedTeacher(path, server, Tokens(server, targets, path, {}, CPU, V, top_k))
    teacher.check_predictions({})
    return teacher


def check_equal(teacher: ServedTeacher, model: Any, rollout: Rollout) -> None:
    """The targets of a served teacher are those of the model in this process, which reads row by row, as servers do."""
    local = FrozenTeacher(Resident(model, CPU))
    here = [local.targets(rollout.select([row])).rows[0] for row in range(len(rollout.weights))]
    for one, two in zip(here, teacher.targets(rollout).rows, strict=True):
        assert torch.equal(one.places, two.places)
        assert one.hidden.shape == two.hidden.shape
        torch.testing.assert_close(one.hidden, two.hidden, rtol=1e-5, atol=1e-5)


def check_known(teacher: ServedTeacher, model: Any, rollout: Rollout, targets: str = "both_top_k") -> None:
    """Each row's tokens, log-probabilities and rest are those of the model that reads the row alone."""
    found = teacher.targets(rollout).rows
    lists = zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)
    for number, (prompt, completion) in enumerate(lists):
        places = rollout.counts[number].nonzero().flatten().tolist()
        assert found[number].places.tolist() == places
        with torch.no_grad():
            logs_LV = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)
        told = KnownTokens.unpack(found[number].hidden)
        for row, place in enumerate(places):
            own, log_V = completion[place], logs_LV[len(prompt) + place - 1]
            ids = {
                *(rollout.candidates[number, place].tolist() if targets != "teacher_top_k" else [own]),
                *(log_V.topk(K).indices.tolist() if targets != "student_top_k" else [own]),
            }
            assert {*told.ids[row].tolist()} == ids
            assert int(told.ids[row, 0]) == own
            torch.testing.assert_close(told.logprobs[row], log_V[told.ids[row]], rtol=1e-6, atol=1e-6)
            rest = (1 - log_V[[*ids]].double().exp().sum()).log()
            assert float(told.rest[row]) == pytest.approx(float(rest), abs=1e-5)
