"""Requests have a deadline, are sent once and all at once, and their answers are validated; the servers misbehave."""

from __future__ import annotations

import gzip
import json
import os
import select
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny
from told_server import Handler, Told, running

pytest.importorskip("vllm")

from trl_opsd._compat import http
from trl_opsd._compat.peft import Weight
from trl_opsd._compat.urls import ROLLOUT_TOKEN
from trl_opsd.errors import ServerError
from trl_opsd.parallel.prefetch import Closable, Prefetcher
from trl_opsd.rollout import vllm_server
from trl_opsd.rollout.returned import checked_stream
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.vllm_server import VLLMServer
from trl_opsd.rollout.weight_sync import Stream, as_saved_by_peft

pytestmark = pytest.mark.vllm

ASKED = "/v1/completions"
MODELS = {"data": [{"id": "student", "max_model_len": 64}]}
CONFIG = {
    "model_config": {"dtype": "torch.bfloat16"},
    "cache_config": {"block_size": 16},
    "weight_transfer_config": {"backend": "nccl"},
}
SCORED = {"max_tokens": 2, "logprobs": 0, "prompt_logprobs": 0}
DEADLINE = 1.0
SLACK = 1.5
"""Seconds beyond the deadline that a busy machine may take."""


@pytest.fixture
def faults() -> Iterator[Told]:
    answers = {
        "/health": (200, {}), "/v1/models": (200, MODELS), "/reset_prefix_cache": (200, b""),
        "/v1/load_lora_adapter": (404, {"detail": "Not Found"}), "/server_info": (200, {"vllm_config": CONFIG}),
        "/version": (404, {}),
    }  # fmt: skip
    with running(Told(answers)) as server:
        yield server


def client(server: Told, waits: float = 0.0, deadline: float = DEADLINE, **given: Any) -> ServedRollout:
    options = {"vllm_server_port": server.server_port, "vllm_group_port": 1, "vllm_server_timeout": waits}
    made = ServedRollout(tiny.config("nothing is written", **{**options, **given}), VLLMServer)
    made.server.http._deadline = deadline
    return made


def sender(speaker: ServedRollout) -> Any:
    """Sends over no connection."""
    speaker.server._sender = vllm_server._Sender(speaker.server.http, 1)
    return speaker.server._sender


def update(speaker: ServedRollout) -> None:
    """Sends weights over no connection."""
    sender(speaker)
    weights = [Weight.of("a", torch.ones(1))]
    speaker.server.update(Stream(weights, torch.float32, torch.device("cpu"), lambda split: split))


def raw(data: bytes) -> Callable[[Handler], None]:
    """Answers with these bytes, and hangs up."""
    return lambda handler: handler.send(data)


# ---- Time ------------------------------------------------------------------------------------------------------------


def test_a_server_that_is_absent_or_never_ready_fails_after_its_timeout(faults, monkeypatch):
    faults.answers["/health"] = (503, {})
    with pytest.raises(ValueError, match="/health returned 503, expected 200"):
        client(faults, waits=0.3)
    assert faults.paths().count("/health") >= 2, "it was waited for"

    del faults.answers["/health"]
    monkeypatch.setattr(VLLMServer, "kind", replace(VLLMServer.kind, health_seconds=0.3))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"/health did not respond within 0.3 seconds\."):
        client(faults, waits=0.1)
    assert time.monotonic() - began < 4
    faults.server_close()
    with pytest.raises(ValueError, match=r"No vLLM server at http://127.0.0.1:\d+ after `vllm_server_timeout=0`"):
        client(faults)
    assert time.monotonic() - began < 8


def drip(head: bytes, part: bytes) -> Callable[[Handler], None]:
    """Answers byte by byte, for longer than the deadline."""

    def answer(handler: Handler) -> None:
        handler.send(head)
        handler.send(part, times=60, every=0.1)

    return answer


