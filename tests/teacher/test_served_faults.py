"""What is asked of a teacher's server, and when; whatever it answers wrongly or late is noticed, never trained on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from served_lab import K, V, check_equal, proposed, rows, states_teacher, tokens_teacher
from support import serving, tiny
from support.failing_server import Pretended, Scoring, after, hang_up, pretended
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDConfig
from trl_opsd._compat.http import WrongAnswerError
from trl_opsd.errors import ServerError
from trl_opsd.teacher import servers
from trl_opsd.teacher.checks import deadline
from trl_opsd.teacher.served import ServedTeacher

KINDS = {"states": (Pretended, {}), "vLLM": (Scoring, {"api": "vllm"}), "SGLang": (Scoring, {"api": "sglang"})}


@pytest.fixture
def breathless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are asked again at once."""
    monkeypatch.setattr(servers, "PAUSE", 0.01)


@pytest.fixture(scope="module")
def models(checkpoint: tuple[str, Any]) -> dict[str, Any]:
    """Other models of the teacher's shape; a fine-tune has its norms and its head."""
    tuned = AutoModelForCausalLM.from_pretrained(checkpoint[0]).eval()
    with torch.no_grad():
        tuned.model.layers[0].mlp.up_proj.weight.mul_(-1)
    return {"tuned": tuned, "another": serving.spread_norms(tiny.qwen2(64, seed=1), by=0.7).eval()}


def no_mask(server: Pretended, _: Any, __: Any) -> torch.Tensor:
    ids = server.row.ids
    return server.computed(ids, attention_mask={"full_attention": torch.zeros(1, 1, len(ids), len(ids))})


def inside(server: Pretended, _: Any, __: Any) -> torch.Tensor:
    """The states before the final norm."""
    kept: list[torch.Tensor] = []
    with server.lock:
        hook = server.model.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        server.computed(server.row.ids)
        hook.remove()
    return kept[0][0]


# From a server, its right answer [L, H] or [L, V], and other models, to a wrong one.
BOTH = {
    "ahead": lambda _, x, __: x.roll(-1, 0),
    "behind": lambda _, x, __: torch.cat([x[:1], x[:-1]]),
    "reversed": lambda _, x, __: x.flip(0),
    "both ways": no_mask,
    "one for all tokens": lambda _, x, __: x[1:2].expand_as(x),
    "zeros": lambda _, x, __: torch.zeros_like(x),
    "NaN": lambda _, x, __: torch.full_like(x, torch.nan),
    "another model": lambda server, _, models: server.computed(server.row.ids, models["another"]),
    "fine-tune": lambda server, _, models: server.computed(server.row.ids, models["tuned"]),
    "another row": lambda server, _, __: server.computed([(one + 7) % V for one in server.row.ids]),
    "scaled": lambda _, x, __: 2 * x,
}
STATES = {
    "hardly scaled": lambda _, x, __: 1.05 * x,
    "normalised": lambda _, x, __: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-9),
    "not normalised": inside,
    "one NaN": lambda _, x, __: x.index_fill(0, torch.tensor([1]), torch.nan),
    "too few": lambda _, x, __: x[1:],
    "last only": lambda _, x, __: x[-1:],
    "strange extra": lambda _, x, __: torch.cat([x.flip(0), x]),
}
TOKENS = {
    "another temperature": lambda _, x, __: (x / 2).log_softmax(-1),
    "halved": lambda _, x, __: x / 2,
    "uniform": lambda _, x, __: torch.full_like(x, 1 / V).log(),
    "logits": lambda _, x, __: 30 + 3 * x,
    "other ids": lambda _, x, __: x.roll(1, 1),
}


def changed(change: Any) -> Any:
    """A lie of vLLM's in JSON."""

    def lie(server: Scoring, logs_LV: torch.Tensor, _: Any) -> bytes:
        ids = server.row.ids
        asked = {"prompt_logprob_token_ids": [[*range(K)]] * 3, "prompt_logprob_start": len(ids) - 4}
        return json.dumps(change(json.loads(server.body(ids, asked, {"token_ids": ids}, logs_LV)))).encode()

    return lie


