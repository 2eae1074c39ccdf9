"""A server of a teacher that can be made to fail: it speaks the pooling API, over a model in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Fault = Callable[["Pretended", Tensor], Tensor | bytes | tuple[int, bytes, dict[str, str]]]
"""From the right states to an answer: states, bytes, or status, body and headers. It may raise, which hangs up."""


@dataclass
class Pretended:
    """What the server has and does; may be changed while it runs."""

    model: PreTrainedModel
    fault: Fault | None = None
    faulty_from: int = 0
    """Rows that are answered well before the fault."""
    models: Any = None
    """The answer of `/v1/models`, instead of its own."""
    url: str = ""
    asked: list[list[int]] = field(default_factory=list)
    """The token ids of each request."""
    tokens: set[str | None] = field(default_factory=set)
    """The `Authorization` headers that were sent."""
    running: int = 0
    most_running: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def states(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model.model(torch.tensor([ids])).last_hidden_state[0]

    def answer(self, request: dict[str, Any]) -> Any:
        expected = {"task": "token_embed", "use_activation": False, "encoding_format": "bytes_only"}
        assert {**request, **expected, "model": "a teacher"} == request
        with self.lock:
            self.asked.append(request["input"])
            is_faulty = self.fault is not None and len(self.asked) > self.faulty_from
        states = self.states(request["input"])
        found = self.fault(self, states) if is_faulty else states
        return to_bytes(found, request["embed_dtype"]) if isinstance(found, Tensor) else found


def to_bytes(states: Tensor, dtype: str) -> bytes:
    return states.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def pretended(model: PreTrainedModel, fault: Fault | None = None, **given: Any) -> Iterator[Pretended]:
    """A server of this model, until the context ends."""
    server = Pretended(model.eval(), fault, **given)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            server.tokens.add(self.headers["Authorization"])
            listed = {"data": [{"id": "a teacher", "root": "untied", "max_model_len": 192}]}
            self._send(b"" if self.path == "/health" else json.dumps(server.models or listed).encode())

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.running += 1
                server.most_running = max(server.running, server.most_running)
            try:
                answer = server.answer(request)
            except ConnectionError:
                return
            finally:
                with server.lock:
                    server.running -= 1
            self._send(answer) if isinstance(answer, bytes) else self._send(answer[1], answer[0], answer[2])

        def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:  # the client no longer waits
                pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=[0.02], daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


def hang_up(server: Pretended, states: Tensor) -> Any:
    raise ConnectionError


def after(seconds: float) -> Fault:
    """Answers well, but late."""

    def fault(server: Pretended, states: Tensor) -> Tensor:
        time.sleep(seconds)
        return states

    return fault
