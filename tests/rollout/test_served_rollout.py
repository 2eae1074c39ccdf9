"""A server generates for a student, and may die: one with SGLang's protocol around a model in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from support import tiny
from test_sglang_client import INFO, Server
from told_server import running

from trl_opsd import OPSDTrainer
from trl_opsd.errors import ServerError

CONTEXT = 120


class Engine(Server):
    """SGLang's protocol around a model that is sent weights and generates greedily."""

    def __init__(self) -> None:
        super().__init__()
        self.answers["/server_info"] = (200, {**INFO, "page_size": 4, "max_req_input_len": CONTEXT - 6})
        self.model = tiny.qwen2(seed=9)
        self.rows: list[tuple[int, ...]] = []
        """Prompts that were completed, but those of proofs."""
        self.dies_after = float("inf")
        """Rows until it only hangs up."""
        self.lock = threading.Lock()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if len(self.rows) >= self.dies_after:
            raise ConnectionAbortedError  # the connection is closed without an answer
        found = super().answer(path, body)
        if path == "/end_weight_update" and self.received:
            self.model.load_state_dict(self.received)
        return found

    @torch.no_grad()
    def row(self, ids: list[int], sampling: dict[str, Any], logprobs: bool, start: int) -> dict[str, Any]:
        with self.lock:
            if not sampling["ignore_eos"]:
                if len(self.rows) >= self.dies_after:
                    raise ConnectionAbortedError
                self.rows.append(tuple(ids))
            whole, past, scores = list(ids), None, torch.empty(0)
            for _ in range(sampling["max_new_tokens"]):
                out = self.model(torch.tensor([whole[len(scores) :]]), past_key_values=past, use_cache=True)
                past, scores = out.past_key_values, torch.cat([scores, out.logits[0].log_softmax(-1)])
                whole.append(int(scores[-1].argmax()))
                if whole[-1] in sampling["stop_token_ids"]:
                    break
        found = super().row(ids, sampling, logprobs, start)
        found["output_ids"] = written = whole[len(ids) :]
        if written[-1:] and written[-1] in sampling["stop_token_ids"]:
            found["meta_info"]["finish_reason"] = {"type": "stop", "matched": written[-1]}
        if logprobs:
            of = [None, *(float(scores[place, token]) for place, token in enumerate(whole[1:]))]
            entries = [[score, token, None] for score, token in zip(of, whole, strict=True)]
            found["meta_info"]["output_token_logprobs"] = entries[len(ids) :]
            found["meta_info"]["input_token_logprobs"] = entries[: len(ids)] if start == 0 else []
        return found


@pytest.fixture
def engine() -> Iterator[Engine]:
    with running(Engine()) as made:
        yield made


@pytest.fixture
def serve(engine: Engine, make_trainer: Callable[..., OPSDTrainer]) -> Iterator[Callable[..., OPSDTrainer]]:
    """Builds a trainer that generates greedily with it."""
    made: list[OPSDTrainer] = []

    def serve(**given: Any) -> OPSDTrainer:
        options = {"sglang_server_url": engine.url, "vllm_server_timeout": 0.0, "vllm_max_model_length": CONTEXT}
        options |= {"max_completion_length": 6, "top_k": 1, "learning_rate": 1e-2, **given}
        made.append(make_trainer(model=tiny.qwen2(seed=3), rollout=None, **options))
        return made[-1]

    yield serve
    for trainer in made:
        with suppress(ServerError):
            trainer.rollout.close()


def greedy(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    """What a server with the student's weights completes."""
    alone = Engine()
    alone.model = trainer.accelerator.unwrap_model(trainer.model)
    sampling = {"max_new_tokens": 6, "stop_token_ids": list(trainer.eos_token_ids), "ignore_eos": False}
    rows = [alone.row(ids, sampling, False, -1)["output_ids"] for ids in prompts]
    alone.server_close()
    return rows


def stir(trainer: OPSDTrainer) -> None:
    with torch.no_grad():
        for part in trainer.model.parameters():
            part.mul_(1.1)


def complete(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    return trainer.rollout.complete(prompts, 0)


def stream(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    return [ids for _, ids in sorted(trainer.rollout.stream(prompts, 0))]


def singly(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    ask = trainer.rollout.one_by_one(prompts, 0)
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts)), prompts))


@pytest.mark.parametrize("ask", [complete, stream, singly])
def test_rows_are_the_students_and_follow_its_weights(serve, engine, ask):
    trainer = serve()
    prompts = trainer.tokenize(tiny.PROMPTS)
    for _ in range(2):
        assert ask(trainer, prompts) == greedy(trainer, prompts)
        stir(trainer)
    assert set(engine.rows) == {tuple(ids) for ids in prompts}


@pytest.mark.parametrize("overlap", [None, "step", "ahead"])
def test_a_server_that_dies_ends_the_run_and_is_named(serve, engine, overlap):
    engine.dies_after = 3
    trainer = serve(overlap=overlap, gradient_accumulation_steps=2)
    began = time.monotonic()
    with pytest.raises(ServerError, match=rf"SGLang server at {engine.url}.*failed"):
        trainer.train()
    assert time.monotonic() - began < 20
    assert len(engine.rows) == 3
