"""No server is waited for without end, and none is asked twice; the servers here are faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from trl_opsd.rollout import server_client
from trl_opsd.rollout.server_client import ServerClient, ServerError

pytestmark = pytest.mark.vllm


class Faults(ThreadingHTTPServer):
    """Answers as it is told and counts what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {"/health": (200, {}), "/v1/models": (200, {"data": [{"id": "student"}]})}


class _Handler(BaseHTTPRequestHandler):
    server: Faults

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path)
        if answer is None:  # never, as far as the client can tell
            time.sleep(5)
            return
        status, body = answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def faults() -> Iterator[Faults]:
    server = Faults()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def client(port: int, waits: float = 0.0, **given: Any) -> ServerClient:
    args = SimpleNamespace(
        vllm_server_base_url=None, vllm_server_host="127.0.0.1", vllm_server_port=port, vllm_group_port=1,
        vllm_server_timeout=waits,
    )  # fmt: skip
    vars(args).update(given)
    return ServerClient(args, deadline=1.5)


def test_a_server_that_is_not_there_and_is_waited_for_is_noticed(faults, caplog):
    faults.server_close()
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"No vLLM server at http://127.0.0.1:\d+ after `vllm_server_timeout=0`"):
        client(faults.server_port)
    assert time.monotonic() - began < 4


def test_a_server_that_is_never_ready_and_is_waited_for_without_end_is_noticed(faults, monkeypatch):
    faults.answers["/health"] = (503, {})
    with pytest.raises(ValueError, match="/health answers 503, not 200"):
        client(faults.server_port, waits=0.3)
    assert faults.asked.count("/health") >= 2, "it was waited for"

    del faults.answers["/health"]
    monkeypatch.setattr(server_client, "_CONNECT_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(ValueError, match="ReadTimeout"):
        client(faults.server_port, waits=0.1)
    assert time.monotonic() - began < 4


def test_a_request_that_is_repeated_or_never_given_up_is_noticed(faults):
    speaker = client(faults.server_port)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"asked for /v1/completions, did not answer within 1.5 seconds.*ddp_timeout"):
        speaker.write([[5]], {})
    assert time.monotonic() - began < 4

    faults.answers["/v1/completions"] = (503, {"error": "busy"})
    with pytest.raises(ServerError, match=r"answered 503: .*busy"):
        speaker.write([[5]], {})
    assert faults.asked.count("/v1/completions") == 2, "once each"

    with pytest.raises(Exception, match="timed out"):
        speaker._start_weight_update()
    assert faults.asked.count("/start_weight_update") == 1, "TRL's own requests keep to it too"


def test_a_server_that_does_not_say_what_it_runs_is_noticed(faults):
    faults.answers["/server_info?config_format=json"] = (404, {})
    with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):
        client(faults.server_port).facts()


def test_a_prefix_cache_that_was_not_reset_is_noticed(faults):
    speaker = client(faults.server_port)
    faults.answers["/reset_prefix_cache"] = (200, {"success": False})
    with pytest.raises(ServerError, match="did not reset its prefix cache"):
        speaker.forget_prefixes()
    faults.answers["/reset_prefix_cache"] = (200, {"success": True})
    speaker.forget_prefixes()


def test_prompts_for_loopback_that_take_the_way_of_a_proxy_are_noticed(faults, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert client(faults.server_port).model == "student"


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://0.0.0.0:1", True),
        ("http://10.0.0.3:1", False),
        ("http://gpu:1", False),
    ],
)
def test_a_server_elsewhere_that_counts_as_this_machine_is_noticed(monkeypatch, url, loopback):
    monkeypatch.setattr(ServerClient, "check_server", lambda self, *waits: None)
    monkeypatch.setattr(ServerClient, "_get", lambda self, url: {"data": [{"id": "student"}]})
    assert client(1, vllm_server_base_url=url).is_loopback is loopback
