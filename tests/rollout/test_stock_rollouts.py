"""Servers as anybody starts them generate for a student: an adapter is sent to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from support import serving, tiny
from transformers import TrainerCallback

pytest.importorskip("vllm")

from vllm_lab import by_hf, lora, student

from trl_opsd.errors import SyncError

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stock") / "student"
    student(folder, tied=False, seed=5)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving.taking_adapters(path, tmp_path_factory.mktemp("log") / "log") as (url, _):
        yield url


@pytest.fixture
def trainer_with(make_trainer: Any, server: str) -> Any:
    """Builds a trainer with an adapter, of a checkpoint, that generates with the server."""
    where = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server, "vllm_max_model_length": 192}
    options = {"max_completion_length": 12, "learning_rate": 5e-2, "max_steps": 5}
    return lambda path, **given: make_trainer(model=path, rollout=None, peft_config=lora(), **where, **options, **given)


class EachStep(TrainerCallback):
    """What is said after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        prompts = self.trainer.tokenize(tiny.PROMPTS)
        self.said = [*getattr(self, "said", ()), self.trainer.complete(prompts)]
        assert self.said[-1] == by_hf(self.trainer, prompts)


def test_greedy_tokens_are_the_students_after_each_step(trainer_with, tmp_path, path, server):
    trainer, each = trainer_with(path, top_k=1), EachStep()
    each.trainer = trainer
    trainer.add_callback(each)
    trainer.train()
    assert len({json.dumps(one) for one in each.said}) > 2, "the adapter has changed what is said"
    assert max(tiny.logged(trainer, "rollout/logprob_gap")) < 1e-4
    (size,) = {*tiny.logged(trainer, "sync/bytes")}
    assert size == sum(one.nbytes for name, one in trainer.model.named_parameters() if "lora_" in name)
    loaded = [one["id"] for one in requests.get(f"{server}/v1/models", timeout=10).json()["data"]][1:]
    assert loaded == [trainer.rollout.server.adapter], "those before are unloaded"
    trainer.rollout.close()
    assert len(requests.get(f"{server}/v1/models", timeout=10).json()["data"]) == 1
    assert not list((tmp_path / "_served_adapters").glob("*")), "nothing is left on the disk"


def test_another_base_is_found_by_the_proof(trainer_with, tmp_path):
    student(tmp_path / "another", tied=False, seed=6)
    tiny.tokenizer().save_pretrained(tmp_path / "another")
    trainer = trainer_with(str(tmp_path / "another"))
    with pytest.raises(SyncError, match="disagree"):
        trainer.train()
    trainer.rollout.close()
