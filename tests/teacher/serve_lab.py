"""Runs a teacher's server in this process, in a thread with a loop of its own, and asks it as clients do."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from aiohttp import web

from trl_opsd import FrozenTeacher
from trl_opsd.teacher import Resident
from trl_opsd.teacher.serve.__main__ import ServeOptions, bound, facts
from trl_opsd.teacher.serve.reader import Reader
from trl_opsd.teacher.serve.server import DTYPES, Served, TeacherServer

CPU = torch.device("cpu")
STATES = {"use_activation": False, "encoding_format": "bytes_only"}
"""What a request needs besides its rows, to be answered with bytes."""


class Gated(Resident):
    """Waits in each pass until `gate` is set; `began` is set when a pass waits or runs, its rows taken."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self.gate, self.began = threading.Event(), threading.Event()
        self.gate.set()

    @contextmanager
    def reading(self, passes: int) -> Iterator[Any]:
        with super().reading(passes) as run:
            yield partial(self._run, run)

    def _run(self, run: Any, *given: Any) -> Any:
        self.began.set()
        assert self.gate.wait(60)
        return run(*given)

    def shut(self) -> None:
        """The next pass waits."""
        self.began.clear()
        self.gate.clear()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)

    def message(self) -> str:
        error = self.json()["error"]
        assert error["code"] == self.status
        assert set(error) == {"message", "type", "param", "code"}
        return error["message"]


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    port: int
    width: int
    reader: Reader | None = None
    teacher: FrozenTeacher | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def send(self, method: str, path: str, content: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, content, {**dict(self.headers), **headers})
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def post(self, body: Any, **headers: str) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", "/pooling", content, **{"Content-Type": "application/json", **headers})

    def states(self, rows: Sequence[Sequence[int]], dtype: str = "float32", **more: Any) -> list[torch.Tensor]:
        """[L, H] for each row."""
        answer = self.post({"input": rows, "embed_dtype": dtype, **STATES, **more})
        assert answer.status == 200, answer.content
        assert answer.headers["Content-Type"] == "application/octet-stream"
        found = torch.from_numpy(np.frombuffer(answer.content, np.uint8).copy()).view(DTYPES[dtype])
        return list(found.view(-1, self.width).split([len(row) for row in rows]))


@contextmanager
def running(
    model: Any,
    placement: Any = Resident,
    token: str | None = None,
    padding_free: bool = False,
    patience: float = 60.0,
    **options: Any,
) -> Iterator[Running]:
    """A server of a model; what it holds is 0 when its requests have been answered."""
    teacher = FrozenTeacher(placement(model, CPU), padding_free=padding_free)
    chosen = ServeOptions(**options)
    served = facts("a/teacher", chosen, teacher)
    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    found: dict[str, Any] = {}

    async def serve() -> None:
        reader = found["reader"] = Reader(teacher, chosen.max_waiting_tokens, loop)
        server = TeacherServer(reader, served, token, patience)
        reader.start()
        listener = bound("127.0.0.1", 0)
        found["port"] = listener.getsockname()[1]
        runner = server.runner(5.0)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        ready.set()
        await stop.wait()
        server.close()
        await runner.cleanup()
        await asyncio.to_thread(reader.join, 20)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        assert ready.wait(20)
        yield Running(found["port"], served.width, found["reader"], teacher)
    finally:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
    assert not found["reader"].is_alive()
    assert found["reader"].waiting.tokens == 0


def served(**changes: Any) -> Served:
    """Facts of a small model."""
    known = {"name": "a/teacher", "root": "a/teacher", "revision": None, "dtype": torch.float32, "vocabulary": 259}
    return Served(**{**known, "width": 48, "max_model_len": 256, "max_request_tokens": 16384, **changes})


def wait_for(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)
