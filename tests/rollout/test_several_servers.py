"""Several servers generate for one student, and some die: fakes that say so, and real vLLM servers that are killed."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forks, serving, tiny
from test_sglang_client import INFO, Server
from transformers import TrainerCallback

from trl_opsd import OPSDTrainer
from trl_opsd.errors import ServerError, SyncError
from trl_opsd.rollout import several
from trl_opsd.rollout.sglang import SGLangClient

CONTEXT = 120
ROWS = 12
OF_ROW = {"max_tokens": 2, "stop_token_ids": [0], "ignore_eos": False}


class Engine(Server):
    """SGLang's protocol around a model that is sent weights and generates greedily."""

    def __init__(self) -> None:
        super().__init__()
        self.answers["/server_info"] = (200, {**INFO, "page_size": 4, "max_req_input_len": CONTEXT - 6})
        self.model = tiny.qwen2(seed=9)
        self.rows: list[tuple[int, ...]] = []
        """Prompts that were completed, but those of proofs."""
        self.dies_after = self.refuses_after = float("inf")
        """Rows until it only hangs up, or answers 500."""
        self.seconds, self.is_deaf, self.lock = 0.0, False, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if len(self.rows) >= self.dies_after:
            raise ConnectionAbortedError  # the connection is closed without an answer
        if len(self.rows) >= self.refuses_after and path != "/health":
            return 500, {"error": "out of order"}
        found = super().answer(path, body)
        if path == "/end_weight_update" and self.received and not self.is_deaf:
            self.model.load_state_dict(self.received)
        return found

    @torch.no_grad()
    def row(self, ids: list[int], sampling: dict[str, Any], logprobs: bool, start: int) -> dict[str, Any]:
        with self.lock:
            if not sampling["ignore_eos"]:
                if len(self.rows) >= self.dies_after:
                    raise ConnectionAbortedError
                self.rows.append(tuple(ids))
            whole, past, scores = list(ids), None, torch.empty(0)
            for _ in range(sampling["max_new_tokens"]):
                out = self.model(torch.tensor([whole[len(scores) :]]), past_key_values=past, use_cache=True)
                past, scores = out.past_key_values, torch.cat([scores, out.logits[0].log_softmax(-1)])
                whole.append(int(scores[-1].argmax()))
                if whole[-1] in sampling["stop_token_ids"]:
                    break
        time.sleep(self.seconds)
        found = super().row(ids, sampling, logprobs, start)
        found["output_ids"] = written = whole[len(ids) :]
        if written[-1:] and written[-1] in sampling["stop_token_ids"]:
            found["meta_info"]["finish_reason"] = {"type": "stop", "matched": written[-1]}
        if logprobs:
            of = [None, *(float(scores[place, token]) for place, token in enumerate(whole[1:]))]
            entries = [[score, token, None] for score, token in zip(of, whole, strict=True)]
            found["meta_info"]["output_token_logprobs"] = entries[len(ids) :]
            found["meta_info"]["input_token_logprobs"] = entries[: len(ids)] if start == 0 else []
        return found

    def handle_error(self, *_: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made = [Engine(), Engine()]
    for one in made:
        threading.Thread(target=one.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def serve(engines: list[Engine], tmp_path: Any) -> Iterator[Callable[..., OPSDTrainer]]:
    """Builds a trainer that generates greedily with both."""
    made: list[OPSDTrainer] = []

    def serve(**given: Any) -> OPSDTrainer:
        made.append(trainer_of(tmp_path, [one.url for one in engines], **given))
        return made[-1]

    yield serve
    for trainer in made:
        with suppress(ServerError):
            trainer.rollout.close()


def trainer_of(folder: Path, urls: list[str], **given: Any) -> OPSDTrainer:
    options = {"sglang_server_url": urls, "vllm_server_timeout": 0.0, "top_k": 1, "learning_rate": 1e-2}
    options |= {"vllm_max_model_length": CONTEXT, "max_completion_length": 6, **given}
    return OPSDTrainer(
        model=tiny.qwen2(seed=3),
        teacher_model=tiny.qwen2(48, seed=1),
        args=tiny.config(folder, **options),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
    )


def greedy(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    """What a server with the student's weights completes."""
    alone = Engine()
    alone.model = trainer.accelerator.unwrap_model(trainer.model)
    sampling = {"max_new_tokens": 6, "stop_token_ids": list(trainer.eos_token_ids), "ignore_eos": False}
    rows = [alone.row(ids, sampling, False, -1)["output_ids"] for ids in prompts]
    alone.server_close()
    return rows


def stir(trainer: OPSDTrainer) -> None:
    with torch.no_grad():
        for part in trainer.model.parameters():
            part.mul_(1.1)


def complete(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    return trainer.rollout.complete(prompts, 0)


def stream(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    return [ids for _, ids in sorted(trainer.rollout.stream(prompts, 0))]


def singly(trainer: OPSDTrainer, prompts: list[list[int]]) -> list[list[int]]:
    ask = trainer.rollout.one_by_one(prompts, 0)
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts)), prompts))


# ---- One dies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [*(pytest.param(one, marks=pytest.mark.long) for one in (complete, stream)), singly])
def test_rows_of_a_dead_server_go_to_the_other(serve, engines, caplog, ask):
    trainer = serve()
    prompts = trainer.tokenize(tiny.PROMPTS)
    one, other = engines
    other.dies_after = 2
    assert ask(trainer, prompts) == greedy(trainer, prompts)
    assert len(other.rows) == 2
    assert set(one.rows) | set(other.rows) == {tuple(ids) for ids in prompts}
    died = [said for said in caplog.messages if "is used no more" in said]
    assert len(died) == 1, died
    assert f"the SGLang server at {other.url} is used no more in this run, its rows go to {one.url}: " in died[0]

    other.dies_after = float("inf")  # it was started again, with the weights of its checkpoint
    stir(trainer)
    assert ask(trainer, prompts) == greedy(trainer, prompts)
    assert len(other.rows) == 2


def test_a_machine_that_is_lost_loses_its_rows(engines, monkeypatch):
    servers = servers_of(engines)
    engines[1].seconds = 60.0  # no answer, and no connection that is closed
    engines[1].answers["/health"] = None  # nor is there any to this
    monkeypatch.setattr(several, "WATCHED", 0.1)
    monkeypatch.setattr(SGLangClient, "kind", replace(SGLangClient.kind, health_seconds=0.2))
    monkeypatch.setattr(Engine, "answer", lost(Engine.answer))
    began = time.monotonic()
    found = dict(servers.write_each([[5], [6], [7], [8]], [OF_ROW] * 4))
    assert sorted(found) == [0, 1, 2, 3]
    assert time.monotonic() - began < 5
    assert [one.url for one in servers.live] == [engines[0].url]


def servers_of(engines: list[Engine]) -> several.Servers:
    args = tiny.config("x", sglang_server_url=[one.url for one in engines], vllm_server_timeout=0.0)
    clients = [SGLangClient(args, 5.0, number=number) for number in range(len(engines))]
    for client in clients:
        client.vocabulary = 259
    return several.Servers(clients)


def lost(answer: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(self: Engine, path: str, body: Any) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return answer(self, path, body)

    return nothing


def test_all_dead_is_an_error(serve, engines):
    trainer = serve()
    engines[0].dies_after, engines[1].refuses_after = 1, 1
    with pytest.raises(ServerError, match=r"SGLang server at .*(failed|returned 500: .*out of order)"):
        trainer.rollout.complete(trainer.tokenize(tiny.PROMPTS), 0)


@pytest.mark.parametrize("overlap", [None, "step", "ahead"])
@pytest.mark.long
def test_training_goes_on_when_a_server_dies(serve, engines, overlap):
    engines[1].dies_after = 3
    trainer = serve(overlap=overlap, gradient_accumulation_steps=2)
    trainer.train()
    assert len(tiny.logged(trainer, "loss")) == 3
    assert all(torch.isfinite(torch.tensor(tiny.logged(trainer, "loss"))))
    assert len(engines[1].rows) == 3
    assert len(engines[0].rows) + 3 >= ROWS
    assert max(tiny.logged(trainer, "rollout/logprob_gap")) <= 1e-4


# ---- Weights ---------------------------------------------------------------------------------------------------------


def test_only_servers_that_agreed_before_are_dropped_for_errors(serve, engines, caplog):
    trainer = serve()
    prompts = trainer.tokenize(tiny.PROMPTS[:4])
    refused = {"/update_weights_from_distributed": (500, {"error": "no parameter named 'x'"})}
    engines[1].answers |= refused
    with pytest.raises(ServerError, match=rf"{engines[1].url}.*no parameter named 'x'"):
        complete(trainer, prompts)
    trainer.rollout.close()
    del engines[1].answers[next(iter(refused))]

    trainer = serve()
    assert complete(trainer, prompts) == greedy(trainer, prompts)
    engines[1].answers |= refused  # as one that was started again, and is in no group
    stir(trainer)
    before = len(engines[1].rows)
    assert complete(trainer, prompts) == greedy(trainer, prompts)
    assert len(engines[1].rows) == before > 0
    assert f"{engines[1].url} is used no more" in caplog.text
    engines[0].answers |= refused
    stir(trainer)
    with pytest.raises(ServerError, match=rf"{engines[0].url}.*no parameter named 'x'"):
        complete(trainer, prompts)


@pytest.mark.long
def test_stale_weights_of_one_server_are_found(serve, engines):
    trainer = serve()
    prompts = trainer.tokenize(tiny.PROMPTS)
    engines[1].is_deaf = True
    with pytest.raises(SyncError, match=rf"the SGLang server at {engines[1].url} and the student disagree"):
        complete(trainer, prompts)
    assert not engines[0].rows + engines[1].rows, "none generates"
    engines[1].is_deaf = False
    assert complete(trainer, prompts) == greedy(trainer, prompts)


def test_the_smallest_context_counts_and_dtypes_are_compared(serve, engines):
    info = engines[1].answers["/server_info"][1]
    info["max_req_input_len"] -= 10
    with pytest.raises(
        ValueError, match=rf"context is {CONTEXT - 10} tokens, the student's {CONTEXT}.*, at {engines[1].url}"
    ):
        serve()
    info["max_req_input_len"] += 10
    info["dtype"] = "bfloat16"
    with pytest.raises(ValueError, match=rf"float32 at {engines[0].url} and torch.bfloat16 at {engines[1].url}: start"):
        serve()


# ---- Rows ------------------------------------------------------------------------------------------------------------


def test_a_slower_server_gets_fewer_rows(engines):
    servers = servers_of(engines)
    engines[1].seconds = 0.3
    shares = []
    for _ in range(3):
        before = [len(one.rows) for one in engines]
        list(servers.write_each([[5]] * ROWS, [OF_ROW] * ROWS))
        shares.append([len(one.rows) - count for one, count in zip(engines, before, strict=True)])
    assert shares[0] == [ROWS // 2] * 2
    assert sum(shares[-1]) == ROWS
    assert shares[-1][0] > 1.5 * shares[-1][1], shares


# ---- Two processes ---------------------------------------------------------------------------------------------------


def in_one_of_two(folder: Path, urls: list[str], dead: str) -> dict[str, Any]:
    """The second server is dead for one of two processes alone."""
    trainer = trainer_of(folder / "out", urls)
    rank = trainer.accelerator.process_index
    prompts = trainer.tokenize(tiny.PROMPTS[: 3 + rank])
    complete(trainer, prompts)
    client = trainer.rollout.engine.live[1]
    request = client.http.request

    async def gone(method: str, path: str, **given: Any) -> Any:
        if path == client.path:
            raise ServerError("It is gone")
        return await request(method, path, **given)

    if rank == int(dead):
        client.http.request = gone
    found = [complete(trainer, prompts)]
    live = [len(trainer.rollout.engine.live)]
    stir(trainer)
    found.append(stream(trainer, prompts))
    live.append(len(trainer.rollout.engine.live))
    trainer.train()
    trainer.rollout.close()
    return {"found": found, "live": live, "losses": tiny.logged(trainer, "loss"), "rows": len(prompts)}


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
@pytest.mark.parametrize("dead", ["0", "1"])
def test_a_death_in_one_process_is_known_in_all(engines, tmp_path, dead):
    urls = [one.url for one in engines]
    results = [*forks.results("ddp", in_one_of_two, tmp_path, urls, dead).values()]
    for rank, found in enumerate(results):
        assert [len(rows) for rows in found["found"]] == [3 + rank] * 2
        assert found["live"] == [1 if rank == int(dead) else 2, 1], "the other learns it before the next rows"
        assert len(found["losses"]) == (3 if rank == 0 else len(found["losses"]))
    assert results[0]["found"][0] == results[1]["found"][0][:3]


# ---- Real servers ----------------------------------------------------------------------------------------------------


class Pair:
    """Two vLLM servers that are sent all weights; one that was killed can be started again at its port."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.ports = [serving.free_port(), serving.free_port()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes: list[Any] = [None, None]
        self.start(0)
        self.start(1)

    def start(self, number: int) -> None:
        import server_lab

        folder = self._folder / f"{number}-{time.monotonic_ns()}"
        folder.mkdir()
        started = server_lab.started(folder, str(self._folder / "student"), self.ports[number])
        self.processes[number] = self._stack.enter_context(started)

    def kill(self, number: int) -> None:
        serving.end(self.processes[number], seconds=0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    import vllm_lab

    folder = tmp_path_factory.mktemp("pair")
    vllm_lab.student(folder / "student", tied=True, seed=5)
    tiny.tokenizer().save_pretrained(folder / "student")
    with ExitStack() as stack:
        yield Pair(folder, stack)


def two_ports() -> int:
    """The first of two free ports: each server has its own."""
    while True:
        first = serving.free_port()
        with suppress(OSError):
            socket.create_server(("127.0.0.1", first + 1)).close()
            return first


class Each(TrainerCallback):
    def __init__(self, call: Callable[[int], None]) -> None:
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.call(state.global_step)


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("overlap", "dies"), [(None, "in a step"), ("step", "in a step"), ("step", "and is back")], ids=str
)
def test_a_vllm_server_is_killed_and_training_goes_on(pair, tmp_path, monkeypatch, caplog, overlap, dies):
    import tcp_transfer
    import vllm_lab

    tcp_transfer.use(monkeypatch)
    for number, process in enumerate(pair.processes):
        if process.poll() is not None:
            pair.start(number)
    asked, answered = Counter[str](), Counter[str]()
    trainer = vllm_lab.trainer(
        tmp_path, tied=True, vllm_mode="server", vllm_server_base_url=pair.urls, vllm_group_port=two_ports(),
        vllm_max_model_length=192, overlap=overlap, max_completion_length=120, gradient_accumulation_steps=4,
        max_steps=4, learning_rate=1e-3, temperature=1.5,
    )  # fmt: skip
    for client in trainer.rollout.engine.live:
        request = client.http.request

        async def counted(method: str, path: str, of: str = client.url, call: Any = request, **given: Any) -> Any:
            if path != "/v1/completions" or given["json"].get("seed") in (0, 1):  # those of proofs
                return await call(method, path, **given)
            asked[of] += 1
            if dies == "in a step" and trainer.state.global_step == 2 and of == pair.urls[0]:
                threading.Timer(0.05, pair.kill, [0]).start()
            found = await call(method, path, **given)
            answered[of] += found.status == 200
            return found

        client.http.request = counted

    def restart(step: int) -> None:
        if step == 2 and dies == "and is back":
            pair.kill(0)
            pair.start(0)

    trainer.add_callback(Each(restart))
    began = time.monotonic()
    trainer.train()
    print(f"\n{overlap}, {dies}: asked {dict(asked)}, answered {dict(answered)}, {time.monotonic() - began:.1f} s,",
          "seconds of a sync", [round(one, 3) for one in tiny.logged(trainer, "sync/seconds")])  # fmt: skip
    assert trainer.state.global_step == 4
    assert [one.url for one in trainer.rollout.engine.live] == pair.urls[1:]
    assert sum(f"{pair.urls[0]} is used no more in this run" in said for said in caplog.messages) == 1
    assert sum(answered.values()) == 4 * 8, "each row once"
    assert answered[pair.urls[0]] >= 4, "it generated before"
    if dies == "in a step":
        assert asked[pair.urls[0]] > answered[pair.urls[0]], "it had rows when it was killed"
    losses = tiny.logged(trainer, "loss")
    assert len(losses) == 4
    assert all(torch.isfinite(torch.tensor(losses)))
    gaps = tiny.logged(trainer, "rollout/logprob_gap")
    assert len(gaps) == 4, "a proof of each sync"
    assert max(gaps) <= 1e-4
    stir(trainer)
    trainer.complete(trainer.tokenize(["a"]))
    assert vllm_lab.gap(trainer) <= 1e-4, "of the student as it is now"
    trainer.rollout.close()