OF_VLLM = {
    "no scores": changed(lambda answer: {**answer, "prompt_token_id_logprobs": None}),
    "no array": changed(lambda answer: {**answer, "prompt_token_id_logprobs": "gASVAAAA"}),
    "too few": changed(lambda answer: answer),
}
ANY = {
    "dies": lambda *_: hang_up(*_[:2]),
    "garbage": lambda *_: b"\x00\x01garbage",
    "cut": lambda *_: b'{"choices": [{"index": 0',
    "another answer": lambda *_: b"[]",
    "oversize": lambda *_: b" " * 20_000_000,
    "compressed": lambda *_: (200, b"x", {"Content-Encoding": "gzip"}),
    "redirect": lambda *_: (302, b"", {"Location": "http://example.com"}),
    "gone": lambda *_: (404, b"{}", {}),
    "another task": lambda *_: (400, b'{"error":{"message":"Try switching the model\'s pooling_task"}}', {}),
    "token": lambda *_: (401, b"{}", {}),
    "fails": lambda *_: (500, b"out of memory", {}),
}
OF_KIND = {"states": STATES, "vLLM": {**TOKENS, **OF_VLLM}, "SGLang": TOKENS}
CASES = [
    pytest.param(
        kind,
        lie,
        when,
        id=f"{kind}, {when}: {name}",
        marks=[pytest.mark.long] * (kind == "SGLang" or name in ANY or (when == "later" and name != "fine-tune")),
    )
    for kind in KINDS
    for name, lie in {**BOTH, **OF_KIND[kind], **ANY}.items()
    for when in ("start", "later")
    if when == "later" or name not in OF_VLLM  # which have a batch's shape
]


@pytest.mark.parametrize(("kind", "lie", "when"), CASES)
def test_a_faulty_answer_is_never_learned_from(checkpoint, models, breathless, kind, lie, when):
    path, (pretend, given) = checkpoint[0], KINDS[kind]
    given = {"words": tiny.tokenizer(), **given} if given else {}
    with pretended(checkpoint[1], kind=pretend, **given) as server:

        def build() -> ServedTeacher:
            if kind == "states":
                return states_teacher(path, server.url)
            return tokens_teacher(path, server.url, "both_top_k" if kind == "vLLM" else "teacher_top_k")

        def fault(server: Any, right: torch.Tensor) -> Any:
            return lie(server, right, models)

        if when == "start":
            server.fault = fault
            with pytest.raises((ServerError, ValueError)):
                build()
            return
        teacher = build()
        teacher.targets(proposed())
        server.fault = fault
        with pytest.raises(ServerError, match=f"The teacher's server at {server.url}"):
            teacher.targets(proposed())


def test_a_wrong_answer_is_not_asked_for_again(served, checkpoint):
    with pretended(checkpoint[1], lambda *_: b"garbage", faulty_from=2) as bad:
        teacher = served(bad)
        with pytest.raises(WrongAnswerError):
            teacher.targets(rows().select([5]))
        assert len(bad.asked) in (2 + 1, 2 + 1 + 1), "and one of the first rows, if it was sent before the answer"


def test_a_server_that_lists_no_models_is_refused(served, checkpoint):
    with pretended(checkpoint[1], models={"hello": "world"}) as server, pytest.raises(ServerError, match="/v1/models"):
        served(server)


# ---- What is asked, and what is kept ---------------------------------------------------------------------------------


def test_rows_are_read_once_up_to_last_counted_token_at_the_same_time(served, checkpoint):
    with pretended(checkpoint[1], after(0.05)) as server:
        teacher, rollout = served(server), rows(20)
        server.asked.clear()
        check_equal(teacher, checkpoint[1], rollout)
        lists = zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)
        whole = [[*prompt, *completion][:-1] for prompt, completion in lists]
        again = list(teacher._probes[0].ids[:-1])
        assert sorted(server.asked) == sorted([again, whole[0], *whole[3:]]), "0 and 1 are one row, 2 counts nowhere"
        assert server.most_running > 2
        assert teacher.context == 193
        assert torch.equal(teacher.head.weight, checkpoint[1].lm_head.weight)


