"""Requests have a deadline, are sent once, and their answers are validated; the servers here misbehave."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny

pytest.importorskip("vllm")

from trl_opsd._compat import http
from trl_opsd._compat.peft import Weight
from trl_opsd._compat.urls import ROLLOUT_TOKEN
from trl_opsd.errors import ServerError
from trl_opsd.rollout import vllm_server
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.vllm_server import VLLMServer
from trl_opsd.rollout.weight_sync import Stream, as_saved_by_peft

pytestmark = pytest.mark.vllm

ASKED = "/v1/completions"
INFO = "/server_info?config_format=json"
CONFIG = {
    "model_config": {"dtype": "torch.bfloat16"},
    "cache_config": {"block_size": 16},
    "weight_transfer_config": {"backend": "nccl"},
}
DEADLINE = 1.0
SLACK = 1.5
"""Seconds beyond the deadline that a busy machine may take."""


class Faults(ThreadingHTTPServer):
    """Gives the answers that a test sets and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        models = {"data": [{"id": "student", "max_model_len": 64}]}
        self.answers: dict[str, Any] = {
            "/health": (200, {}), "/v1/models": (200, models), "/reset_prefix_cache": (200, b""),
            "/v1/load_lora_adapter": (404, {"detail": "Not Found"}),
            INFO: (200, {"vllm_config": CONFIG}),
        }  # fmt: skip
        self.sent = 0


class _Handler(BaseHTTPRequestHandler):
    server: Faults

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path)
        if answer is None:  # never, as far as the client can tell
            time.sleep(5)
        elif callable(answer):
            answer(self)
        else:
            status, body = answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    do_POST = do_GET

    def send(self, data: bytes, times: int = 1, every: float = 0.0) -> None:
        """Writes until the client disconnects, and counts the bytes."""
        for _ in range(times):
            try:
                self.wfile.write(data)
            except OSError:
                return
            self.server.sent += len(data)
            time.sleep(every)

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def faults() -> Iterator[Faults]:
    server = Faults()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def client(port: int, waits: float = 0.0, **given: Any) -> ServedRollout:
    server = {"vllm_server_port": port, "vllm_group_port": 1, "vllm_server_timeout": waits}
    made = ServedRollout(tiny.config("nothing is written", **{**server, **given}), VLLMServer)
    made.server.http._deadline = DEADLINE
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


def test_an_absent_server_is_an_error_after_the_server_timeout(faults, caplog):
    faults.server_close()
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"No vLLM server at http://127.0.0.1:\d+ after `vllm_server_timeout=0`"):
        client(faults.server_port)
    assert time.monotonic() - began < 4


def test_server_that_is_never_ready_fails_after_its_timeout(faults, monkeypatch):
    faults.answers["/health"] = (503, {})
    with pytest.raises(ValueError, match="/health returned 503, expected 200"):
        client(faults.server_port, waits=0.3)
    assert faults.asked.count("/health") >= 2, "it was waited for"

    del faults.answers["/health"]
    monkeypatch.setattr(VLLMServer, "kind", replace(VLLMServer.kind, health_seconds=0.3))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"/health did not respond within 0.3 seconds\."):
        client(faults.server_port, waits=0.1)
    assert time.monotonic() - began < 4


def test_a_request_is_sent_once_and_has_a_deadline(faults):
    speaker = client(faults.server_port)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"/v1/completions did not respond within 1 seconds.*ddp_timeout"):
        speaker.write([[5]], [{"max_tokens": 2}])
    assert time.monotonic() - began < DEADLINE + SLACK

    faults.answers[ASKED] = (503, {"error": "busy"})
    with pytest.raises(ServerError, match=r"returned 503: .*busy"):
        speaker.write([[5]], [{"max_tokens": 2}])
    assert faults.asked.count(ASKED) == 2, "once each"

    with pytest.raises(ServerError, match="did not respond within 1 seconds"):
        sender(speaker)._start_weight_update()
    assert faults.asked.count("/start_weight_update") == 1, "TRL's own requests have the deadline, too"


def dripped_headers(handler: _Handler) -> None:
    handler.send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    handler.send(b"a", times=60, every=0.1)


