"""Tests of a trainer with a server of either kind, which `test_vllm_server.py` and `test_sglang_server.py` run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tcp_transfer
import torch
import vllm_lab
from server_lab import CONTEXT
from support import forks, tiny
from test_vllm_sync import Watch
from vllm_lab import by_hf, check_goes_on, gap, lora, move, student, two_end_tokens

from trl_opsd._compat.sharding import is_split_model
from trl_opsd.errors import ServerError, SyncError
from trl_opsd.rollout import weight_sync
from trl_opsd.rollout.served import ServedRollout


class Alike:
    """Tests with a fixture `serve`, which builds trainers, and `server`, the options that point to the server."""

    client: ClassVar[type[Any]]
    sender: ClassVar[type[Any]]
    sends: ClassVar[str]
    """The class and its method that send requests for weight syncs."""
    least: ClassVar[str]
    """The option with the fewest tokens of a completion."""

    def test_tokens_of_a_server_equal_those_of_generate(self, serve, tmp_path):
        model = student(tmp_path / "student", tied=True)
        with torch.no_grad():  # a tied student as it was made repeats the last token, whatever its other weights are
            for name, part in model.named_parameters():
                if "embed" not in name and part.dim() == 2:
                    part.mul_(10)
        free = serve(model=model, top_k=1)
        prompts = free.tokenize(tiny.PROMPTS)
        unended = free.complete(prompts)
        assert unended == by_hf(free, prompts)
        assert len({len(ids) for ids in prompts}) > 3, "the prompts are ragged"
        assert len({tuple(ids) for ids in unended}) == len(prompts), "each has a completion of its own"
        assert min(len(set(ids)) for ids in unended) > 4, "and of different tokens"

        words, end_ids = two_end_tokens(model, unended)
        trainer = serve(model=model, processing_class=words, top_k=1)
        completions = trainer.rollout.complete(prompts, 0)
        assert {ids[-1] for ids in completions if ids[-1] in trainer.eos_token_ids} == end_ids
        assert completions == by_hf(trainer, prompts), "ended by the server itself, not cut afterwards"

    def test_rows_go_on_after_their_beginnings(self, serve):
        check_goes_on(serve(top_k=1))

    def test_options_and_unknown_ids_reach_a_server(self, serve):
        trainer = serve(temperature=1.9, generation_kwargs={self.least: 16})
        prompts = trainer.tokenize(tiny.PROMPTS) * 4
        hot = trainer.complete(prompts)
        assert all(len(ids) == 16 for ids in hot)
        assert max(map(max, hot)) >= 100
        trainer.rollout.close()
        trainer.teaching.readers = replace(trainer.readers, student_limits=replace(trainer.limits, vocabulary=100))
        trainer.rollout = ServedRollout(trainer.args, self.client)
        assert max(map(max, trainer.rollout.complete(prompts, 0))) < 100, "ids no tokenizer knows"

    def test_rows_come_as_they_end_until_weights_are_sent(self, serve):
        trainer = serve(top_k=1, max_completion_length=150)
        prompts = trainer.tokenize(tiny.PROMPTS)
        trainer.complete(prompts[:1])
        rows, last = [*prompts, [5] * (CONTEXT - 20)], len(prompts)
        found = dict(trainer.rollout.stream(rows, 0))
        assert sorted(found) == list(range(len(rows)))
        assert [found[row] for row in range(last)] == by_hf(trainer, prompts)
        assert [*found].index(last) < last, "asked for last, and short: some row is still under way"

        left, taken = trainer.rollout.stream(prompts[:4], 0), trainer.rollout.stream(rows, 0)
        next(taken)
        move(trainer)
        assert dict(trainer.rollout.stream(prompts, 0)) == dict(enumerate(by_hf(trainer, prompts)))
        assert gap(trainer) <= 1e-4, "the prefix cache was reset, although rows had been under way"
        for stream, dropped, of in ((left, 4, 4), (taken, last, len(rows))):
            with pytest.raises(RuntimeError, match=f"{dropped} of {of} rows were dropped"):
                list(stream)

    @pytest.mark.parametrize("kind", ["everything", "adapter"])
    def test_a_server_has_the_weights_of_each_step(self, serve, kind):
        watch = Watch()
        trainer = serve(max_steps=3, peft_config=None if kind == "everything" else lora(), callbacks=[watch])
        watch.attach(trainer)
        before = {name: part.detach().clone() for name, part in trainer.model.named_parameters()}
        trainer.train()

        assert len(watch.stale) == 3
        assert min(watch.stale) > 1e-2, "every step moves the student enough to show in a server without it"
        assert max(watch.synced) <= 1e-4
        assert max(tiny.logged(trainer, "rollout/logprob_gap")) <= 1e-4
        assert min(tiny.logged(trainer, "sync/seconds") + tiny.logged(trainer, "sync/proof_seconds")) > 0
        whole = sum(weight.base.nbytes for weight in weight_sync.weights_of(trainer.model))
        assert tiny.logged(trainer, "sync/bytes") == [whole] * 3
        for name, part in trainer.model.named_parameters():
            assert part.requires_grad or torch.equal(part, before[name]), name
        assert not any(getattr(module, "merged", False) for module in trainer.model.modules())

    def test_weights_that_do_not_arrive_are_detected(self, serve, monkeypatch):
        trainer = serve(peft_config=lora())
        prompt = trainer.tokenize(["a"])
        with monkeypatch.context() as patch:
            patch.setattr(self.client, "weights", lambda self, model: weight_sync.base_weights_of(model))
            with pytest.raises(SyncError, match="disagree by"):
                trainer.complete(prompt)
        trainer.complete(prompt)
        move(trainer)
        with monkeypatch.context() as patch:
            patch.setattr(self.client, "update", lambda self, stream: None)
            with pytest.raises(SyncError, match="disagree by"):
                trainer.complete(prompt)
        trainer.complete(prompt)
        assert gap(trainer) <= 1e-4, "and it does not count as sent"

        with monkeypatch.context() as patch:
            patch.setattr(self.client, "reset_prefixes", lambda self: None)
            with torch.no_grad():
                trainer.model.get_output_embeddings().weight.mul_(1.3)
                trainer.model.get_input_embeddings().weight[5:].mul_(-1)
            with pytest.raises(SyncError, match="disagree by"):
                trainer.complete(prompt)

    # ---- One trainer after the other -------------------------------------------------------------------------------

    def test_a_failed_bind_keeps_no_connection(self, serve, make, server):
        serve().rollout.close()
        for _ in range(2):
            with pytest.raises(
                ValueError, match=f"context is {CONTEXT} tokens,.* set `vllm_max_model_length={CONTEXT}`"
            ):
                make(tied=True, **{**server, "vllm_max_model_length": None})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.sender, self.sends, connected_in_vain(getattr(self.sender, self.sends)))
            with pytest.raises(ServerError, match="after all") as failure:
                make(tied=True, **server)
        trainer = serve()
        trainer.complete(trainer.tokenize(["a"]))
        assert gap(trainer) <= 1e-4
        assert failure.tb, "which holds what was built, so that it was closed and not collected"

    def test_agents_rows_are_asked_singly_from_any_thread(self, serve):
        trainer = serve(top_k=1, max_completion_length=20)
        prompts = trainer.tokenize(tiny.PROMPTS)
        ask = trainer.rollout.one_by_one(prompts, 0)
        with ThreadPoolExecutor() as threads:
            first = list(threads.map(ask, range(len(prompts)), prompts))
            assert first == by_hf(trainer, prompts)
            more = [prompt + ids[:3] for prompt, ids in zip(prompts, first, strict=True)]  # what follows has less room
            second = list(threads.map(ask, range(len(prompts)), more))
        assert second == [ids[3:] for ids in first]
        trainer.rollout.close()
        trainer.rollout.close()
        rollout = trainer.rollout
        for ask in (rollout.complete, rollout.stream, rollout.one_by_one):
            with pytest.raises(ServerError, match=r"is disconnected.* the rollout was closed"):
                ask(prompts, 0)

    # ---- What is sent ----------------------------------------------------------------------------------------------

    @pytest.mark.distributed
    @pytest.mark.timeout(forks.SECONDS + 60)
    def test_processes_with_unequal_prompts_get_their_own_completions(self, server, tmp_path):
        student(tmp_path / "student", tied=True, seed=7)
        results = [*forks.results("fsdp2_cpu", in_two, tmp_path, server).values()]
        for found in results:
            assert found["processes"] == 2
            assert found["split"]
            assert found["completions"] == found["expected"] == found["streamed"]
            assert len(found["gaps"]) == 4, "before each of three steps, and after the last"
            assert max(found["gaps"]) <= 1e-4
        assert [len(found["completions"]) for found in results] == [3, 1]
        assert [found["beside none"] for found in results] == [[], results[1]["completions"]]
        assert len({tuple(ids) for found in results for ids in found["completions"]}) == 4, "they can be told apart"
        assert len({seed for found in results for seed in found["seeds"]}) == 4
        assert "temperature" in results[0]["error"], "the other process asked for it"
        assert results[1]["error"] == results[0]["error"], "which no process waits for"


def connected_in_vain(sends: Callable[..., Any]) -> Callable[..., Any]:
    """A method in place of that which sends requests: the one that connects does, and fails."""

    def send(self: Any, where: str, *given: Any, **asked: Any) -> Any:
        found = sends(self, where, *given, **asked)
        if "init_weight" in where:
            raise ServerError("the server cannot after all")
        return found

    return send


def in_two(folder: Path, server: dict[str, object]) -> dict[str, Any]:
    """In one of two processes with a sharded student: both generate with one server and return the completions."""
    tcp_transfer.use(pytest.MonkeyPatch())
    teacher = tiny.qwen2(48, seed=1)  # before there is a DeepSpeed config, so that it stays whole
    options = {"top_k": 1, "learning_rate": 2e-3, "per_device_train_batch_size": 1, **server}
    trainer = vllm_lab.trainer(
        folder, model=str(folder / "student"), teacher_model=teacher, peft_config=lora(), **options
    )
    trainer.train()
    process = trainer.accelerator.process_index
    prompts = trainer.tokenize(tiny.PROMPTS[:3] if process == 0 else tiny.PROMPTS[3:4])
    found: dict[str, Any] = {
        "processes": trainer.accelerator.num_processes,
        "split": is_split_model(trainer.accelerator.unwrap_model(trainer.model_wrapped)),
        "completions": trainer.complete(prompts),
        "expected": by_hf(trainer, prompts),
        "beside none": trainer.complete(prompts if process == 1 else []),
        "gaps": [*tiny.logged(trainer, "rollout/logprob_gap"), trainer.rollout._proof.check()],
    }
    rows = trainer.rollout.stream(prompts, 3)
    if process == 0:  # takes none before the other has all: nothing is collective any more
        deadline = time.monotonic() + 60
        while not (folder / "taken").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    found["streamed"] = [ids for _, ids in sorted(rows)]
    (folder / "taken").touch()
    trainer.model.eval()
    found["seeds"] = [one["seed"] for one in trainer.rollout._prepared(prompts)]
    try:
        # Only the other process asks for what is refused; the main one gets the error.
        trainer.rollout.write([[5]], [{"max_tokens": 4, "temperature": -float(process)}])
    except ServerError as error:
        found["error"] = str(error)
    trainer.rollout.close()
    return found
