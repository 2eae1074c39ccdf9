"""Answers of an SGLang server are validated, and what would end it is not sent; the server here does as it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support import tiny
from told_server import Told, running
from torch import distributed

from trl_opsd._compat import weight_group
from trl_opsd.errors import ServerError
from trl_opsd.rollout import sglang, weight_sync
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.sglang import SGLangServer, sampling_params

INFO = {
    "dtype": "float32", "device": "cpu", "dp_size": 1, "pp_size": 1, "tp_size": 1, "page_size": 1,
    "max_req_input_len": 20, "enable_deterministic_inference": False,
}  # fmt: skip
DEADLINE = 2.0
URL = "http://127.0.0.1:30000"
ROW = ([5, 6, 7], {"max_tokens": 4, "stop_token_ids": [2], "logprobs": 0, "prompt_logprobs": 0})


class Server(Told):
    """Answers as SGLang does, with what `spoil` makes of it, and receives weights in a group."""

    def __init__(self) -> None:
        super().__init__({"/health": (200, b""), "/server_info": (200, dict(INFO))})
        self.spoil: Callable[[dict[str, Any]], Any] = lambda row: row
        self.version = "default"
        self.received: dict[str, torch.Tensor] = {}

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path in self.answers:
            return self.answers[path]
        if path == "/generate":
            asked = [body[name] for name in ("input_ids", "sampling_params", "return_logprob", "logprob_start_len")]
            return 200, self.spoil(self.row(*asked))
        if path == "/init_weights_update_group":
            self.join(body)
        if path == "/update_weights_from_distributed":
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                self.received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast(self.received[name], 0).wait()
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return 200, {"success": True, "message": ""}

    def row(self, ids: list[int], sampling: dict[str, Any], logprobs: bool, start: int) -> dict[str, Any]:
        written = [9] * sampling["max_new_tokens"]
        told = {
            "prompt_tokens": len(ids), "finish_reason": {"type": "length", "length": len(written)},
            "weight_version": self.version, "weight_versions": [{"version": self.version, "start": 0, "end": 4}],
        }  # fmt: skip
        if logprobs:
            told["output_token_logprobs"] = [[-0.5, token, None] for token in written]
            shown = ids if start == 0 else []
            told["input_token_logprobs"] = [[None if not n else -0.25, token, None] for n, token in enumerate(shown)]
        return {"text": "", "output_ids": written, "meta_info": told}

    def join(self, body: dict[str, Any]) -> None:
        """Does what `init_custom_process_group` does, without torch's registry, which is the client's here."""
        name, size = body["group_name"], body["world_size"]
        store = distributed.TCPStore(
            body["master_address"], body["master_port"], size, is_master=False, timeout=timedelta(seconds=20)
        )
        for prefix in (name, f"{name}/", "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        self.group = distributed.ProcessGroupGloo(store, body["rank_offset"], size, timedelta(seconds=20))


@pytest.fixture
def server() -> Iterator[Server]:
    with running(Server()) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[ServedRollout]:
    made = connected(server)
    yield made
    made.close()


def connected(server: Server, **given: Any) -> ServedRollout:
    args = tiny.config("nothing is written", **{"sglang_server_url": server.url, "vllm_server_timeout": 0.0, **given})
    made = ServedRollout(args, SGLangServer)
    made.server.http._deadline = DEADLINE
    return made


def wrote(client: ServedRollout, *rows: tuple[list[int], dict[str, Any]]) -> list[Any]:
    """The completions of prompts with their options."""
    return client.write([ids for ids, _ in rows], [options for _, options in rows])


# ---- The server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "auto"),
        ("dp_size", 2),
        ("pp_size", 2),
        ("enable_deterministic_inference", True),
        ("max_req_input_len", "20"),
        ("tp_size", True),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(server, name, value):
    server.answers["/server_info"] = (200, {**INFO, name: value})
    with pytest.raises(ServerError, match=f"{name}={value!r}: Input should be"):
        connected(server)


# ---- Completions -----------------------------------------------------------------------------------------------------


def test_each_row_is_a_request_with_its_own_options(server, client):
    rows = [ROW, ([8], {"max_tokens": 2, "temperature": 0.5, "seed": 3}), ([1] * 19, {"max_tokens": 9, "logprobs": 0})]
    first, second, third, full = wrote(client, *rows, ([1] * 20, {"max_tokens": 2}))
    assert (first.prompt_ids, first.completion_ids) == ([5, 6, 7], [9] * 4)
    assert (first.logprobs, first.prompt_logprobs) == ([-0.5] * 4, [-0.25] * 2)
    assert (second.completion_ids, second.logprobs, second.prompt_logprobs) == ([9] * 2, [], [])
    assert len(third.completion_ids) == 5, "up to the context of the server"
    assert (len(third.logprobs), third.prompt_logprobs) == (5, [])
    assert full.completion_ids == [], "which is not sent"
    bodies = {len(body["input_ids"]): body for path, body in server.asked if path == "/generate"}
    for (ids, _), sampling, scored, start in [
        (rows[0], {"stop_token_ids": [2], "max_new_tokens": 4}, True, 0),
        (rows[1], {"stop_token_ids": [], "max_new_tokens": 2, "temperature": 0.5}, False, -1),
        (rows[2], {"stop_token_ids": [], "max_new_tokens": 5}, True, -1),
    ]:
        asked = {"sampling_params": sampling, "return_logprob": scored, "logprob_start_len": start}
        assert bodies.pop(len(ids)) == {"input_ids": ids, **asked}
    assert not bodies


def told(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Answers with these entries."""
    return lambda row: {**row, "meta_info": {**row["meta_info"], **changes}}


