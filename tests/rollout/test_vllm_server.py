"""A vLLM server generates for the student as an engine in the process does; weights are sent over TCP, not NCCL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

pytest.importorskip("vllm")

import tcp_transfer
from processes import SECONDS, launch
from server_lab import CONTEXT, free_port
from test_vllm_sync import Watch
from vllm_lab import by_hf, gap, lora, student, two_end_tokens

from trl_opsd.rollout import vllm_server as backend
from trl_opsd.rollout import weight_sync
from trl_opsd.rollout.asking import Asking
from trl_opsd.rollout.server_client import ServerClient
from trl_opsd.run.errors import SyncError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


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

    nearly_full = [prompts[0], [5] * (CONTEXT - 3)]
    assert trainer.rollout.complete(nearly_full, 0) == by_hf(trainer, nearly_full), "each row has its own room"
    assert set(tcp_transfer.met_at) == {"127.0.0.1"}, "weights do not pass a public address"


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
    print(f"\nserver, {kind}: {max(watch.synced):.1e}")
    logged = [row for row in trainer.state.log_history if "sync/bytes" in row]
    assert len(logged) == 3
    assert max(row["rollout/logprob_gap"] for row in logged) <= 1e-4
    assert all(row["sync/seconds"] > 0 and row["sync/proof_seconds"] > 0 for row in logged)
    whole = sum(weight.base.nbytes for weight in weight_sync.weights_of(trainer.model))
    assert {row["sync/bytes"] for row in logged} == {whole}
    for name, part in trainer.model.named_parameters():
        assert part.requires_grad or torch.equal(part, before[name]), name
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())

    trainer.rollout.close()
    again = serve(model=trainer.model)
    again.complete(again.tokenize(["a"]))
    assert gap(again) <= 1e-4, "another training with the same server"


def test_weights_that_do_not_arrive_are_detected(serve, monkeypatch):
    trainer = serve(peft_config=lora())
    prompt = trainer.tokenize(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(backend, "weights_of", weight_sync.base_weights_of)
        with pytest.raises(SyncError, match="It looks like a missing adapter"):
            trainer.complete(prompt)
    trainer.complete(prompt)
    with torch.no_grad():
        for part in trainer.model.parameters():
            part.mul_(1.3)
    with monkeypatch.context() as patch:
        patch.setattr(ServerClient, "update_named_params", lambda self, announced, weights: None)
        with pytest.raises(SyncError, match="It looks stale"):
            trainer.complete(prompt)
    trainer.complete(prompt)
    assert gap(trainer) <= 1e-4, "and it does not count as sent"

    with monkeypatch.context() as patch:
        patch.setattr(ServerClient, "forget_prefixes", lambda self: None)
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight.mul_(1.3)
            trainer.model.get_input_embeddings().weight[5:].mul_(-1)
        with pytest.raises(SyncError, match="It looks like a stale prefix cache"):
            trainer.complete(prompt)


def test_a_server_in_another_precision_is_warned_about(serve, monkeypatch, caplog):
    facts = ServerClient.facts
    monkeypatch.setattr(ServerClient, "facts", lambda self: replace(facts(self), dtype=torch.bfloat16))
    trainer = serve()
    assert "computes in torch.bfloat16 and the student in torch.float32" in caplog.text
    assert "start the server with `--dtype float32`" in caplog.text
    trainer.complete(trainer.tokenize(tiny.PROMPTS))
    whole = sum(weight.base.nbytes for weight in weight_sync.weights_of(trainer.model))
    logged = trainer._metrics[trainer._mode]
    assert logged["sync/bytes"] == [whole / 2], "rounded before sending"
    assert logged["rollout/logprob_gap"][0] > 1e-4, "checked at the precision of the server"


def test_options_reach_a_server(serve, monkeypatch):
    trainer = serve(vllm_structured_outputs_regex="[0-9]{3}", generation_kwargs={"seed": 3})
    prompts = trainer.tokenize(tiny.PROMPTS)
    texts = trainer.processing_class.batch_decode(trainer.complete(prompts), skip_special_tokens=True)
    assert all(len(text) == 3 and text.isdigit() for text in texts), texts

    write = ServerClient.write
    monkeypatch.setattr(ServerClient, "write", lambda self, ids, options: write(self, ids[::-1], options))
    with pytest.raises(RuntimeError, match=r"For row 0 .* the vLLM server answered another prompt"):
        trainer.complete(prompts)
    monkeypatch.undo()

    tcp_transfer.use(monkeypatch)
    free = serve(temperature=1.9, generation_kwargs={"min_tokens": 16})
    hot = free.complete(prompts * 4)
    assert all(len(ids) == 16 for ids in hot)
    assert max(map(max, hot)) >= 100
    free.rollout.close()
    free.readers = replace(free.readers, student_limits=replace(free.limits, vocabulary=100))
    free.args.vllm_group_port = free_port()
    free.rollout = backend.VLLMServerRollout(free.args)
    assert max(map(max, free.rollout.complete(prompts * 4, 0))) < 100, "ids no tokenizer knows"


# ---- Rows that are taken as they end ---------------------------------------------------------------------------------


def test_rows_of_a_server_come_as_they_end(serve):
    trainer = serve(top_k=1, max_completion_length=120)
    prompts = [*trainer.tokenize(tiny.PROMPTS), [5] * (CONTEXT - 2)]
    rows = list(trainer.rollout.stream(prompts, 0))
    assert sorted(row for row, _ in rows) == list(range(len(prompts)))
    order, long = [row for row, _ in rows], [row for row, ids in rows if len(ids) > 60]
    assert long, "there are rows to be ahead of"
    short = order.index(len(prompts) - 1)  # asked for last, with room for two tokens
    assert short < min(map(order.index, long)), "written at the same time as those that were asked for before"
    assert dict(rows) == dict(enumerate(trainer.rollout.complete(prompts, 0)))


def test_a_sampled_row_depends_on_its_seed_alone(serve, monkeypatch, tmp_path):
    undecided = student(tmp_path / "student", tied=True)
    with torch.no_grad():
        undecided.get_output_embeddings().weight.mul_(0.05)
    trainer = serve(model=undecided)
    rollout, seeds = trainer.rollout, []
    write_each = Asking.write_each

    def recording(self, prompt_ids, options):
        seeds.append([one["seed"] for one in options])
        return write_each(self, prompt_ids, options)

    monkeypatch.setattr(Asking, "write_each", recording)
    prompts = [trainer.tokenize(["a"])[0]] * 4
    first, again, later = (dict(rollout.stream(prompts, step)) for step in (3, 3, 4))
    assert len({seed for of_one in seeds for seed in of_one}) == 12, "of each row, use and step"
    assert len({tuple(ids) for rows in (first, again, later) for ids in rows.values()}) == 12
    alone = rollout._engine.write([prompts[2]], [{**rollout._sampling, "max_tokens": 16, "seed": seeds[0][2]}])
    assert alone[0].completion_ids == first[2]

    trainer.loads += 1  # resumed at step 3
    assert dict(rollout.stream(prompts, 3)) == first
    assert dict(rollout.stream(prompts, 3)) == again
    assert dict(rollout.stream(prompts, 4)) == later
    trainer.loads += 1  # the best checkpoint, after training; then another training
    rollout.stream(prompts[:1], 0), rollout.stream(prompts[:1], 0)
    assert len({of_one[0] for of_one in seeds[-2:]}) == 2

    given = serve(generation_kwargs={"seed": 3})
    list(given.rollout.stream(prompts, 0))
    assert seeds[-1] == [3] * 4


def test_rows_can_have_the_log_probabilities_that_they_were_written_with(serve):
    trainer = serve(temperature=1.5)
    prompts = trainer.tokenize(tiny.PROMPTS)
    assert all(not row.logprobs for _, row in trainer.rollout.stream_completions(prompts, 0))
    for number, row in trainer.rollout.stream_completions(prompts, 0, logprobs=True):
        assert row.prompt_ids == prompts[number]
        with torch.no_grad():
            ids = torch.tensor([row.prompt_ids + row.completion_ids])
            logits = trainer.model.eval()(ids).logits / 1.5  # the server was started with `processed_logprobs`
        logprobs = logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), logprobs[-len(row.completion_ids) :], rtol=0, atol=1e-4)


def test_weights_end_a_stream_so_that_no_row_has_two_states(serve):
    trainer = serve(top_k=1, max_completion_length=150)
    prompts = trainer.tokenize(tiny.PROMPTS)
    left, taken = trainer.rollout.stream(prompts, 0), trainer.rollout.stream([*prompts, [5] * (CONTEXT - 2)], 0)
    assert next(taken)[0] == len(prompts), "and the others are under way"
    with torch.no_grad():
        for part in trainer.model.parameters():
            part.mul_(1.3)
    assert dict(trainer.rollout.stream(prompts, 0)) == dict(enumerate(by_hf(trainer, prompts)))
    assert gap(trainer) <= 1e-4, "the prefix cache was reset, although rows had been under way"
    for stream, rows in ((left, len(prompts)), (taken, len(prompts) + 1)):
        with pytest.raises(
            RuntimeError, match=rf"{len(prompts)} of {rows} rows were given up, because the vLLM server"
        ):
            list(stream)


def test_a_row_of_another_prompt_is_refused(serve, monkeypatch):
    trainer = serve(top_k=1)
    write_each = Asking.write_each
    monkeypatch.setattr(Asking, "write_each", lambda self, ids, options: write_each(self, ids[::-1], options))
    with pytest.raises(RuntimeError, match=r"For row \d of this batch the vLLM server answered another prompt"):
        list(trainer.rollout.stream(trainer.tokenize(tiny.PROMPTS), 0))


def test_a_server_on_loopback_is_refused_to_rows_of_several_machines(serve, monkeypatch):
    trainer = serve()
    trainer.rollout._engine._machines = 2
    with pytest.raises(ValueError, match=r"http://127.0.0.1:\d+ is another place on each of 2 machines: set"):
        trainer.rollout.stream([[5]], 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vllm_weight_sync": "adapter"}, "a server takes whole weights only: use 'auto'"),
        ({"vllm_enable_sleep_mode": True}, "does not sleep: set it to False"),
        ({"generation_kwargs": {"skip_reading_prefix_cache": True}}, "is not an option of vLLM"),
        ({"generation_kwargs": {"logprobs": 2}}, "what vllm_sync_check decides"),
        ({"generation_kwargs": {"structured_outputs": object()}}, "not JSON serializable"),
        ({"vllm_max_model_length": None}, "set `vllm_max_model_length=192`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_work_with_a_server_is_refused(serve, given, message):
    with pytest.raises(ValueError, match=message):
        serve(**given)


def test_a_device_that_cannot_send_weights_is_refused(make, server):
    with pytest.raises(ValueError, match=r"needs a CUDA device, got 'cpu'.*Set `vllm_mode='colocate'`"):
        make(tied=True, **server)


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS + 60)
def test_processes_with_unequal_prompts_get_their_own_completions(server, tmp_path):
    student(tmp_path / "student", tied=True, seed=7)
    options = json.dumps({**server, "vllm_group_port": free_port()})
    launch("fsdp2", HERE / "vllm_served.py", tmp_path, options)
    results = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    print(f"\n{results}")
    for found in results:
        assert found["processes"] == 2
        assert found["split"]
        assert found["completions"] == found["expected"] == found["streamed"]
        assert len(found["gaps"]) == 4, "before each of three steps, and after the last"
        assert max(found["gaps"]) <= 1e-4
    assert [len(found["completions"]) for found in results] == [3, 1]
    assert len({tuple(ids) for found in results for ids in found["completions"]}) == 4, "they can be told apart"
    assert len({seed for found in results for seed in found["seeds"]}) == 4
    assert "answered 400" in results[0]["error"], "the server was asked for more than its context"
    assert results[1]["error"] == results[0]["error"], "although only the main process talks to the server"