def dripped_body(handler: _Handler) -> None:
    handler.send(b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n")
    handler.send(b" ", times=60, every=0.1)


def dripped_chunks(handler: _Handler) -> None:
    handler.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    handler.send(b"1\r\n \r\n", times=60, every=0.1)


def endless_preludes(handler: _Handler) -> None:
    handler.send(b"HTTP/1.1 100 Continue\r\n\r\n", times=60, every=0.1)


@pytest.mark.parametrize("drip", [dripped_headers, dripped_body, dripped_chunks, endless_preludes])
def test_the_deadline_ends_a_request_answered_byte_by_byte(faults, drip):
    speaker = client(faults.server_port)
    faults.answers[ASKED] = drip
    began = time.monotonic()
    with pytest.raises(ServerError, match="did not respond within 1 seconds"):
        speaker.write([[5]], [{"max_tokens": 2}])
    assert time.monotonic() - began < DEADLINE + SLACK
    time.sleep(0.3)
    sent = faults.sent
    time.sleep(0.3)
    assert faults.sent == sent, "the connection is given up, not left behind"


def test_the_deadline_ends_a_request_through_a_slow_proxy(faults, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{faults.server_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for path in ("/health", "/v1/models", "/v1/load_lora_adapter", INFO):
        faults.answers[f"http://elsewhere.invalid{path}"] = faults.answers[path]
    faults.answers[f"http://elsewhere.invalid{ASKED}"] = dripped_body
    speaker = client(1, vllm_server_base_url="http://elsewhere.invalid")
    began = time.monotonic()
    with pytest.raises(ServerError, match="did not respond within 1 seconds"):
        speaker.write([[5]], [{"max_tokens": 2}])
    assert time.monotonic() - began < DEADLINE + SLACK


def test_redirects_are_not_followed(faults):
    def redirect(handler: _Handler) -> None:
        handler.send(b"HTTP/1.1 302 X\r\nLocation: /elsewhere\r\n\r\n")

    speaker = client(faults.server_port)
    faults.answers |= {ASKED: redirect, "/elsewhere": (200, {"choices": []})}
    with pytest.raises(ServerError, match="returned 302"):
        speaker.write([[5]], [{"max_tokens": 2}])
    assert "/elsewhere" not in faults.asked


def test_an_answer_that_is_too_large_is_refused(faults, monkeypatch):
    def endless(handler: _Handler) -> None:
        handler.send(b"HTTP/1.1 200 OK\r\n\r\n")
        handler.send(b" " * 2**20, times=64)

    monkeypatch.setattr(http, "_MAX_BYTES", 2**20)
    speaker = client(faults.server_port)
    faults.answers[ASKED] = endless
    with pytest.raises(ServerError, match=r"returned more than 1 MiB, the limit for"):
        speaker.write([[5]], [{"max_tokens": 4}])
    assert faults.sent < 32 * 2**20, "and it is not read to its end"


def test_a_compressed_answer_is_not_expanded(faults):
    packed = gzip.compress(json.dumps({"choices": [choice()]}).encode())  # would be taken if it were expanded

    def compressed(handler: _Handler) -> None:
        handler.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n" + packed)

    speaker = client(faults.server_port)
    faults.answers[ASKED] = compressed
    with pytest.raises(ServerError, match="Invalid JSON"):
        speaker.write([[5, 6]], [{"max_tokens": 2, "logprobs": 0, "prompt_logprobs": 0}])


def choice(**given: Any) -> dict[str, Any]:
    """A valid answer to [5, 6] and a request for two tokens with all scores."""
    return {
        "token_ids": [7, 8], "prompt_token_ids": [5, 6], "text": "x",
        "prompt_logprobs": [None, {"6": {"logprob": -1.5}}], "logprobs": {"token_logprobs": [-0.5, -2]}, **given,
    }  # fmt: skip


GARBAGE: dict[str, tuple[Callable[[], Any], str]] = {
    "no json": (lambda: b"<html>", "<html>.*Invalid JSON"),
    "deep": (lambda: b"[" * 100_000, "Invalid JSON"),
    "no object": (lambda: [1], r"returned content=\[1\]: Input should be an object"),
    "no choices": (lambda: {}, "choices={}: Field required"),
    "no choice": (lambda: {"choices": [None]}, r"choices\.0=None: Input should be an object"),
    "too few": (lambda: {"choices": []}, r"choices=\[\]: List should have at least 1 item"),
    "too many": (lambda: {"choices": [choice(), choice()]}, "List should have at most 1 item"),
    "negative": (lambda: {"choices": [choice(token_ids=[7, -1])]}, r"token_ids\.1=-1: Input should be greater"),
    "floats": (lambda: {"choices": [choice(token_ids=[7.0])]}, r"token_ids\.0=7.0: Input should be a valid integer"),
    "bools": (lambda: {"choices": [choice(token_ids=[True])]}, r"token_ids\.0=True"),
    "huge": (lambda: {"choices": [choice(token_ids=[2**70])]}, "token_ids.0=118059.*424: Input should be less"),
    "text": (lambda: {"choices": [choice(token_ids="78")]}, "token_ids='78'"),
    "no ids": (lambda: {"choices": [{"index": 0, "text": "x"}]}, "choices.0.token_ids=.*Field required"),
    "scores missing": (lambda: {"choices": [choice(logprobs=None)]}, "0 of 2 log-prob.*, logprobs"),
    "scores short": (lambda: {"choices": [choice(logprobs={"token_logprobs": [-1]})]}, "1 of 2 log-prob"),
    "scores of nothing": (lambda: {"choices": [choice(logprobs={"token_logprobs": [-1, None]})]}, "should be a val"),
    "scores nan": (lambda: b'{"choices": [{"token_ids": [7, 8], "prompt_token_ids": [5, 6], "logprobs": '
                   b'{"token_logprobs": [-1, NaN]}}]}', "token_logprobs.1=nan: Input should be a finite number"),
    "prompt unscored": (lambda: {"choices": [choice(prompt_logprobs=[None])]}, "0 of 1 log-prob.*, prompt_logprobs"),
    "prompt misscored": (lambda: {"choices": [choice(prompt_logprobs=[None, {"7": {"logprob": 1}}])]},
                         "0 of 1 log-prob"),
    "prompt scored x": (lambda: {"choices": [choice(prompt_logprobs=[None, {"6": {"logprob": "x"}}])]}, "logprob='x'"),
}  # fmt: skip


def test_an_answer_that_is_no_completion_is_refused(faults):
    speaker = client(faults.server_port)
    wanted = {"max_tokens": 2, "logprobs": 0, "prompt_logprobs": 0}
    faults.answers[ASKED] = (200, {"choices": [choice()]})
    (good,) = speaker.write([[5, 6]], [wanted])
    assert (good.completion_ids, good.prompt_logprobs, good.logprobs) == ([7, 8], [-1.5], [-0.5, -2])
    for made, message in GARBAGE.values():
        faults.answers[ASKED] = (200, made())
        with pytest.raises(ServerError, match=message):
            speaker.write([[5, 6]], [wanted])


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{}]}, {"data": [{"id": 3}]}, [1], b"", b"x"], ids=str)
def test_a_server_that_names_no_model_is_refused(faults, models):
    faults.answers["/v1/models"] = (200, models)
    with pytest.raises(ServerError, match="/v1/models"):
        client(faults.server_port)


