"""Servers as anybody starts them generate for a student: an adapter is sent to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from support import serving, tiny
from transformers import TrainerCallback

pytest.importorskip("vllm")

from vllm_lab import by_hf, lora, student

from trl_opsd import OPSDTrainer
from trl_opsd.errors import ServerError, SyncError

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


def trainer_with(folder: Path, path: str, url: str, **given: Any) -> OPSDTrainer:
    options = {"max_completion_length": 12, "learning_rate": 5e-2, "max_steps": 5, **given}
    args = tiny.config(
        folder, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, vllm_max_model_length=192, **options
    )
    return OPSDTrainer(
        model=path,
        teacher_model=tiny.qwen2(48, seed=1),
        args=args,
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        peft_config=lora(),
    )


class EachStep(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.call(state.global_step)


def test_greedy_tokens_are_the_students_after_each_step(tmp_path, path, server):
    trainer, said = trainer_with(tmp_path, path, server, top_k=1), []

    def look(_: int) -> None:
        prompts = trainer.tokenize(tiny.PROMPTS)
        said.append(trainer.complete(prompts))
        assert said[-1] == by_hf(trainer, prompts)

    trainer.add_callback(EachStep(look))
    trainer.train()
    assert len({json.dumps(one) for one in said}) > 2, "the adapter has changed what is said"
    assert max(tiny.logged(trainer, "rollout/logprob_gap")) < 1e-4
    (size,) = {*tiny.logged(trainer, "sync/bytes")}
    assert size == sum(one.nbytes for name, one in trainer.model.named_parameters() if "lora_" in name)
    loaded = [one["id"] for one in requests.get(f"{server}/v1/models", timeout=10).json()["data"]][1:]
    assert loaded == [trainer.rollout.server.adapter], "those before are unloaded"
    trainer.rollout.close()
    assert len(requests.get(f"{server}/v1/models", timeout=10).json()["data"]) == 1
    assert not list((tmp_path / "_served_adapters").glob("*")), "nothing is left on the disk"
    with pytest.raises(ServerError, match="the rollout was closed"):
        trainer.complete(trainer.tokenize(tiny.PROMPTS))


def test_an_adapter_replaced_in_place_reads_stale_blocks(tmp_path, path, server):
    """What names of their own avoid: blocks of the prefix cache that an earlier adapter has computed."""
    trainer = trainer_with(tmp_path, path, server, max_steps=1)
    trainer.train()
    folder = tmp_path / "_served_adapters" / trainer.rollout.server.adapter
    again = tmp_path / "again"
    again.mkdir()
    (again / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    ids = [3 + place % 40 for place in range(150)]  # longer than a block

    def scores(name: str, **asked: Any) -> list[float]:
        body = {"model": name, "prompt": ids, "max_tokens": 8, "temperature": 0.0, "logprobs": 0, "seed": 0, **asked}
        answer = requests.post(f"{server}/v1/completions", json=body, timeout=60).json()
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    def load(name: str, factor: float, at: Path, **asked: Any) -> None:
        at.mkdir(exist_ok=True)
        (at / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
        changed = {key: one + factor * torch.randn(one.shape, generator=torch.Generator().manual_seed(1))
                   for key, one in tensors.items()}  # fmt: skip
        save_file(changed, at / "adapter_model.safetensors")
        body = {"lora_name": name, "lora_path": str(at), **asked}
        requests.post(f"{server}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()

    load("same", 0.5, again)
    first = scores("same")
    load("same", -0.5, again, load_inplace=True)
    stale = scores("same")
    load("other", -0.5, tmp_path / "other")
    fresh = scores("other")
    gap = max(abs(one - other) for one, other in zip(stale, fresh, strict=True))
    print(f"{gap:.3g} nats between the same adapter with stale blocks and without")
    assert gap > 0.01
    assert max(abs(one - other) for one, other in zip(first, fresh, strict=True)) > 0.01
    for name in ("same", "other"):
        requests.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)
    trainer.rollout.close()


def test_another_base_is_found_by_the_proof(tmp_path, server):
    student(tmp_path / "another", tied=False, seed=6)
    tiny.tokenizer().save_pretrained(tmp_path / "another")
    trainer = trainer_with(tmp_path, str(tmp_path / "another"), server)
    with pytest.raises(SyncError, match="disagree"):
        trainer.train()
    trainer.rollout.close()