def ended(reason: dict[str, Any], ids: list[int]) -> Callable[[dict[str, Any]], Any]:
    """Answers with this end and these tokens."""
    logprobs = [[-0.5, token, None] for token in ids]
    spoil = told(finish_reason=reason, output_token_logprobs=logprobs)
    return lambda row: spoil({**row, "output_ids": ids})


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda row: {"error": "no"}, "output_ids=.*: Field required"),
    (lambda row: b"<html>", "Invalid JSON"),
    (lambda row: {**row, "output_ids": [9, 9, 9, -1]}, r"output_ids.3=-1: Input should be greater than or equal"),
    (lambda row: {**row, "meta_info": None}, "meta_info=None"),
    (told(prompt_tokens=2), "counted 2 tokens in a prompt of 3"),
    (told(finish_reason={"type": "abort", "message": "out of memory"}), "out of memory.*expected 4 tokens"),
    (ended({"type": "length", "length": 2}, [9, 9]), "generated 2 tokens and .*expected 4 tokens"),
    (ended({"type": "stop", "matched": 2}, [9, 9]), "generated 2 tokens and .*'matched': 2"),
    (ended({"type": "stop", "matched": "NaN happened"}, [9, 0]), "NaN happened"),
    (ended({"type": "stop", "matched": 3}, [9, 3]), r"'matched': 3.*one of \[2\] as the last. Start it with"),
    (ended({"type": "stop", "matched": 2}, []), "generated 0 tokens"),
    (told(output_token_logprobs=[[-0.5, 9, None]] * 3), "log-probabilities .*a finite one for each of 4"),
    (told(output_token_logprobs=[[-0.5, 8, None]] * 4), "a finite one for each of 4"),
    (told(output_token_logprobs=[[None, 9, None]] * 4), "a finite one for each of 4"),
    (told(input_token_logprobs=[[None, 5, None], [-1, 6, None]]), "a finite one for each of 2"),
    (told(input_token_logprobs=[[None, 5, None], [None, 6, None], [-1, 7, None]]), "a finite one for each of 2"),
    (told(weight_version="other"), r"with the weights \['other', 'run-1'\]"),
    (told(weight_versions=[{"version": "older"}, {"version": "newer"}]), "another program sent it weights"),
]


def test_an_answer_to_another_request_is_refused(server, client):
    client.server.version = server.version = "run-1"
    wrote(client, ROW)
    for server.spoil, message in WRONG:
        with pytest.raises(ServerError, match=message):
            wrote(client, ROW)