SLOW = {
    "nothing": None,
    "request of TRL": None,
    "headers": drip(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),
    "body": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n", b" "),
    "chunks": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


@pytest.mark.parametrize("how", SLOW)
def test_the_deadline_ends_a_request_which_is_sent_once(faults, how):
    speaker = client(faults)
    asked = "/start_weight_update" if how == "request of TRL" else ASKED
    faults.answers[asked] = SLOW[how]
    began = time.monotonic()
    with pytest.raises(ServerError, match=rf"{asked} did not respond within 1 seconds.*ddp_timeout"):
        speaker.write([[5]], [{"max_tokens": 2}]) if asked == ASKED else sender(speaker)._start_weight_update()
    assert time.monotonic() - began < DEADLINE + SLACK
    assert faults.paths().count(asked) == 1
    time.sleep(0.3)
    sent = faults.sent
    time.sleep(0.3)
    assert faults.sent == sent, "the connection is given up, not left behind"


def test_a_proxy_is_asked_for_other_machines_alone(faults, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert client(faults).server._model == "student"
    monkeypatch.setenv("HTTP_PROXY", faults.url)
    faults.answers |= {f"http://elsewhere.invalid{path}": answer for path, answer in faults.answers.items()}
    assert client(faults, vllm_server_base_url="http://elsewhere.invalid").server._model == "student"
    assert "http://elsewhere.invalid/v1/models" in faults.paths()


# ---- Faulty answers --------------------------------------------------------------------------------------------------


def choice(**given: Any) -> dict[str, Any]:
    """A valid answer to [5, 6] and a request for two tokens with all scores."""
    one = {
        "token_ids": [7, 8], "prompt_token_ids": [5, 6], "text": "x",
        "prompt_logprobs": [None, {"6": {"logprob": -1.5}}], "logprobs": {"token_logprobs": [-0.5, -2]}, **given,
    }  # fmt: skip
    return {"choices": [one]}


PACKED = gzip.compress(json.dumps(choice()).encode())  # would be taken if it were expanded
GARBAGE: dict[str, tuple[Any, str]] = {
    "busy": ((503, {"error": "busy"}), "returned 503: .*busy"),
    "redirect": (raw(b"HTTP/1.1 302 X\r\nLocation: /elsewhere\r\n\r\n"), "returned 302"),
    "compressed": (raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + PACKED), "Invalid JSON"),
    "dropped": (raw(b""), r"failed \(ServerDisconnectedError.*see its log"),
    "cut off": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}"), r"failed \(ClientPayloadError.*see its log"),
    "no json": (b"<html>", "<html>.*Invalid JSON"),
    "too few": ({"choices": []}, r"choices=\[\]: List should have at least 1 item"),
    "too many": ({"choices": choice()["choices"] * 2}, "List should have at most 1 item"),
    "negative": (choice(token_ids=[7, -1]), r"token_ids\.1=-1: Input should be greater"),
    "huge": (choice(token_ids=[2**70]), "token_ids.0=118059.*424: Input should be less"),
    "no ids": ({"choices": [{"index": 0, "text": "x"}]}, "choices.0.token_ids=.*Field required"),
    "scores missing": (choice(logprobs=None), "0 of 2 log-prob.*, logprobs"),
    "scores nan": (json.dumps(choice(logprobs={"token_logprobs": [-1, float("nan")]})).encode(), "a finite number"),
    "prompt unscored": (choice(prompt_logprobs=[None]), "0 of 1 log-prob.*, prompt_logprobs"),
    "prompt misscored": (choice(prompt_logprobs=[None, {"7": {"logprob": 1}}]), "0 of 1 log-prob"),
}


def test_an_answer_that_is_no_completion_is_refused(faults):
    speaker = client(faults)
    faults.answers[ASKED] = (200, choice())
    (good,) = speaker.write([[5, 6]], [SCORED])
    assert (good.completion_ids, good.prompt_logprobs, good.logprobs) == ([7, 8], [-1.5], [-0.5, -2])
    for number, (answer, message) in enumerate(GARBAGE.values(), start=2):
        faults.answers[ASKED] = answer if callable(answer) or isinstance(answer, tuple) else (200, answer)
        with pytest.raises(ServerError, match=message):
            speaker.write([[5, 6]], [SCORED])
        assert faults.paths().count(ASKED) == number, "once each"
    assert "/elsewhere" not in faults.paths()


def test_an_answer_that_is_too_large_is_refused(faults, monkeypatch):
    def endless(handler: Handler) -> None:
        handler.send(b"HTTP/1.1 200 OK\r\n\r\n")
        handler.send(b" " * 2**20, times=64)

    monkeypatch.setattr(http, "_MAX_BYTES", 2**20)
    speaker = client(faults)
    faults.answers[ASKED] = endless
    with pytest.raises(ServerError, match=r"returned more than 1 MiB, the limit for"):
        speaker.write([[5]], [{"max_tokens": 4}])
    assert faults.sent < 32 * 2**20, "and it is not read to its end"


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", {"data": []}, "/v1/models"),
        ("/v1/models", {"data": [{"id": 3}]}, "/v1/models"),
        ("/server_info", {}, r"vllm_config.model_config.dtype={}: Field required"),
        ("/server_info", {"vllm_config": {**CONFIG, "cache_config": {"block_size": -1}}}, "block_size=-1: Input"),
        ("/server_info", {"vllm_config": {**CONFIG, "weight_transfer_config": None}}, "cannot be sent weights: start"),
        ("/server_info", None, r"VLLM_SERVER_DEV_MODE=1.*Adapters: .*RUNTIME_LORA_UPDATING"),
        ("/get_world_size", {"world_size": 0}, "get_world_size"),
        ("/get_world_size", {"world_size": True}, "get_world_size"),
    ],
)
def test_a_server_whose_configuration_cannot_work_is_refused(faults, path, answer, message, caplog):
    faults.answers["/version"] = (200, {"version": "0.99.0"})
    speaker = client(faults)
    assert "has another vLLM. Not tested with trl_opsd" in caplog.text, "but is not refused"
    assert (speaker.server._model, speaker.server.dtype, speaker.server.context) == ("student", torch.bfloat16, 64)
    faults.answers[path] = (404, {}) if answer is None else (200, answer)
    with pytest.raises((ValueError, ServerError), match=message):
        sender(client(faults)).get_world_size()


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/models", None),
        ("/server_info", None),
        ("/get_world_size", lambda speaker: sender(speaker).get_world_size()),
        (ASKED, lambda speaker: speaker.write([[5]], [{"max_tokens": 2}])),
        ("/reset_prefix_cache", lambda speaker: speaker.server.reset_prefixes()),
        ("/start_weight_update", update),
    ],
)
def test_an_error_of_the_server_is_quoted(faults, path, ask):
    speaker = client(faults)
    faults.answers[path] = (500, {"error": "There is no module or parameter named 'x'" + 10_000 * "."})
    with pytest.raises(ServerError, match=r"500.*no module or parameter named 'x'") as error:
        ask(speaker) if ask else client(faults)
    assert len(str(error.value)) < 700


