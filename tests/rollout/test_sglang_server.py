"""A real SGLang server generates for the student as `generate` does, with the weights of each step.

Run by `make test-sglang`, which builds an environment for it; not part of `make test`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from support import serving, tiny

pytest.importorskip("vllm")

from alike import Alike
from server_lab import CONTEXT
from vllm_lab import by_hf, gap, lora, move, student

from trl_opsd._compat import weight_group
from trl_opsd.errors import ServerError
from trl_opsd.rollout import weight_sync
from trl_opsd.rollout.sglang import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@dataclass
class Server:
    """A running server."""

    process: Popen[bytes]
    options: dict[str, Any]
    """Config options that point to it."""

    def stop(self) -> None:
        """Ends it with all of its processes, whatever they are doing."""
        serving.end(self.process, seconds=0)


@contextmanager
def sglang(folder: Path, shape: str = "qwen2", tied: bool = True, *further: str) -> Iterator[Server]:
    """A server of a random student; starting it takes about 17 seconds."""
    student(folder / "student", shape, tied=tied, seed=5)
    tiny.tokenizer().save_pretrained(folder / "student")
    flags = ("--context-length", CONTEXT, "--max-total-tokens", 8192, "--max-running-requests", 16, *further)
    with serving.sglang(str(folder / "student"), folder / "log", *map(str, flags)) as (url, process):
        options = {"use_vllm": False, "sglang_server_url": url, "vllm_max_model_length": CONTEXT}
        server = Server(process, options)
        yield server
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Config options that point to an SGLang server with a tied head, for all tests that leave it alive."""
    with sglang(tmp_path_factory.mktemp("served")) as running:
        yield running.options


class TestSGLang(Alike):
    client, sender, sends, least = SGLangServer, SGLangServer, "_call", "min_new_tokens"

    @pytest.fixture(autouse=True)
    def _in_parts(self, monkeypatch):
        monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 30_000)

    def test_a_later_trainer_takes_the_server_from_an_unclosed_one(self, serve, make, server, tmp_path):
        first = serve(top_k=1)
        prompts = first.tokenize(["a"])
        first.complete(prompts)
        second = make(tied=True, model=student(tmp_path / "other", tied=True, seed=9), top_k=1, **server)
        second.complete(prompts)
        assert gap(second) <= 1e-4
        with pytest.raises(ServerError, match="another program sent it weights"):
            first.complete(prompts)
        second.rollout.close()


def test_a_completion_ends_with_the_context_of_the_server(serve):
    trainer = serve(top_k=1)
    longest = CONTEXT - 7
    prompts = [[7], [5] * (longest - 9), [5] * longest, [5] * (longest + 1), [5] * (CONTEXT - 1)]
    rows = trainer.rollout.complete(prompts, 0)
    assert [len(row) for row in rows] == [16, 14, 5, 0, 0]
    expected = by_hf(trainer, prompts)
    assert all(row == full[: len(row)] for row, full in zip(rows, expected, strict=True))


@pytest.mark.parametrize(("shape", "tied"), [("llama", False)])
def test_other_families_are_synced_and_written_alike(make, tmp_path_factory, shape, tied):
    with sglang(tmp_path_factory.mktemp(shape), shape, tied) as server:
        trainer = make(shape=shape, tied=tied, top_k=1, **server.options)
        prompts = trainer.tokenize(tiny.PROMPTS)
        for _ in range(3):
            assert trainer.complete(prompts) == by_hf(trainer, prompts)
            assert gap(trainer) <= 1e-4
            move(trainer, 1.1)
        trainer.rollout.close()


def test_options_of_its_own_reach_a_server(serve):
    biased = serve(generation_kwargs={"logit_bias": {"77": 1e6}})
    prompts = biased.tokenize(tiny.PROMPTS)
    assert {token for ids in biased.complete(prompts) for token in ids} == {77}
    cold = serve(generation_kwargs={"temperature": 0.0})
    assert cold.complete(prompts) == by_hf(serve(model=cold.model, top_k=1), prompts)
    never = serve(generation_kwargs={"ignore_eos": True})
    assert all(len(ids) == 16 for ids in never.complete(prompts))


def test_a_server_that_exits_is_an_error_at_once(make, tmp_path_factory):
    with sglang(tmp_path_factory.mktemp("killed")) as server:
        trainer = make(tied=True, **server.options)
        prompts = trainer.tokenize(tiny.PROMPTS)
        trainer.complete(prompts)
        send, began = weight_group.WeightGroup.send, []

        def killed(self: Any, tensor: torch.Tensor, seconds: float) -> Any:
            began.append(send(self, tensor, seconds))
            if len(began) == 3:
                server.stop()
            return began[-1]

        move(trainer)
        start = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_group.WeightGroup, "send", killed)
            with pytest.raises(ServerError, match="The SGLang server at"):
                trainer.complete(prompts)
        with pytest.raises(ServerError, match=r"is disconnected.*restart the training"):
            trainer.complete(prompts)
        assert time.monotonic() - start < 20
        trainer.rollout.close()


def test_adapters_are_sent_in_the_request_after_each_step(make_trainer, tmp_path_factory):
    flags = ("--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "all", "--lora-backend", "torch_native")
    folder = tmp_path_factory.mktemp("lora")
    with sglang(folder, "qwen2", False, *flags) as server:
        options = {**server.options, "vllm_weight_sync": "adapter", "max_completion_length": 12, "top_k": 1}
        trainer = make_trainer(model=str(folder / "student"), rollout=None, peft_config=lora(), **options)
        prompts, said = trainer.tokenize(tiny.PROMPTS), []
        for step in range(5):
            said.append(trainer.complete(prompts))
            assert said[-1] == by_hf(trainer, prompts)
            torch.manual_seed(step)
            with torch.no_grad():
                for part in (one for name, one in trainer.model.named_parameters() if "lora_" in name):
                    part.add_(0.3 * torch.randn_like(part))
        assert len({str(one) for one in said}) > 2, "the adapter has changed what is said"
        trainer.rollout.close()
