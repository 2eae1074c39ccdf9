"""Rows are asked for all at once and returned as they end; a server here ends each when the test says so."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from support import tiny

pytest.importorskip("vllm")

from trl_opsd._compat import http
from trl_opsd.errors import ServerError
from trl_opsd.parallel.prefetch import Closable, Prefetcher
from trl_opsd.rollout.returned import checked_stream
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.vllm_server import VLLMServer

SECONDS = 10.0
"""A test fails when it has waited this long."""
PROMPTS = [[0], [1], [2], [3]]
"""Each begins with its number, by which the server knows it."""
CONFIG = {"model_config": {"dtype": "float32"}, "cache_config": {"block_size": 16}, "weight_transfer_config": {}}


class Rows(ThreadingHTTPServer):
    """Answers a row once its number is in `ended`, unless the client has gone."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: dict[int, dict[str, Any]] = {}
        self.ended: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self.given_up: set[int] = set()
        self.status, self.echoed = 200, lambda ids: ids

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.ended[number].set()


class _Handler(BaseHTTPRequestHandler):
    server: Rows

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        told = {"data": [{"id": "student", "max_model_len": 64}], "vllm_config": CONFIG}
        self.wfile.write(json.dumps(told).encode())

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number, *_ = body["prompt"]
        server.asked[number] = body
        while not server.ended[number].wait(0.01):
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                server.given_up.add(number)
                return
        choice = {"token_ids": [7] * (number + 1), "prompt_token_ids": server.echoed([number])}
        self.send_response(server.status)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def server() -> Iterator[Rows]:
    server = Rows()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asked(server: Rows, deadline: float = SECONDS) -> Iterator[tuple[int, Any]]:
    """The rows of all prompts."""
    url = f"http://127.0.0.1:{server.server_port}"
    args = tiny.config("nothing is written", vllm_server_base_url=url, vllm_weight_sync="full")
    rollout = ServedRollout(args, VLLMServer)
    rollout.server.http._deadline = deadline
    return rollout.write_each(PROMPTS, [{"max_tokens": 8, "seed": 10 + ids[0]} for ids in PROMPTS])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_are_returned_as_they_end(server):
    rows = asked(server)
    until(lambda: len(server.asked) == 4)
    assert [server.asked[number]["seed"] for number in range(4)] == [10, 11, 12, 13], "before the first is waited for"
    for number in (2, 0, 3, 1):
        server.end(number)
        got, completion = next(rows)
        assert (got, completion.prompt_ids, completion.completion_ids) == (number, [number], [7] * (number + 1))
    assert next(rows, None) is None


def test_rows_beyond_the_connections_wait_for_their_turn(server, monkeypatch):
    monkeypatch.setattr(http, "CONCURRENT", 2)
    rows = asked(server)
    until(lambda: len(server.asked) == 2)
    time.sleep(0.2)
    assert len(server.asked) == 2
    server.end(0, 1, 2, 3)
    assert sorted(number for number, _ in rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["refused", "late"])
def test_a_failed_row_cancels_the_others(server, fault):
    rows = asked(server, deadline=0.5 if fault == "late" else SECONDS)
    until(lambda: len(server.asked) == 4)
    if fault == "refused":
        server.status = 503
    if fault != "late":
        server.end(1)
    message = {"refused": "returned 503", "late": "within 0.5 seconds"}
    with pytest.raises(ServerError, match=message[fault]) as error:
        next(rows)
    until(lambda: server.given_up >= {0, 2, 3})
    assert error.tb, "although a traceback still refers to them"
    assert next(rows, None) is None


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_untaken_rows_are_cancelled(server, how, taken):
    rows = asked(server)
    until(lambda: len(server.asked) == 4)
    server.end(*range(taken))
    for _ in range(taken):
        next(rows)
    if how == "closed":
        rows.close()
    else:
        del rows
    until(lambda: server.given_up == set(range(taken, 4)))


def test_cancelling_rows_wakes_a_thread_waiting_for_them(server):
    rows, found = asked(server), []
    taking = threading.Thread(target=lambda: found.extend(rows), daemon=True)
    taking.start()
    server.end(1)
    until(lambda: found)
    rows.close()
    taking.join(SECONDS)
    assert not taking.is_alive()
    assert [number for number, _ in found] == [1]
    until(lambda: server.given_up == {0, 2, 3})


def test_cancelling_reaches_a_checked_stream_in_another_thread(server):
    rows, prompts = asked(server), [[ids[0]] for ids in PROMPTS]
    read = Closable(((number, row.completion_ids) for number, row in rows), rows.close)
    host: Any = SimpleNamespace(eos_token_ids=(), limits=SimpleNamespace(check_completion=lambda *_: None))
    pulled = Prefetcher(checked_stream(read, host, prompts, "It"))
    until(lambda: len(server.asked) == 4)
    server.end(1)
    assert pulled.take(wait=True) == [(1, [7, 7])]
    pulled.close()
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


def test_an_interrupt_ends_the_wait_and_the_requests(server, interruptible):
    rows = asked(server)
    until(lambda: len(server.asked) == 4)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    assert time.monotonic() - began < 2
    until(lambda: server.given_up == {0, 1, 2, 3})