def test_prefix_cache_not_reset_in_time_is_an_error(faults, monkeypatch):
    monkeypatch.setattr(vllm_server, "_ABORT_SECONDS", 0.3)
    speaker = client(faults, deadline=SECONDS)
    left = iter([False, False, True])  # rows that were given up end a moment later
    faults.answers["/reset_prefix_cache"] = lambda handler: handler.reply(200, {"success": next(left)})
    speaker.server.reset_prefixes()
    assert next(left, None) is None, "asked until it did"
    faults.answers["/reset_prefix_cache"] = (200, b"")
    speaker.server.reset_prefixes()

    faults.answers |= {"/reset_prefix_cache": (200, {"success": False}), "/start_weight_update": (200, {})}
    with pytest.raises(ServerError, match="did not reset its prefix cache because it is serving other requests"):
        update(speaker)
    assert "/start_weight_update" not in faults.paths(), "weights are not replaced while rows are written"


def test_api_key_is_sent_and_a_missing_one_named(faults, monkeypatch):
    def guarded(handler: Handler) -> None:
        knows = handler.headers.get("Authorization") == "Bearer s3cret"
        handler.reply(*((200, MODELS) if knows else (401, {"error": "Unauthorized"})))

    monkeypatch.delenv(ROLLOUT_TOKEN, raising=False)
    faults.answers["/v1/models"] = guarded
    with pytest.raises(ServerError, match=f"returned 401: .*`{ROLLOUT_TOKEN}`"):
        client(faults)
    monkeypatch.setenv(ROLLOUT_TOKEN, "s3cret")
    assert client(faults).server._model == "student"


