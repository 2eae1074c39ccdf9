"""A server on loopback that answers as a test says, and records what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Told(ThreadingHTTPServer):
    """Gives the answer of a path: status and content, or what a function sends; never one where there is none."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []
        """Paths and bodies."""
        self.sent = 0
        """Bytes of answers that a function has sent."""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def answer(self, path: str, body: Any) -> Any:
        return self.answers.get(path)

    def handle_error(self, *_: Any) -> None:
        """Prints nothing."""


class Handler(BaseHTTPRequestHandler):
    """One request, with its `body`."""

    server: Told

    def do_GET(self) -> None:
        path, length = self.path.partition("?")[0], int(self.headers.get("Content-Length") or 0)
        self.body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((path, self.body))
        answer = self.server.answer(path, self.body)
        if answer is None:
            time.sleep(5)
        elif callable(answer):
            answer(self)
        else:
            self.reply(*answer)

    do_POST = do_GET

    def reply(self, status: int, content: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

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


@contextmanager
def running(server: Any) -> Iterator[Any]:
    """The server, until the context ends."""
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