def test_expected_rows_are_prefetched_and_found_in_any_grouping(served, checkpoint, monkeypatch):
    with pretended(checkpoint[1]) as server:
        teacher, rollout = served(server), rows(8)
        teacher.expect(rollout.select([0, 1, 2, 3]))
        teacher.expect(rollout.select([3, 4, 5]))
        began = time.monotonic()
        while len(server.asked) < 2 + 4:
            assert time.monotonic() - began < 10
            time.sleep(0.01)
        check_equal(teacher, checkpoint[1], rollout.select([5, 0]).cut())
        check_equal(teacher, checkpoint[1], rollout.select([4, 7, 1, 6, 3]))
        assert len(server.asked) == 2 + 4 + 1 + 2 + 1 + 1, "6 and 7 were not expected; 0, which 1 repeats, was taken"
        assert not teacher._expected

        monkeypatch.setattr("trl_opsd.teacher.served._EXPECTED_BYTES", 2 * 12 * 64 * 4)
        teacher.expect(rollout)
        assert len(teacher._expected) < 4, "what nobody asks for is dropped"
        check_equal(teacher, checkpoint[1], rollout)
        teacher.expect(rollout)
        teacher.forget_expected()
        assert not teacher._expected


def test_an_error_of_a_prefetched_row_is_raised_by_targets(served, checkpoint):
    with pretended(checkpoint[1], hang_up, faulty_from=2) as server:
        teacher = served(server)
        teacher.expect(rows())
        with pytest.raises(ServerError, match=r"The teacher's server at .*/pooling failed"):
            teacher.targets(rows())


def test_a_preempted_row_gets_the_states_of_its_last_pass(served, checkpoint):
    def preempted(server, states):
        return torch.cat([states[:2], states[:1], states])

    with pretended(checkpoint[1], preempted, faulty_from=2) as server:
        check_equal(served(server), checkpoint[1], rows())


def test_an_id_beyond_the_teachers_vocabulary_is_not_sent(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        teacher, rollout = served(server), rows()
        rollout.completion_ids[5, 0] = V
        server.asked.clear()
        with pytest.raises(ValueError, match=r"token id 259, but the teacher's vocabulary has 259"):
            teacher.targets(rollout)
        assert not server.asked


def test_states_are_sent_in_the_servers_dtype(served, checkpoint):
    half = tiny.qwen2(64, seed=1)
    half.load_state_dict(checkpoint[1].state_dict())
    half.bfloat16()
    with pretended(half) as server:
        teacher = served(server)
        check_equal(teacher, half, rows())
        assert {row.hidden.dtype for row in teacher.targets(rows()).rows} == {torch.bfloat16}
        assert teacher.head.weight.dtype == torch.bfloat16


def test_another_model_name_is_told_and_the_token_is_sent(served, checkpoint, caplog, monkeypatch):
    monkeypatch.setenv("TRL_OPSD_TEACHER_TOKEN", "secret")
    with pretended(checkpoint[1], models={"data": [{"id": "a teacher", "root": "/x/Other-7B"}]}) as server:
        teacher = served(server)
        assert "'/x/Other-7B'" in str(teacher)
        assert server.tokens == {"Bearer secret"}
        assert teacher.context == 256, "of the checkpoint"
        assert "secret" not in caplog.text + str(teacher)


# ---- One deadline, however long it takes -----------------------------------------------------------------------------


@contextmanager
def takes(least: float, most: float):
    began = time.monotonic()
    yield
    assert least <= time.monotonic() - began < most


def refuse_then(refusals: int, answer, status: int = 503):
    """Says that it is busy so often, then answers so."""
    left = iter(range(refusals))
    return lambda server, states: answer(server, states) if next(left, None) is None else (status, b"full", {})


def well(_, states):
    return states


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (after(30), r"within 1 seconds \(from `ddp_timeout`\)"),
        (lambda *_: (503, b"full", {}), "returned 503"),
        (refuse_then(60, after(30)), ""),
    ],
    ids=["hangs", "busy", "busy, then hangs"],
)
def test_a_batch_has_one_deadline(served, checkpoint, breathless, fault, said):
    with pretended(checkpoint[1]) as server:
        teacher = served(server, deadline=1.0)
        server.fault = fault
        said = f"The teacher's server at {server.url} has not scored a row.*{said}"
        with takes(0.9, 1.6), pytest.raises(ServerError, match=said):
            teacher.targets(rows())