# ---- Rows are asked for all at once, and returned as they end --------------------------------------------------------

SECONDS = 10.0
"""A test fails when it has waited this long."""
PROMPTS = [[0], [1], [2], [3]]
"""Each begins with its number, by which the server knows it."""


class Rows:
    """Answers a row once its number is in `ended`, unless the client has gone."""

    def __init__(self) -> None:
        self.seeds: dict[int, int] = {}
        self.ended: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self.given_up: set[int] = set()
        self.status = 200

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.ended[number].set()

    def __call__(self, handler: Handler) -> None:
        (number,) = handler.body["prompt"]
        self.seeds[number] = handler.body["seed"]
        while not self.ended[number].wait(0.01):
            if select.select([handler.connection], [], [], 0)[0] and not handler.connection.recv(1, socket.MSG_PEEK):
                self.given_up.add(number)
                return
        handler.reply(self.status, {"choices": [{"token_ids": [7] * (number + 1), "prompt_token_ids": [number]}]})


@pytest.fixture
def server(faults: Told) -> Rows:
    faults.answers[ASKED] = rows = Rows()
    return rows


@pytest.fixture
def ask(faults: Told, server: Rows) -> Callable[..., Iterator[tuple[int, Any]]]:
    """Asks for the rows of all prompts, and waits until some have arrived."""

    def ask(deadline: float = SECONDS, arrive: int = 4) -> Iterator[tuple[int, Any]]:
        options = [{"max_tokens": 8, "seed": 10 + number} for (number,) in PROMPTS]
        rows = client(faults, deadline=deadline).write_each(PROMPTS, options)
        until(lambda: len(server.seeds) == arrive)
        return rows

    return ask


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_are_returned_as_they_end(server, ask):
    rows = ask()
    assert server.seeds == {number: 10 + number for number in range(4)}, "before the first is waited for"
    for number in (2, 0, 3, 1):
        server.end(number)
        got, completion = next(rows)
        assert (got, completion.prompt_ids, completion.completion_ids) == (number, [number], [7] * (number + 1))
    assert next(rows, None) is None


def test_rows_beyond_the_connections_wait_for_their_turn(server, ask, monkeypatch):
    monkeypatch.setattr(http, "CONCURRENT", 2)
    rows = ask(arrive=2)
    time.sleep(0.2)
    assert len(server.seeds) == 2
    server.end(0, 1, 2, 3)
    assert sorted(number for number, _ in rows) == [0, 1, 2, 3]


@pytest.mark.parametrize(("deadline", "message"), [(SECONDS, "returned 503"), (0.5, "within 0.5 seconds")])
def test_a_failed_row_cancels_the_others(server, ask, deadline, message):
    rows = ask(deadline)
    if deadline == SECONDS:
        server.status = 503
        server.end(1)
    with pytest.raises(ServerError, match=message) as error:
        next(rows)
    until(lambda: server.given_up >= {0, 2, 3})
    assert error.tb, "although a traceback still refers to them"
    assert next(rows, None) is None


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_untaken_rows_are_cancelled(server, ask, how, taken):
    rows = ask()
    server.end(*range(taken))
    for _ in range(taken):
        next(rows)
    if how == "closed":
        rows.close()
    else:
        del rows
    until(lambda: server.given_up == set(range(taken, 4)))