def test_server_without_weight_transfer_is_refused_at_once(faults):
    faults.answers[INFO] = (200, {"vllm_config": {**CONFIG, "weight_transfer_config": None}})
    with pytest.raises(ValueError, match=r"cannot be sent weights: start it .*`--weight-transfer-config '\{\"backend"):
        client(faults.server_port)


def test_a_server_that_does_not_describe_itself_is_refused(faults):
    speaker = client(faults.server_port)
    assert (speaker.server._model, speaker.server.dtype, speaker.server.context) == ("student", torch.bfloat16, 64)
    faults.answers[INFO] = (404, {})
    with pytest.raises(
        ValueError, match=r"VLLM_SERVER_DEV_MODE=1.*Nor can it be sent adapters: .*RUNTIME_LORA_UPDATING"
    ):
        client(faults.server_port)
    for wrong, message in [
        ({}, "/server_info returned vllm_config.model_config.dtype={}: Field required"),
        ({"vllm_config": [1]}, "vllm_config.model_config.dtype={.*}: Field required"),
        (
            {"vllm_config": {**CONFIG, "cache_config": {"block_size": -1}}},
            "block_size=-1: Input should be greater than 0",
        ),
    ]:
        faults.answers[INFO] = (200, wrong)
        with pytest.raises(ServerError, match=message):
            client(faults.server_port)
    for wrong in ({}, {"world_size": 0}, {"world_size": 1.5}, {"world_size": True}):
        faults.answers["/get_world_size"] = (200, wrong)
        with pytest.raises(ServerError, match="get_world_size"):
            sender(speaker).get_world_size()


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/models", lambda speaker: client(int(speaker.server.http.url.rpartition(":")[2]))),
        (INFO, lambda speaker: client(int(speaker.server.http.url.rpartition(":")[2]))),
        ("/get_world_size", lambda speaker: sender(speaker).get_world_size()),
        (ASKED, lambda speaker: speaker.write([[5]], [{"max_tokens": 2}])),
        ("/reset_prefix_cache", lambda speaker: speaker.server.reset_prefixes()),
        ("/start_weight_update", lambda speaker: update(speaker)),
    ],
)
def test_an_error_of_the_server_is_quoted(faults, path, ask):
    speaker = client(faults.server_port)
    faults.answers[path] = (500, {"error": "There is no module or parameter named 'x'" + 10_000 * "."})
    with pytest.raises(ServerError, match=r"500.*no module or parameter named 'x'") as error:
        ask(speaker)
    assert len(str(error.value)) < 700


