"""What is asked of a teacher's server, and when; whatever it answers wrongly is noticed and never trained on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from served_lab import CPU, check_equal, proposed, rows, states_teacher
from support import serving, tiny
from support.failing_server import Pretended, Scoring, after, hang_up, pretended
from transformers import AutoModelForCausalLM

from trl_opsd._compat.http import WrongAnswerError
from trl_opsd.errors import ServerError
from trl_opsd.teacher import servers
from trl_opsd.teacher.served import ServedTeacher, answers_of
from trl_opsd.teacher.servers import TeacherServer

V, K = tiny.VOCABULARY, 8
KINDS = {"states": (Pretended, {}), "vLLM": (Scoring, {"api": "vllm"}), "SGLang": (Scoring, {"api": "sglang"})}


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
def test_a_faulty_answer_is_never_learned_from(checkpoint, models, monkeypatch, kind, lie, when):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    path, (pretend, given) = checkpoint[0], KINDS[kind]
    given = {"words": tiny.tokenizer(), **given} if given else {}
    with pretended(checkpoint[1], kind=pretend, **given) as server:

        def build() -> ServedTeacher:
            if kind == "states":
                return states_teacher(path, server.url)
            asked = TeacherServer(server.url, 20.0, 0.0)
            asked.look(tiny.tokenizer())
            targets = "both_top_k" if kind == "vLLM" else "teacher_top_k"
            teacher = ServedTeacher(path, asked, answers_of(asked, targets, path, {}, CPU, V, K))
            teacher.check_predictions({})
            return teacher

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


# ---- What is asked, and when -----------------------------------------------------------------------------------------


def test_row_is_read_once_up_to_last_counted_token(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        teacher, rollout = served(server), rows()
        server.asked.clear()
        check_equal(teacher, checkpoint[1], rollout)
        lists = zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)
        whole = [[*prompt, *completion][:-1] for prompt, completion in lists]
        again = list(teacher._probes[0].ids[:-1])
        assert sorted(server.asked) == sorted([again, *(whole[row] for row in (0, 3, 4, 5))]), (
            "0 and 1 are one row, 2 counts nowhere"
        )
        assert teacher.context == 193
        assert torch.equal(teacher.head.weight, checkpoint[1].lm_head.weight)


def test_rows_are_read_at_the_same_time(served, checkpoint):
    with pretended(checkpoint[1], after(0.05)) as server:
        check_equal(served(server), checkpoint[1], rows(20))
        assert len(server.asked) == 2 + 18 + 1, "and one of the first rows again"
        assert server.most_running > 2


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


def test_a_wrong_answer_is_not_asked_for_again(served, checkpoint):
    with pretended(checkpoint[1], lambda *_: b"garbage", faulty_from=2) as bad:
        teacher = served(bad)
        with pytest.raises(WrongAnswerError):
            teacher.targets(rows().select([5]))
        assert len(bad.asked) in (2 + 1, 2 + 1 + 1), "and one of the first rows, if it was sent before the answer"


def test_a_preempted_row_gets_the_states_of_its_last_pass(served, checkpoint):
    def preempted(server, states):
        return torch.cat([states[:2], states[:1], states])

    with pretended(checkpoint[1], preempted, faulty_from=2) as server:
        check_equal(served(server), checkpoint[1], rows())


def test_an_id_beyond_the_teachers_vocabulary_is_not_sent(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        teacher, rollout = served(server), rows()
        rollout.completion_ids[5, 0] = tiny.VOCABULARY
        server.asked.clear()
        with pytest.raises(ValueError, match=r"token id 259, but the teacher's vocabulary has 259"):
            teacher.targets(rollout)
        assert not server.asked


def test_an_interrupt_ends_the_wait_and_leaves_only_daemon_threads(served, checkpoint, interruptible):
    with pretended(checkpoint[1], after(5), faulty_from=2) as server:
        teacher = served(server)
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            teacher.targets(rows())
        assert time.monotonic() - began < 4
        ours = [one for one in threading.enumerate() if one.name == "trl_opsd server client"]
        assert ours
        assert all(one.daemon for one in ours)


def test_a_server_that_lists_no_models_is_refused(served, checkpoint):
    said = r"/v1/models returned data\.0\.id=.*: Field required"
    with pretended(checkpoint[1], models={"hello": "world"}) as server, pytest.raises(ServerError, match=said):
        served(server)


def test_absent_server_is_refused_with_a_command_starting_one(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        pass
    with pytest.raises(
        ValueError, match=r"No teacher's server at http://127.0.0.1:\d+ after `teacher_server_timeout=0`"
    ):
        served(server)


def test_states_are_sent_in_the_servers_dtype(served, checkpoint):
    half = tiny.qwen2(64, seed=1)
    half.load_state_dict(checkpoint[1].state_dict())
    half.bfloat16()
    with pretended(half) as server:
        teacher = served(server)
        check_equal(teacher, half, rows())
        assert {row.hidden.dtype for row in teacher.targets(rows()).rows} == {torch.bfloat16}
        assert teacher.head.weight.dtype == torch.bfloat16
        assert "128 bytes per token in bfloat16" in str(teacher)


def test_another_model_name_is_told_and_the_token_is_sent(served, checkpoint, caplog, monkeypatch):
    monkeypatch.setenv("TRL_OPSD_TEACHER_TOKEN", "secret")
    with pretended(checkpoint[1], models={"data": [{"id": "a teacher", "root": "/x/Other-7B"}]}) as server:
        teacher = served(server)
        assert "which reports '/x/Other-7B'" in str(teacher)
        assert server.tokens == {"Bearer secret"}
        assert teacher.context == 256, "of the checkpoint"
        assert "secret" not in caplog.text + str(teacher)
