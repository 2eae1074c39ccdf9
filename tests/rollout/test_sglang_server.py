"""A real SGLang server generates for the student as `generate` does, with the weights of each step.

Run by `make test-sglang`, which builds an environment for it; not part of `make test`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import tiny
import torch

pytest.importorskip("vllm")

from processes import SECONDS, launch
from server_lab import CONTEXT
from test_vllm_sync import Watch
from vllm_lab import by_hf, gap, lora, student, two_end_tokens

from trl_opsd import OPSDTrainer
from trl_opsd._compat import weight_group
from trl_opsd.rollout import sglang as backend
from trl_opsd.rollout import sglang_client, weight_sync
from trl_opsd.rollout.sglang_client import SGLangClient
from trl_opsd.run.errors import ServerError, SyncError

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with a tied head, for all tests that leave it alive."""
    import sglang_lab

    with sglang_lab.running(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def serve(server: Any, make: Callable[..., OPSDTrainer]) -> Iterator[Callable[..., OPSDTrainer]]:
    """Builds a trainer that generates with the server."""
    made: list[OPSDTrainer] = []

    def serve(**given: Any) -> OPSDTrainer:
        for before in made:
            before.rollout.close()
        made.append(make(tied=True, **{**server.options, **given}))
        return made[-1]

    yield serve
    for trainer in made:
        trainer.rollout.close()


def alive(server: Any) -> bool:
    return requests.get(f"{server.url}/health", timeout=60).status_code == 200


def stir(trainer: OPSDTrainer, factor: float = 1.3) -> None:
    with torch.no_grad():
        for part in trainer.model.parameters():
            part.mul_(factor)


def test_tokens_of_a_server_equal_those_of_generate(serve, tmp_path):
    model = student(tmp_path / "student", tied=True)
    free = serve(model=model, top_k=1)
    prompts = free.tokenize(tiny.PROMPTS)
    unended = free.complete(prompts)
    assert unended == by_hf(free, prompts)
    assert len({len(ids) for ids in prompts}) > 3, "the prompts are ragged"
    assert len({tuple(ids) for ids in unended}) == len(prompts), "each has a completion of its own"

    words, end_ids = two_end_tokens(model, unended)
    trainer = serve(model=model, processing_class=words, top_k=1)
    completions = trainer.rollout.complete(prompts, 0)
    assert {ids[-1] for ids in completions if ids[-1] in trainer.eos_token_ids} == end_ids
    assert completions == by_hf(trainer, prompts), "ended by the server itself, not cut afterwards"


def test_a_completion_ends_with_the_context_of_the_server(serve, caplog):
    trainer = serve(top_k=1)
    longest = trainer.rollout._engine.facts.longest_prompt
    assert longest == CONTEXT - 7
    prompts = [[7], [5] * (longest - 9), [5] * longest, [5] * (longest + 1), [5] * (CONTEXT - 1)]
    rows = trainer.rollout.complete(prompts, 0)
    assert [len(row) for row in rows] == [16, 14, 5, 0, 0]
    expected = by_hf(trainer, prompts)
    assert all(row == full[: len(row)] for row, full in zip(rows, expected, strict=True))
    assert f"2 prompts of a batch have more than {longest} tokens" in caplog.text


@pytest.mark.parametrize("kind", ["everything", "adapter"])
def test_a_server_has_the_weights_of_each_step(serve, kind):
    watch = Watch()
    trainer = serve(max_steps=3, peft_config=None if kind == "everything" else lora(), callbacks=[watch])
    watch.attach(trainer)
    before = {name: part.detach().clone() for name, part in trainer.model.named_parameters()}
    trainer.train()

    assert len(watch.stale) == 3
    assert min(watch.stale) > 1e-2, "every step moves the student enough to show in a server without it"
    assert max(watch.synced) <= 1e-4
    logged = [row for row in trainer.state.log_history if "sync/bytes" in row]
    assert len(logged) == 3
    assert max(row["rollout/logprob_gap"] for row in logged) <= 1e-4
    print(f"\nSGLang, {kind}: gaps after three syncs {[f'{one:.1e}' for one in watch.synced]}, seconds of a sync "
          f"{[round(row['sync/seconds'], 3) for row in logged]}")  # fmt: skip
    whole = sum(weight.base.nbytes for weight in weight_sync.weights_of(trainer.model))
    assert {row["sync/bytes"] for row in logged} == {whole}
    for name, part in trainer.model.named_parameters():
        assert part.requires_grad or torch.equal(part, before[name]), name

    trainer.rollout.close()
    again = serve(model=trainer.model)
    again.complete(again.tokenize(["a"]))
    assert gap(again) <= 1e-4, "another training with the same server"


@pytest.mark.parametrize(("shape", "tied"), [("llama", False)])
def test_other_families_are_synced_and_written_alike(make, tmp_path_factory, shape, tied):
    import sglang_lab

    with sglang_lab.running(tmp_path_factory.mktemp(shape), shape, tied) as server:
        trainer = make(shape=shape, tied=tied, top_k=1, **server.options)
        prompts = trainer.tokenize(tiny.PROMPTS)
        for _ in range(3):
            assert trainer.complete(prompts) == by_hf(trainer, prompts)
            assert gap(trainer) <= 1e-4
            stir(trainer, 1.1)
        trainer.rollout.close()


def test_weights_are_sent_in_parts(serve, monkeypatch):
    sent = []
    send = SGLangClient._send
    monkeypatch.setattr(sglang_client, "BUCKET_BYTES", 30_000)
    monkeypatch.setattr(SGLangClient, "_send", lambda self, *given: (sent.append(len(given[2])), send(self, *given)))
    trainer = serve()
    trainer.complete(trainer.tokenize(["a"]))
    assert len(sent) > 5
    assert max(sent) > 1
    assert gap(trainer) <= 1e-4


def test_weights_that_do_not_arrive_are_detected(serve, monkeypatch):
    trainer = serve(peft_config=lora())
    prompt = trainer.tokenize(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(backend, "weights_of", weight_sync.base_weights_of)
        with pytest.raises(SyncError, match="It looks like a missing adapter"):
            trainer.complete(prompt)
    trainer.complete(prompt)
    stir(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(SGLangClient, "update", lambda self, weights: None)
        with pytest.raises(SyncError, match="It looks stale"):
            trainer.complete(prompt)
    trainer.complete(prompt)
    assert gap(trainer) <= 1e-4, "and it does not count as sent"

    with monkeypatch.context() as patch:
        patch.setattr(SGLangClient, "forget_prefixes", lambda self: None)
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight.mul_(1.3)
            trainer.model.get_input_embeddings().weight[5:].mul_(-1)
        with pytest.raises(SyncError, match="It looks like a stale prefix cache"):
            trainer.complete(prompt)


def test_rows_that_others_weights_wrote_are_refused(serve, make, server):
    trainer = serve()
    prompt = trainer.tokenize(["a"])
    trainer.complete(prompt)
    other = make(tied=True, **server.options)
    other.complete(prompt)
    other.rollout.close()
    with pytest.raises(ServerError, match="something else has sent it weights"):
        trainer.complete(prompt)


def test_a_session_that_a_killed_run_left_open_is_ended(serve, server):
    opened = requests.post(f"{server.url}/begin_weight_update", json={}, timeout=60)
    assert opened.json()["success"]
    trainer = serve()
    trainer.complete(trainer.tokenize(["a"]))
    assert gap(trainer) <= 1e-4


def test_what_would_end_the_server_is_not_sent(serve, server):
    trainer = serve()
    engine, options = trainer.rollout._engine, [{"max_tokens": 2}] * 2
    for bad, message in (([], "is empty"), ([259], "id 259"), ([-1], "id -1"), ([5, None], "id None")):
        with pytest.raises(ValueError, match=f"Prompt 1 of a batch .*{message}"):
            engine.write([[5], bad], options)
    assert alive(server)
    assert len(engine.write([[5], [258]], options)) == 2, "the last id that the student knows"


def test_another_model_is_refused_before_it_is_asked_anything(make, server, tmp_path):
    wider = student(tmp_path / "wider", tied=True, vocab_size=300)
    with pytest.raises(ValueError, match="knows fewer ids than the student, which has 300"):
        make(model=wider, **server.options)
    assert alive(server)


def test_options_reach_a_server(serve):
    trainer = serve(temperature=1.9, generation_kwargs={"min_new_tokens": 16})
    prompts = trainer.tokenize(tiny.PROMPTS)
    hot = trainer.complete(prompts * 4)
    assert all(len(ids) == 16 for ids in hot)
    assert max(map(max, hot)) >= 100
    trainer.rollout.close()
    trainer.readers = replace(trainer.readers, student_limits=replace(trainer.limits, vocabulary=100))
    trainer.rollout = backend.SGLangRollout(trainer.args)
    assert max(map(max, trainer.rollout.complete(prompts * 4, 0))) < 100, "ids no tokenizer knows"

    biased = serve(generation_kwargs={"logit_bias": {"77": 1e6}})
    assert {token for ids in biased.complete(prompts) for token in ids} == {77}
    cold = serve(generation_kwargs={"temperature": 0.0})
    greedy = serve(model=cold.model, top_k=1)
    assert cold.rollout is not greedy.rollout
    assert greedy.complete(prompts) == by_hf(greedy, prompts)
    never = serve(generation_kwargs={"ignore_eos": True})
    assert all(len(ids) == 16 for ids in never.complete(prompts))


def test_rows_come_as_they_end_and_are_given_up_when_weights_are_sent(serve):
    trainer = serve(top_k=1, max_completion_length=150)
    prompts = trainer.tokenize(tiny.PROMPTS)
    trainer.complete(prompts[:1])
    rows = [*prompts, [5] * (CONTEXT - 20), [5] * (CONTEXT - 2)]
    expected = by_hf(trainer, rows)
    numbered = dict(trainer.rollout.stream(rows, 0))
    assert sorted(numbered) == list(range(len(rows)))
    assert [numbered[row] for row in range(len(prompts))] == expected[: len(prompts)]
    assert numbered[len(rows) - 1] == [], "there was no room for any"
    order = [number for number, _ in trainer.rollout.stream(rows, 0)]
    assert order[:2] == [len(rows) - 1, len(rows) - 2], "the shortest come first"

    taken = trainer.rollout.stream(rows[:-1], 0)
    assert next(taken)[0] == len(prompts), "and the others are under way"
    stir(trainer)
    start = time.monotonic()
    assert dict(trainer.rollout.stream(prompts, 0)) == dict(enumerate(by_hf(trainer, prompts)))
    print(f"\n{time.monotonic() - start:.1f} s to give up rows, sync and write")
    assert gap(trainer) <= 1e-4, "the prefix cache was reset, although rows had been under way"
    with pytest.raises(RuntimeError, match=rf"{len(prompts)} of {len(prompts) + 1} rows were given up"):
        list(taken)


def test_the_context_of_the_server_has_to_be_known(serve):
    with pytest.raises(ValueError, match=f"takes {CONTEXT} tokens .* set `vllm_max_model_length={CONTEXT}`"):
        serve(vllm_max_model_length=None)


def test_a_server_that_ends_is_an_error_at_once(make, tmp_path_factory):
    import sglang_lab

    with sglang_lab.running(tmp_path_factory.mktemp("killed")) as server:
        trainer = make(tied=True, **server.options)
        prompts = trainer.tokenize(tiny.PROMPTS)
        trainer.complete(prompts)
        send, began = weight_group.WeightGroup.send, []

        def killed(self: Any, tensor: torch.Tensor, seconds: float) -> Any:
            began.append(send(self, tensor, seconds))
            if len(began) == 3:
                server.stop()
            return began[-1]

        stir(trainer)
        start = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_group.WeightGroup, "send", killed)
            with pytest.raises(ServerError, match="The SGLang server, asked for"):
                trainer.complete(prompts)
        with pytest.raises(ServerError, match="begin the training anew"):
            trainer.complete(prompts)
        print(f"\n{time.monotonic() - start:.1f} s until both errors")
        assert time.monotonic() - start < 20
        trainer.rollout.close()


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS + 60)
def test_processes_with_unequal_prompts_get_their_own_completions(server, tmp_path):
    student(tmp_path / "student", tied=True, seed=7)
    launch("fsdp2", HERE / "sglang_served.py", tmp_path, json.dumps(server.options))
    results = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    print(f"\n{results}")
    for found in results:
        assert found["processes"] == 2
        assert found["split"]
        assert found["completions"] == found["expected"]
        assert len(found["gaps"]) == 4, "before each of three steps, and after the last"
        assert max(found["gaps"]) <= 1e-4
    assert [len(found["completions"]) for found in results] == [3, 1]
    assert len({tuple(ids) for found in results for ids in found["completions"]}) == 4, "they can be told apart"
    assert "has the id 1000" in results[0]["error"], "the other process asked for it"
    assert results[1]["error"] == results[0]["error"], "although only the main process talks to the server"