@pytest.mark.quick
def test_teachers_behind_servers_share_the_deadline(tmp_path):
    for urls, share in (("http://a:1", 1), ({"math": "http://a:1", "code": "http://b:1"}, 2)):
        args = OPSDConfig(str(tmp_path), teacher_server_url=urls, ddp_timeout=1000, use_cpu=True)
        assert deadline(args) == 900 / share


def test_server_that_hangs_at_start_fails_within_its_timeout(served, checkpoint, monkeypatch):
    monkeypatch.setattr(servers, "_PROBE_SECONDS", 0.5)
    with pretended(checkpoint[1], after(30)) as server:
        for timeout, seconds in ((0.0, 0.5), (1.0, 1.0)):
            said = rf"within {seconds:g} seconds \(from `teacher_server_timeout`\)"
            with takes(seconds - 0.1, seconds + 0.5), pytest.raises(ServerError, match=said):
                served(server, deadline=1000.0, timeout=timeout)
        server.fault = lambda *_: (503, b"full", {})
        with takes(0, 1), pytest.raises(ServerError, match="returned 503"):
            served(server, deadline=1000.0)


def each_once(fault):
    """Each row meets the fault once."""
    met = set()

    def once(server, states):
        with server.lock:
            is_new = (row := tuple(server.row.ids)) not in met
            met.add(row)
        return fault(server, states) if is_new else states

    return once


@pytest.mark.parametrize(
    ("fault", "again", "least"),
    [
        (lambda: refuse_then(40, well, 429), 40, 0),  # more refusals than attempts
        (lambda: refuse_then(40, well, 503), 40, 0),
        (lambda: each_once(after(30)), 5, 1.9),  # a third of the deadline
        (lambda: each_once(hang_up), 5, 0),
    ],
    ids=["429", "503", "no answer", "dropped connections"],
)
def test_a_row_is_asked_for_again(served, checkpoint, breathless, fault, again, least):
    with pretended(checkpoint[1]) as server:
        teacher = served(server, deadline=6.0)
        server.asked.clear()
        server.fault = fault()
        with takes(least, least + 3):
            check_equal(teacher, checkpoint[1], rows())
        assert len(server.asked) == 4 + 1 + again


def test_server_that_is_busy_at_start_is_waited_for(served, checkpoint, breathless):
    with pretended(checkpoint[1], refuse_then(7, well)) as server:
        check_equal(served(server), checkpoint[1], rows())


def test_states_that_come_late_are_right_and_warned_of_once(served, checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(servers, "_PROBE_SECONDS", 0.0)
    with pretended(checkpoint[1], after(1.5), faulty_from=2) as server:
        teacher = served(server, timeout=1.0)
        for seed in range(2):
            check_equal(teacher, checkpoint[1], rows(4, seed=seed))
        said = f"{server.url} has not answered a request within 1 seconds; waiting up to 6.66667 (from `ddp_timeout`)"
        assert [said in one for one in caplog.messages].count(True) == 1


def test_an_interrupt_ends_the_wait_and_leaves_only_daemon_threads(served, checkpoint, interruptible):
    with pretended(checkpoint[1], after(5), faulty_from=2) as server:
        teacher = served(server)
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        with takes(0, 4), pytest.raises(KeyboardInterrupt):
            teacher.targets(rows())
        ours = [one for one in threading.enumerate() if one.name == "trl_opsd server client"]
        assert ours
        assert all(one.daemon for one in ours)