def test_prefix_cache_not_reset_in_time_is_an_error(faults, monkeypatch):
    monkeypatch.setattr(vllm_server, "_ABORT_SECONDS", 0.3)
    speaker = client(faults.server_port)
    faults.answers["/reset_prefix_cache"] = (200, {"success": False})
    with pytest.raises(ServerError, match="did not reset its prefix cache"):
        speaker.server.reset_prefixes()
    faults.answers["/reset_prefix_cache"] = (200, {"success": True})
    speaker.server.reset_prefixes()
    faults.answers["/reset_prefix_cache"] = (200, b"")
    speaker.server.reset_prefixes()

    left = iter([False, False, True])  # rows that were given up end a moment later
    faults.answers["/reset_prefix_cache"] = lambda handler: handler.send(
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps({"success": next(left)}).encode()
    )
    speaker.server.reset_prefixes()
    assert next(left, None) is None, "asked until it did"

    faults.answers |= {"/reset_prefix_cache": (200, {"success": False}), "/start_weight_update": (200, {})}
    with pytest.raises(ServerError, match="did not reset its prefix cache because it is serving other requests"):
        update(speaker)
    assert "/start_weight_update" not in faults.asked, "weights are not replaced while rows are written"


def test_a_dropped_connection_is_an_error(faults):
    speaker = client(faults.server_port)
    faults.answers[ASKED] = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ServerError, match=r"failed \(ServerDisconnectedError.*see its log"):
        speaker.write([[5]], [{"max_tokens": 2}])
    faults.answers[ASKED] = lambda handler: handler.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}")
    with pytest.raises(ServerError, match=r"failed \(ClientPayloadError.*see its log"):
        speaker.write([[5]], [{"max_tokens": 2}])
    assert faults.asked.count(ASKED) == 2


def test_requests_to_loopback_bypass_the_proxy(faults, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert client(faults.server_port).server._model == "student"


def test_api_key_is_sent_and_a_missing_one_named(faults, monkeypatch):
    def guarded(handler: _Handler) -> None:
        knows = handler.headers.get("Authorization") == "Bearer s3cret"
        found = {"data": [{"id": "student", "max_model_len": 64}]} if knows else {"error": "Unauthorized"}
        handler.send(f"HTTP/1.1 {200 if knows else 401} X\r\nConnection: close\r\n\r\n{json.dumps(found)}".encode())

    monkeypatch.delenv(ROLLOUT_TOKEN, raising=False)
    faults.answers["/v1/models"] = guarded
    with pytest.raises(
        ServerError, match=f"returned 401: .*Set the environment variable `{ROLLOUT_TOKEN}` to the server's key"
    ):
        client(faults.server_port)
    monkeypatch.setenv(ROLLOUT_TOKEN, "s3cret")
    assert client(faults.server_port).server._model == "student"


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
    speaker, folder = client(faults.server_port, output_dir=str(tmp_path)), tmp_path / "_served_adapters"
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