def test_cancelling_ends_the_wait_of_a_checked_stream_in_another_thread(server, ask):
    rows = ask()
    read = Closable(((number, row.completion_ids) for number, row in rows), rows.close)
    host: Any = SimpleNamespace(eos_token_ids=(), limits=SimpleNamespace(check_completion=lambda *_: None))
    pulled = Prefetcher(checked_stream(read, host, PROMPTS, "It"))
    server.end(1)
    assert pulled.take(wait=True) == [(1, [7, 7])]
    pulled.close()
    with pytest.raises(ValueError, match="yielded 1 completions for 4 prompts"):
        pulled.take(wait=True)
    until(lambda: server.given_up == {0, 2, 3})


def test_generator_in_another_thread_closes_at_next_yield():
    inside, go_on, events = threading.Event(), threading.Event(), []

    def waiting():
        try:
            inside.set()
            go_on.wait(SECONDS)
            yield 1
        finally:
            events.append("closed")

    pulled = Prefetcher(waiting())
    assert inside.wait(SECONDS)
    pulled.close()
    assert not events
    go_on.set()
    until(lambda: events == ["closed"])


def test_an_interrupt_ends_the_wait_and_the_requests(server, ask, interruptible):
    rows = ask()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    assert time.monotonic() - began < 2
    until(lambda: server.given_up == {0, 1, 2, 3})


# ---- Adapters --------------------------------------------------------------------------------------------------------


def test_adapters_are_saved_with_one_rank_and_their_scaling():
    factors = {name: (torch.rand(rank, 6), torch.rand(5, rank), scaling) for name, rank, scaling in
               (("model.a.q_proj", 2, 0.5), ("model.a.up_proj", 4, 2.0))}  # fmt: skip
    tensors, config = as_saved_by_peft(factors)
    assert config["r"] == config["lora_alpha"] == 4
    assert config["target_modules"] == ["q_proj", "up_proj"]
    for name, (a, b, scaling) in factors.items():
        saved_a, saved_b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        assert len(saved_a) == saved_b.size(1) == 4
        torch.testing.assert_close(saved_b @ saved_a, scaling * b @ a)


def test_each_adapter_has_a_new_name_and_folder(faults, tmp_path):
    faults.answers |= {"/v1/load_lora_adapter": (200, b""), "/v1/unload_lora_adapter": (200, b"")}
    speaker, folder = client(faults, output_dir=str(tmp_path)), tmp_path / "_served_adapters"
    student = get_peft_model(tiny.qwen2(), LoraConfig(r=2, target_modules=["q_proj"]))
    speaker.trainer, speaker._mode = SimpleNamespace(model=student, gathered=lambda parts: nullcontext()), "adapter"
    names = []
    for _ in range(2):
        speaker.send_weights()
        names.append(speaker.server.adapter)
        assert [one.name for one in folder.iterdir()] == names[-1:], "the one before is unloaded"
        assert speaker.server.body([5], {"max_tokens": 1})["model"] == names[-1]
    assert len({*names}) == 2
    faults.answers["/v1/load_lora_adapter"] = (400, b"rank 64 is greater than max_lora_rank 16")
    with pytest.raises(ServerError, match=r"rank 64 is greater than max_lora_rank 16$"):
        speaker.send_weights()
    assert [one.name for one in folder.iterdir()] == names[1:], "nothing of the failed one is left"
    speaker.close()
    assert speaker.server.adapter is None
    assert not folder.exists()
    with pytest.raises(ServerError, match="the rollout was closed"):
        speaker._prepared([[5]])
