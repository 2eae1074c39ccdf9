"""A vLLM server generates for the student as an engine in the process does; weights are sent over TCP, not NCCL."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import torch
from support import serving, tiny
from transformers import TrainerCallback

pytest.importorskip("vllm")

import tcp_transfer
from alike import Alike
from vllm_lab import by_hf, lora, student

from trl_opsd._compat.http import HTTPClient
from trl_opsd.rollout import vllm_server, weight_sync
from trl_opsd.rollout.vllm_server import VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


class TestVLLM(Alike):
    client, sender, sends, least = VLLMServer, vllm_server._Sender, "_post", "min_tokens"


def test_a_port_in_use_is_refused(serve, make, server):
    first = serve(top_k=1)
    with pytest.raises(ValueError, match=r"close the rollout of the trainer that does"):
        make(tied=True, **server)
    prompts = first.tokenize(["a"])
    assert first.complete(prompts) == by_hf(first, prompts), "which is undisturbed"
    assert set(tcp_transfer.met_at) == {"127.0.0.1"}, "weights do not pass a public address"
    first.rollout.close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"`vllm_group_port={port}`, to which the vLLM server connects"):
            make(tied=True, **{**server, "vllm_group_port": port})


def test_a_server_in_another_precision_is_warned_about(serve, monkeypatch, caplog):
    read = VLLMServer.__init__

    def told_another(self, *given):
        read(self, *given)
        self.dtype = torch.bfloat16

    monkeypatch.setattr(VLLMServer, "__init__", told_another)
    trainer = serve()
    assert "computes in torch.bfloat16, but the student in torch.float32" in caplog.text
    assert "start the server with `--dtype float32`" in caplog.text
    trainer.complete(trainer.tokenize(tiny.PROMPTS))
    whole = sum(weight.base.nbytes for weight in weight_sync.weights_of(trainer.model))
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    assert logged["sync/bytes"] == [whole / 2], "rounded before sending"
    assert logged["rollout/logprob_gap"][0] > 1e-4, "checked at the precision of the server"


def test_a_pattern_reaches_a_server_and_rows_of_other_prompts_are_refused(serve, monkeypatch):
    trainer = serve(vllm_structured_outputs_regex="[0-9]{3}", generation_kwargs={"seed": 3})
    prompts = trainer.tokenize(tiny.PROMPTS)
    texts = trainer.processing_class.batch_decode(trainer.complete(prompts), skip_special_tokens=True)
    assert all(len(text) == 3 and text.isdigit() for text in texts), texts

    post_each = HTTPClient.post_each

    def swapped(self, path, bodies, read):
        others = [{**one, "prompt": other["prompt"]} for one, other in zip(bodies, bodies[::-1], strict=True)]
        return post_each(self, path, others, read)

    monkeypatch.setattr(HTTPClient, "post_each", swapped)
    with pytest.raises(RuntimeError, match=r"For row 0 .* the vLLM server returned another prompt"):
        trainer.complete(prompts)
    with pytest.raises(RuntimeError, match=r"For row \d of this batch the vLLM server returned another prompt"):
        list(trainer.rollout.stream(prompts, 0))


# ---- Rows that are taken as they end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["deterministic", "full_determinism"])
def test_rows_have_seeds_where_generations_have_to_repeat(serve, monkeypatch, tmp_path, asked):
    undecided = student(tmp_path / "student", tied=True)
    with torch.no_grad():
        undecided.get_output_embeddings().weight.mul_(0.05)
    trainer = serve(model=undecided, eval_dataset=tiny.rows(4))
    rollout, prompts = trainer.rollout, [trainer.tokenize(["a"])[0]] * 4
    assert len({trainer.evaluate()["eval_divergence/mean"] for _ in range(2)}) == 1
    trainer.model.train()
    assert not any("seed" in one for one in rollout._prepared(prompts)), "which rule out vLLM's fused sampler"

    monkeypatch.setattr(trainer.args, asked, True)
    torch.manual_seed(3)
    options = rollout._prepared(prompts)
    ways = [lambda: dict(rollout.stream(prompts, 0)), lambda: dict(enumerate(rollout.complete(prompts, 0)))]
    for rows in ways:
        torch.manual_seed(3)  # a resume restores it
        first, later = rows(), rows()
        assert len({tuple(ids) for found in (first, later) for ids in found.values()}) == 8
        (alone,) = rollout.engine.write([prompts[2]], [options[2]])
        assert alone.completion_ids == first[2], "whatever is generated beside it"
    alike = serve(model=undecided, generation_kwargs={"seed": 3}).rollout.stream(prompts, 0)
    assert len({tuple(ids) for _, ids in alike}) == 1


def test_streamed_rows_have_sampling_log_probabilities_the_loss_reads(serve):
    trainer = serve(divergence="sampled_reverse_kl")
    trainer.model.train()
    prompts = trainer.tokenize(tiny.PROMPTS)
    for number, completion in trainer.rollout.stream(prompts, 0):
        found = trainer.rollout.logprobs(prompts[number], completion)
        with torch.no_grad():
            ids = torch.tensor([prompts[number] + completion])
            logits = trainer.model(ids).logits
        logprobs = logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), logprobs[-len(completion) :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["skip_reading_prefix_cache", "logprobs"])
def test_an_option_that_cannot_work_with_a_server_is_refused(serve, name):
    with pytest.raises(ValueError, match=rf"`generation_kwargs=\{{'{name}': 2\}}`"):
        serve(generation_kwargs={name: 2})


# ---- Servers as anybody starts them, to which an adapter is sent -----------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stock") / "student"
    student(folder, tied=False, seed=5)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def stock(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving.taking_adapters(path, tmp_path_factory.mktemp("log") / "log") as (url, _):
        yield url


@pytest.fixture
def with_adapter(make_trainer: Any, stock: str) -> Any:
    """Builds a trainer with an adapter, of a checkpoint, that generates with the server."""
    where = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stock, "vllm_max_model_length": 192}
    options = {"max_completion_length": 12, "learning_rate": 5e-2, "max_steps": 5}
    return lambda path, **given: make_trainer(model=path, rollout=None, peft_config=lora(), **where, **options, **given)


class EachStep(TrainerCallback):
    """What is said after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        prompts = self.trainer.tokenize(tiny.PROMPTS)
        self.said = [*getattr(self, "said", ()), self.trainer.complete(prompts)]
        assert self.said[-1] == by_hf(self.trainer, prompts)


@pytest.mark.long
def test_greedy_tokens_are_the_students_after_each_step(with_adapter, tmp_path, path, stock):
    trainer, each = with_adapter(path, top_k=1), EachStep()
    each.trainer = trainer
    trainer.add_callback(each)
    trainer.train()
    assert len({json.dumps(one) for one in each.said}) > 2, "the adapter has changed what is said"
    assert max(tiny.logged(trainer, "rollout/logprob_gap")) < 1e-4
    (size,) = {*tiny.logged(trainer, "sync/bytes")}
    assert size == sum(one.nbytes for name, one in trainer.model.named_parameters() if "lora_" in name)
    loaded = [one["id"] for one in requests.get(f"{stock}/v1/models", timeout=10).json()["data"]][1:]
    assert loaded == [trainer.rollout.server.adapter], "those before are unloaded"
    trainer.rollout.close()
    assert len(requests.get(f"{stock}/v1/models", timeout=10).json()["data"]) == 1
    assert not list((tmp_path / "_served_adapters").glob("*")), "nothing is left on the disk"
