"""Servers of a teacher that can be made to fail: they return states, or score tokens, of a model in this process."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
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
    row: Any = field(default_factory=threading.local)
    """With `ids`, the row of the request that is being answered."""

    @torch.no_grad()
    def computed(self, ids: list[int], model: PreTrainedModel | None = None, **given: Any) -> Tensor:
        """What a model, by default the server's, computes of a row: [L, H] or [L, V]."""
        return (model or self.model).model(torch.tensor([ids]), **given).last_hidden_state[0]

    def listed(self) -> Any:
        return {"data": [{"id": "a teacher", "root": "untied", "max_model_len": 192}]}

    def posted(self, path: str, request: dict[str, Any]) -> Any:
        """The answer to a request: bytes, or status, body and headers."""
        return self.answer(request) if path == "/pooling" else (404, b'{"detail":"Not Found"}', {})

    def answer(self, request: dict[str, Any]) -> Any:
        expected = {"task": "token_embed", "use_activation": False, "encoding_format": "bytes_only"}
        assert {**request, **expected, "model": "a teacher"} == request
        with self.lock:
            self.asked.append(request["input"])
            is_faulty = self.fault is not None and len(self.asked) > self.faulty_from
        self.row.ids = request["input"]
        states = self.computed(request["input"])
        found = self.fault(self, states) if is_faulty else states
        return to_bytes(found, request["embed_dtype"]) if isinstance(found, Tensor) else found


def to_bytes(states: Tensor, dtype: str) -> bytes:
    return states.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def pretended(
    model: PreTrainedModel, fault: Fault | None = None, kind: type[Pretended] | None = None, **given: Any
) -> Iterator[Any]:
    """A server of this model, until the context ends."""
    server = (kind or Pretended)(model.eval(), fault, **given)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            server.tokens.add(self.headers["Authorization"])
            self._send(b"" if self.path == "/health" else json.dumps(server.models or server.listed()).encode())

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.running += 1
                server.most_running = max(server.running, server.most_running)
            try:
                answer = server.posted(self.path, request)
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


@dataclass
class Scoring(Pretended):
    """A server that generates, and tells log-probabilities of prompts as vLLM 0.32 or SGLang does."""

    api: str = "vllm"
    """Or `"sglang"`, or another, which knows OpenAI's API alone."""
    scores_tokens: bool = True
    """Whether vLLM was started with `--enable-scale-out`."""
    most: int = 128
    """Its `--max-logprobs`."""
    words: Any = None
    """Its tokenizer, for texts."""

    def computed(self, ids: list[int], model: PreTrainedModel | None = None, **given: Any) -> Tensor:
        states = super().computed(ids, model, **given)
        with torch.no_grad():
            return (model or self.model).lm_head(states).log_softmax(-1)

    def listed(self) -> Any:
        listed = {"id": "a teacher", "root": "untied", "max_model_len": 192, "owned_by": self.api}
        return {"data": [listed], "max_req_input_len": 100}  # the second at SGLang's /server_info

    def posted(self, path: str, request: dict[str, Any]) -> Any:
        if path == "/detokenize" and self.words is not None:
            return json.dumps({"prompt": self.words.decode(request["tokens"])}).encode()
        if self.api == "other":
            return 200, b'{"choices": []}', {}
        routes = {"vllm": ("/v1/completions", "/inference/v1/generate"), "sglang": ("/generate",)}
        if path not in routes[self.api]:
            return 404, b'{"detail":"Not Found"}', {}
        sampling = request.get("sampling_params") or request
        ids = request.get("token_ids") or request.get("input_ids") or request["prompt"]
        asks_many = self.api == "vllm" and (sampling.get("prompt_logprobs") or 0) > self.most
        asked = sampling.get("prompt_logprob_token_ids")
        if asks_many or (asked and max(map(len, asked)) > self.most):
            return 400, f'{{"error": "greater than max allowed: {self.most}"}}'.encode(), {}
        if path == "/inference/v1/generate" and not self.scores_tokens:
            return 403, b'{"error": "start with --enable-scale-out"}', {}
        with self.lock:
            self.asked.append(ids)
            is_faulty = self.fault is not None and len(self.asked) > self.faulty_from
        self.row.ids = ids
        logs_LV = self.computed(ids)
        found = self.fault(self, logs_LV) if is_faulty else logs_LV
        return self.body(ids, sampling, request, found) if isinstance(found, Tensor) else found

    def body(self, ids: list[int], sampling: dict[str, Any], request: dict[str, Any], logs_LV: Tensor) -> bytes:
        """The answer of this kind of server, from the log-probabilities after each token."""
        name = "top_logprobs_num" if self.api == "sglang" else "prompt_logprobs"
        count = {**request, **sampling}.get(name) or 0
        before = [None, *logs_LV[: len(ids) - 1]]
        tops = [None if row is None else row.topk(count).indices.tolist() for row in before]
        if self.api == "sglang":
            first = request["logprob_start_len"]
            own = [[None if row is None else float(row[one]), one, None] for row, one in zip(before, ids, strict=True)]
            top = [
                None if row is None else [[float(row[one]), one, None] for one in ids_K]
                for row, ids_K in zip(before, tops, strict=True)
            ]
            # the first has no log-probability, wherever it is
            answer: Any = {"input_token_logprobs": own[first:], "input_top_logprobs": [None, *top[first + 1 :]]}
            answer["input_token_logprobs"][0][0] = None
            for entry in answer["input_token_logprobs"]:  # as SGLang 0.5.23 names the last id of a vocabulary
                entry[1] %= logs_LV.size(1) - 1
            return json.dumps({"text": "", "meta_info": answer}).encode()
        found: dict[str, Any] = {"choices": [{}]}
        if asked := sampling.get("prompt_logprob_token_ids"):
            start, width = sampling["prompt_logprob_start"], max(map(len, asked))
            scores = torch.full((len(asked), width), -torch.inf)
            assert len(asked) == len(ids) - 1 - start
            for number, row in enumerate(asked):
                for column, one in enumerate(row):
                    if one >= 0:
                        scores[number, column] = logs_LV[start + number, one]
            file = io.BytesIO()
            np.save(file, scores.numpy())
            found["prompt_token_id_logprobs"] = base64.b64encode(file.getvalue()).decode()
        if count:
            rows = [
                None if row is None else {str(one): {"logprob": float(row[one])} for one in {*ids_K, own}}
                for row, ids_K, own in zip(before, tops, ids, strict=True)
            ]
            where = found if "token_ids" in request else found["choices"][0]
            where["prompt_logprobs"] = rows
        return json.dumps(found).encode()
