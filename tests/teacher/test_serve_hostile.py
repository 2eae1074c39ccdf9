"""What a hostile, slow or greedy client of a teacher's server is answered, and that nobody else notices."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serve_lab import STATES, Gated, running, wait_for
from support import tiny

from trl_opsd.teacher import Resident
from trl_opsd.teacher.serve.reader import Asked, Full, Waiting


@pytest.fixture(scope="module")
def small():
    """A server with small limits, which no request of these tests may end or occupy."""
    with running(tiny.qwen2(48, 1), max_model_len=32, max_request_tokens=64) as server:
        yield server


def body(**changes):
    """A request that is answered, changed."""
    return {"input": [5, 6], "task": "token_embed", **STATES, **changes}


def raw(asked):
    """A whole HTTP request."""
    content = json.dumps(asked).encode()
    head = f"POST /pooling HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + content


HOSTILE = {
    "text": (body(input="two words"), 400, "input='two words': Input should be a valid list.*no tokenizer"),
    "texts": (body(input=["two", "words"]), 400, "input.0.0='two'.*no tokenizer"),
    "text_in_a_row": (body(input=[["two"]]), 400, "input.0.0='two': Input should be a valid integer.*no tokenizer"),
    "nothing": (body(input=None), 400, "input=None: Input should be a valid list"),
    "missing": ({"use_activation": False}, 400, "input=.*Field required"),
    "no_rows": (body(input=[]), 400, r"input.0=\[\]: List should have at least 1 item"),
    "empty_row": (body(input=[[1], []]), 400, r"input.1=\[\]: List should have at least 1 item"),
    "object": (body(input={"a": 1}), 400, "input={'a': 1}: Input should be a valid list"),
    "number": (body(input=7), 400, "input=7: Input should be a valid list"),
    "mixed": (body(input=[1, [2]]), 400, "input.0=1: Input should be a valid list"),
    "deeper": (body(input=[[[1]]]), 400, r"input.0.0=\[1\]: Input should be a valid integer"),
    "negative": (body(input=[[3, -1]]), 400, "Token id -1 is out of vocabulary: expected 0 to 258"),
    "beyond": (body(input=[259]), 400, "Token id 259 is out of vocabulary"),
    "huge": (body(input=[10**400]), 400, "Token id 1000+.*0 is out of vocabulary"),
    "too_huge": (b'{"input": [' + b"9" * 5000 + b"]}", 400, "not JSON"),
    "boolean": (body(input=[True, 2]), 400, "input.0.0=True: Input should be a valid integer"),
    "fraction": (body(input=[1.0]), 400, "input.0.0=1.0: Input should be a valid integer"),
    "null_id": (body(input=[[None]]), 400, "input.0.0=None: Input should be a valid integer"),
    "overlong": (body(input=[1] * 33), 400, "33 tokens, longer than the maximum model length of 32"),
    "too_many": (body(input=[[1] * 20] * 4), 413, "have 80 tokens together, the limit of a request is 64"),
    "not_json": (b"{", 400, "not JSON"),
    "no_content": (b"", 400, "not JSON"),
    "nan": (b'{"input": [NaN]}', 400, "contains NaN"),
    "infinity": (b'{"input": [1], "priority": Infinity}', 400, "contains Infinity"),
    "twice": (b'{"input": [1], "input": [2]}', 400, "the key 'input' twice"),
    "nested": (b"[" * 60_000, 400, "nested too deeply"),
    "not_text": (b"\xff\xfe\x00", 400, "not JSON"),
    "list": (b"[1]", 400, r"content=\[1\]: Input should be a valid dictionary"),
    "other_model": (body(model="b/teacher"), 404, "'b/teacher' does not exist: this server has 'a/teacher'"),
    "odd_model": (body(model={"a": ["b"] * 999}), 400, "Input should be a valid string"),
    "task": (body(task="embed"), 400, "task='embed': Input should be 'token_embed'"),
    "odd_task": (body(task=[["x"]]), 400, "Input should be 'token_embed'"),
    "normalised": ({"input": [1]}, 400, "Send `use_activation: false`"),
    "activation": (body(use_activation=0), 400, "use_activation=0: Input should be a valid boolean"),
    "encoding": (body(encoding_format="bytes"), 400, "encoding_format='bytes': Input should be 'float'"),
    "dtype": (body(embed_dtype="fp8_e4m3"), 400, "embed_dtype='fp8_e4m3': Input should be 'float32', 'bfloat16'"),
    "odd_dtype": (body(embed_dtype={}), 400, "embed_dtype={}: Input should be 'float32'"),
    "endianness": (body(endianness="middle"), 400, "endianness='middle': Input should be 'native'"),
    "chat": (body(messages=[]), 400, r"messages=\[\]: Extra inputs are not permitted"),
    "truncated": (body(truncate_prompt_tokens=1), 400, "truncate_prompt_tokens=1: Extra inputs"),
    "long_name": (body(**{"x" * 900: 1}), 400, "^x{80}=1: Extra inputs are not permitted"),
    "large": (b" " * 70_000, 413, "Maximum request body size 66560 exceeded"),
}


class TestHostileRequests:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_invalid_requests_are_refused_and_others_are_answered(self, small, case):
        content, status, message = HOSTILE[case]
        answer = small.post(content)
        assert answer.status == status, answer.content
        assert re.search(message, answer.message()), answer.message()
        assert len(answer.content) < 600
        assert small.reader.waiting.tokens == 0
        assert len(small.states([[5, 6]])[0]) == 2

    def test_wrong_paths_methods_and_types_get_json_errors(self, small):
        for method, path, status in [
            ("GET", "/pooling", 405),
            ("POST", "/health", 405),
            ("POST", "/v1/embeddings", 404),
            ("GET", "/../../etc/passwd", 404),
            ("DELETE", "/v1/models", 405),
        ]:
            answer = small.send(method, path)
            assert answer.status == status
            assert answer.message()
        content = json.dumps(body()).encode()
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/json-seq"):
            assert small.post(content, **{"Content-Type": kind}).status == 400
        assert small.post(content, **{"Content-Encoding": "gzip"}).status == 415
        assert small.post(content, **{"Content-Type": "application/json; charset=utf-8"}).status == 200

    def test_broken_http_is_answered_with_an_error(self, small):
        for content in (
            b"\x16\x03\x01\x02\x00",
            b"POST /pooling HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
            b"POST /pooling HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", small.port), timeout=30) as plain:
                plain.sendall(content)
                assert plain.recv(4096).split()[1] == b"400", content[:40]
        assert small.send("GET", "/health").status == 200

    def test_unknown_host_headers_are_refused(self, small):
        for host in ("evil.example", "127.0.0.1.evil.example:80", "0.0.0.0", "[", ""):
            assert small.post(body(), Host=host).status == 403
            assert small.send("GET", "/v1/models", Host=host).status == 403
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
            assert small.post(body(), Host=host).status == 200
        assert small.send("OPTIONS", "/pooling", Origin="http://evil.example").status == 405


@pytest.fixture(scope="module")
def guarded():
    with running(tiny.qwen2(48, 1), token="s3cret") as server:
        yield server


class TestToken:
    @pytest.mark.parametrize("given", [None, "", "s3cret", "Bearer", "Bearer ", "Bearer S3cret", "Bearer s3cret ÿ"])
    def test_requests_without_the_token_are_refused_unread(self, guarded, given):
        header = {} if given is None else {"Authorization": given}
        for answer in (guarded.send("GET", "/v1/models", **header), guarded.post(b"not JSON", **header)):
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert "TRL_OPSD_TEACHER_TOKEN" in answer.message()
            assert "s3cret" not in answer.content.decode()

    def test_requests_with_the_token_are_answered_for_any_host_name(self, guarded):
        for header in ("Bearer s3cret", "bearer s3cret"):
            assert guarded.send("GET", "/v1/models", Authorization=header, Host="gpu7.lab").status == 200
            assert guarded.post(body(), Authorization=header).status == 200
        assert guarded.send("GET", "/health").status == 200


class TestLimits:
    def test_requests_beyond_the_queue_get_503_with_retry_after(self):
        with running(tiny.qwen2(48, 1), Gated, max_waiting_tokens=100) as server, ThreadPoolExecutor(2) as pool:
            server.teacher.placement.shut()
            first = pool.submit(server.states, [[5] * 60])
            wait_for(lambda: server.reader.waiting.tokens == 60)
            refused = server.post(body(input=[5] * 41))
            assert refused.status == 503
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
            assert "60 tokens are queued; with the 41 of this request they would exceed 100" in refused.message()
            second = pool.submit(server.states, [[5] * 40])
            server.teacher.placement.gate.set()
            assert len(first.result(60)[0]) == 60
            assert len(second.result(60)[0]) == 40
            assert server.states([[5] * 100])[0].shape == (100, 48)

    def test_requests_of_disconnected_clients_are_not_scored(self):
        with running(tiny.qwen2(48, 1), Gated) as server, ThreadPoolExecutor(1) as pool:
            server.teacher.placement.shut()
            first = pool.submit(server.states, [[5] * 10])
            assert server.teacher.placement.began.wait(30)
            with socket.create_connection(("127.0.0.1", server.port)) as gone:
                gone.sendall(raw(body(input=[[5] * 200, [6] * 200])))
                wait_for(lambda: server.reader.waiting.tokens == 410)
            wait_for(lambda: server.reader.waiting.tokens == 10)
            server.teacher.placement.gate.set()
            first.result(60)
            server.states([[7, 8, 9]])  # would be read after it
            assert server.reader.counts.tokens == 13

    @pytest.mark.parametrize("leaves", [True, False])
    def test_a_client_that_does_not_read_its_answer_is_disconnected(self, leaves):
        with running(tiny.qwen2(512, 1), patience=60.0 if leaves else 0.2) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as slow:
                slow.sendall(raw(body(input=[[5] * 256] * 40)))
                assert slow.recv(100).startswith(b"HTTP/1.1 200 OK")
                if not leaves:
                    wait_for(lambda: server.reader.waiting.tokens == 0)
            wait_for(lambda: server.reader.waiting.tokens == 0)
            assert len(server.states([[5, 6]])[0]) == 2

    def test_a_request_that_arrives_too_slowly_is_dropped(self):
        with running(tiny.qwen2(48, 1), patience=0.2) as server:
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
                slow.sendall(raw(body())[:-3])
                assert slow.recv(4096).startswith(b"HTTP/1.1 408")
            assert len(server.states([[5, 6]])[0]) == 2

    def test_shutdown_answers_begun_requests_and_refuses_others(self):
        with ThreadPoolExecutor(2) as pool:
            with running(tiny.qwen2(48, 1), Gated) as server:
                placement, waiting = server.teacher.placement, server.reader.waiting
                placement.shut()
                begun = pool.submit(server.post, body(input=[[5] * 250]))
                assert placement.began.wait(30)
                late = pool.submit(server.post, body(input=[[5] * 3] * 200))
                wait_for(lambda: waiting.tokens == 850)
                opener = threading.Timer(0.5, placement.gate.set)
                opener.start()
            assert late.result(10).status == 503
            assert "The server is shutting down" in late.result(10).message()
            assert begun.result(10).status == 200
            assert len(begun.result(10).content) == 250 * 48 * 4

    @pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [9, 3, 5, 7]])
    def test_requests_take_turns(self, lengths):
        waiting = Waiting(lambda given: [[row] for row in range(len(given))], 1000, 0.0)
        large, small = (Asked([torch.zeros(n) for n in these], torch.float32, None) for these in (lengths, [4, 4]))
        waiting.join(large)
        waiting.join(small)
        assert waiting.passes() == 6
        order = [taken for _ in range(6) for taken in waiting.take()]
        assert order == [(large, 0), (small, 0), (large, 1), (small, 1), (large, 2), (large, 3)]
        assert waiting.take() == []
        with pytest.raises(Full):
            waiting.join(Asked([torch.zeros(1000)], torch.float32, None))


class Poisoned(Resident):
    """Fails at a row that begins with token 12 or 13, and reads NaN for one that begins with 14."""

    def __init__(self, model, device):
        super().__init__(model, device)
        model.get_input_embeddings().register_forward_hook(self._embed)

    def _embed(self, module, ids, found):
        first = ids[0][:, 0].tolist()
        if 12 in first:
            raise torch.OutOfMemoryError("no memory left")
        if 13 in first:
            raise RuntimeError("device-side assert triggered\nsome/path.cu")
        return found.masked_fill((ids[0][:, :1] == 14)[..., None], float("nan"))


class TestFailures:
    @pytest.mark.parametrize(
        ("token", "reason", "health"),
        [(12, "OutOfMemoryError: no memory left.", 200), (13, "RuntimeError: device-side assert triggered.", 503)],
    )
    def test_failed_pass_is_answered_and_the_server_lives(self, caplog, token, reason, health):
        with running(tiny.qwen2(48, 1), Poisoned) as server:
            answer = server.post(body(input=[token, 5, 5]))
            assert answer.status == 500
            assert answer.message() == f"The teacher failed on this request, {reason}"
            assert "A forward pass over 1 rows of up to 3 tokens failed." in caplog.text
            assert server.send("GET", "/health").status == health
            assert len(server.states([[5, 6]])[0]) == 2
            assert server.send("GET", "/health").status == 200

    def test_nonfinite_states_are_an_error_not_an_answer(self):
        with running(tiny.qwen2(48, 1), Poisoned) as server:
            answer = server.post(body(input=[[5, 6], [14, 5]]))
            assert answer.status == 500
            assert "The teacher's states of row 1 are not finite in float32" in answer.message()
            assert len(server.states([[5, 6]])[0]) == 2