def test_a_row_that_ends_early_ends_with_an_end_token(server, client):
    server.spoil = ended({"type": "stop", "matched": 2}, [9, 2])
    [row] = wrote(client, ROW)
    assert row.completion_ids == [9, 2]
    server.spoil = ended({"type": "stop", "matched": 8}, [9, 8])
    [row] = wrote(client, (ROW[0], {**ROW[1], "regex": "a+"}))
    assert row.completion_ids == [9, 8], "a grammar has ended it"


# ---- Weights ---------------------------------------------------------------------------------------------------------


def weights(factor: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(4):
        yield f"layer.{number}", torch.full((3, 2), factor * number)


def test_weights_arrive_in_parts_and_the_version_follows(server, client, monkeypatch):
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 50)
    client.server.open(torch.device("cpu"))
    assert server.paths()[-2:] == ["/end_weight_update", "/init_weights_update_group"], "an open session is closed"
    for factor in (1.0, 2.0, 3.0):
        server.asked.clear()
        client.server.update(weights(factor))
        assert server.paths() == [
            "/begin_weight_update", *["/update_weights_from_distributed"] * 2, "/end_weight_update",
            "/update_weight_version",
        ]  # fmt: skip
        for name, tensor in weights(factor):
            assert torch.equal(server.received[name], tensor)
        assert client.server.version == server.version
        assert len(wrote(client, ROW)) == 1
    client.server.reset_prefixes()
    assert server.paths()[-1] == "/flush_cache"
    server.answers["/flush_cache"] = (400, b"Flush cache failed.")
    with pytest.raises(ServerError, match=r"did not reset its prefix cache.*Flush cache failed"):
        client.server.reset_prefixes()
    client.close()
    assert server.paths()[-1] == "/destroy_weights_update_group"


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/begin_weight_update", (400, {"success": False, "message": "already open"}), "returned 400: .*already open"),
        ("/update_weights_from_distributed", (400, {"success": False, "message": "no session"}), "no session"),
        ("/update_weights_from_distributed", (200, {"success": False, "message": "shape"}), "returned .*shape"),
        ("/end_weight_update", (200, {}), "/end_weight_update returned {}"),
        ("/update_weight_version", (500, b"oops"), "returned 500: oops"),
    ],
)
def test_failed_update_is_an_error_and_none_follows(server, client, monkeypatch, path, answer, message):
    client.server.open(torch.device("cpu"))
    client.server.update(weights())
    server.answers[path] = answer
    monkeypatch.setattr(sglang, "MEET_SECONDS", 3.0)  # what a process may wait for at its end
    began = time.monotonic()
    with pytest.raises(ServerError, match=message):
        client.server.update(weights())
    assert time.monotonic() - began < DEADLINE, "the group is not waited for"
    assert client.server.version is None
    del server.answers[path]
    with pytest.raises(ServerError, match=r"is disconnected.* because an update failed"):
        client.server.update(weights())


def test_a_server_that_does_not_connect_is_an_error(server, client, monkeypatch):
    monkeypatch.setattr(weight_group, "MEET_SECONDS", 1.0)
    monkeypatch.setattr(sglang, "MEET_SECONDS", 1.0)
    server.answers["/init_weights_update_group"] = (400, {"success": False, "message": "no such backend"})
    with pytest.raises(ServerError, match=r"returned 400: .*no such backend"):
        client.server.open(torch.device("cpu"))
    server.answers["/init_weights_update_group"] = (200, {"success": True, "message": ""})
    with pytest.raises(ServerError, match=r"did not connect to 127.0.0.1 port \d+ of this machine"):
        client.server.open(torch.device("cpu"))


# ---- Options ---------------------------------------------------------------------------------------------------------


def test_options_are_translated():
    more = {"min_new_tokens": 2, "logit_bias": {"5": 1.0}, "temperature": 0.0}
    given = {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "top_p": 0.9, "generation_kwargs": more}
    assert sampling_params(tiny.config("x", sglang_server_url=URL, **given), [2, 3]) == {
        "temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0, "min_new_tokens": 2,
        "logit_bias": {"5": 1.0}, "stop_token_ids": [2, 3], "ignore_eos": False,
    }  # fmt: skip
    every = sampling_params(tiny.config("x", sglang_server_url=URL), [])
    assert (every["top_k"], every["ignore_eos"]) == (-1, True)
