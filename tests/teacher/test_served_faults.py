"""Whatever a server of a teacher does wrong is noticed, said once, and never trained on."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from served_lab import check_equal, rows
from support import serving, tiny
from support.failing_server import after, hang_up, pretended, to_bytes

from trl_opsd.errors import ServerError
from trl_opsd.http.client import WrongAnswerError
from trl_opsd.teacher import servers as teacher_servers
from trl_opsd.teacher.checkpoint_head import FinalNorm
from trl_opsd.teacher.servers import Expected


@pytest.fixture(scope="module")
def other():
    """Another teacher of the same shape."""
    return serving.spread_norms(tiny.qwen2(64, seed=1), by=0.7)


def test_row_is_read_once_up_to_last_counted_token(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        teacher, rollout = served(server), rows()
        server.asked.clear()
        check_equal(teacher, checkpoint[1], rollout)
        lists = zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)
        whole = [[*prompt, *completion][:-1] for prompt, completion in lists]
        assert sorted(server.asked) == sorted(whole[row] for row in (0, 3, 4, 5)), (
            "0 and 1 are one row, 2 counts nowhere"
        )
        assert teacher.context == 193
        assert torch.equal(teacher.head.weight, checkpoint[1].lm_head.weight)


def test_rows_are_read_at_the_same_time(served, checkpoint):
    with pretended(checkpoint[1], after(0.05)) as server:
        check_equal(served(server), checkpoint[1], rows(20))
        assert len(server.asked) == 2 + 18
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
        assert len(server.asked) == 2 + 4 + 2 + 1, "6 and 7 were not expected; 0, which 1 repeats, was taken"
        assert not teacher._asked._expected

        monkeypatch.setattr("trl_opsd.teacher.asked._EXPECTED_BYTES", 2 * 12 * 64 * 4)
        teacher.expect(rollout)
        assert len(teacher._asked._expected) < 4, "what nobody asks for is dropped"
        check_equal(teacher, checkpoint[1], rollout)
        teacher.expect(rollout)
        teacher.forget_expected()
        assert not teacher._asked._expected


def test_an_error_of_a_prefetched_row_is_raised_by_targets(served, checkpoint):
    with pretended(checkpoint[1], hang_up, faulty_from=2) as server:
        teacher = served(server)
        teacher.expect(rows())
        with pytest.raises(ServerError, match=r"The teacher's server at .*/pooling failed"):
            teacher.targets(rows())


FAULTS = {
    "dies": (hang_up, "see its log"),
    "garbage": (lambda _, states: b"\x00\x01garbage", "returned 9 bytes for"),
    "too few": (lambda _, states: states[1:], "It must serve|expected one per token"),
    "last only": (lambda _, states: states[-1:], "Was only the last token pooled"),
    "strange extra": (lambda _, states: torch.cat([states.flip(0), states]), "expected one per token"),
    "nan": (lambda _, states: states.index_fill(0, torch.tensor([1]), float("nan")), "NaN or infinite states at 1 of"),
    "normalised": (lambda _, states: states / states.norm(dim=-1, keepdim=True), "normalised to length 1"),
    "scaled": (lambda _, states: states * 1.05, "cannot come from the final norm of"),
    "another model": (None, "cannot come from the final norm of"),
    "redirect": (lambda *_: (302, b"", {"Location": "http://example.com"}), "returned 302"),
    "gone": (lambda *_: (404, b"{}", {}), "it generates, or is not a vLLM server"),
    "oversize": (lambda *_: b"0" * 10_000_000, "returned more than 1 MiB"),
    "compressed": (lambda *_: (200, b"x", {"Content-Encoding": "gzip"}), "returned 1 bytes for"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_server_ends_the_batch_with_its_reason(served, checkpoint, other, name, monkeypatch):
    monkeypatch.setattr(teacher_servers, "PAUSE", 0.01)
    fault, said = FAULTS[name]
    fault = fault or (lambda server, states: serving_states(other, server.asked[-1], states))
    with pretended(checkpoint[1], fault, faulty_from=2) as bad:
        teacher = served(bad)
        with pytest.raises(ServerError, match=f"(?s)The teacher's server at {bad.url}.*({said})"):
            teacher.targets(rows())


def test_a_wrong_answer_is_not_asked_for_again(served, checkpoint):
    with pretended(checkpoint[1], FAULTS["garbage"][0], faulty_from=2) as bad:
        teacher = served(bad)
        with pytest.raises(WrongAnswerError):
            teacher.targets(rows().select([5]))
        assert len(bad.asked) == 2 + 1


def states_of_a_norm(tokens: int, width: int, dtype: torch.dtype) -> tuple[Expected, torch.Tensor]:
    """What states are expected to be, and such states; the norm ignores one channel and has a bias."""
    generator = torch.Generator().manual_seed(0)
    units = torch.randn(tokens, width, generator=generator)
    scale, bias = torch.rand(width, generator=generator) + 0.5, torch.randn(width, generator=generator)
    scale[width // 2] = 0
    read = scale != 0
    states = units / units[:, read].square().mean(-1, keepdim=True).sqrt() * scale + bias
    return Expected("teacher", width, FinalNorm(scale, bias)), states.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_wrong_number_or_token_is_found_at_any_place(dtype):
    tokens, width = 37, 1024  # more than are looked at together
    expected, states = states_of_a_norm(tokens, width, dtype)
    without_norm = Expected("teacher", width, None)

    def checked(expected, states):
        return expected.states("The server", bytearray(to_bytes(states, str(dtype)[6:])), tokens, dtype)

    assert torch.equal(checked(expected, states), states)
    assert torch.equal(checked(without_norm, 1e3 * states), 1e3 * states)
    for token in (0, 1, 16, 31, 32, 36):
        with pytest.raises(WrongAnswerError, match=r"root mean square is .* to 1\.0[45]"):
            checked(expected, torch.where(torch.arange(tokens)[:, None] == token, 1.05, 1.0).to(dtype) * states)
        for channel, value in ((0, torch.nan), (width // 2, torch.inf), (width - 1, -torch.inf)):
            wrong = states.clone()
            wrong[token, channel] = value
            for one in (expected, without_norm):
                with pytest.raises(WrongAnswerError, match=f"at 1 of {tokens} tokens, the first at {token}:"):
                    checked(one, wrong)


def test_checking_states_takes_nanoseconds_per_number():
    expected, states = states_of_a_norm(512, 4096, torch.bfloat16)
    content = bytearray(to_bytes(states, "bfloat16"))

    def seconds(run):
        began = time.thread_time()
        run()
        return time.thread_time() - began

    checking = min(seconds(lambda: expected.states("", content, 512, torch.bfloat16)) for _ in range(5))
    reading = min(seconds(lambda: states.abs().amax()) for _ in range(5))
    assert checking < max(3e-9 * states.numel(), 6 * reading), "it was 16 ns, 50 times as long as to read them"


def serving_states(model: Any, ids: list[int], like: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    return states if states.shape == like.shape else states.expand_as(like)


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


AT_START = {
    "generates": ({"fault": lambda *_: (404, b'{"detail":"Not Found"}', {})}, ServerError, "it generates, or is not"),
    "other task": (
        {"fault": lambda *_: (400, b'{"error":{"message":"Try switching the model\'s pooling_task"}}', {})},
        ServerError,
        "started for another task: start it with `vllm serve TEACHER --runner pooling",
    ),
    "token": ({"fault": lambda *_: (401, b"{}", {})}, ServerError, "`TRL_OPSD_TEACHER_TOKEN`"),
    "no vLLM": ({"models": {"hello": "world"}}, ServerError, r"/v1/models returned data\.0\.id=.*: Field required"),
    "both ways": ({"fault": lambda server, states: states.flip(0)}, ServerError, "depend on later tokens"),
    "zeroed": ({"fault": lambda server, states: states[1:2].expand_as(states)}, ServerError, "were not loaded"),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_START)
def test_a_wrong_server_is_refused_at_the_start(served, checkpoint, name):
    given, kind, said = AT_START[name]
    with pretended(checkpoint[1], **given) as server, pytest.raises(kind, match=said):
        served(server)


def test_absent_server_is_refused_with_a_command_starting_one(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        pass
    with pytest.raises(ValueError, match=r"No teacher server at http://127.0.0.1:\d+ after `teacher_server_timeout=0`"):
        served(server)


def test_states_are_sent_in_the_servers_dtype(served, checkpoint, caplog):
    half = tiny.qwen2(64, seed=1)
    half.load_state_dict(checkpoint[1].state_dict())
    half.bfloat16()
    with pretended(half) as server:
        teacher = served(server)
        assert "computes in torch.bfloat16 and the checkpoint is in torch.float32" in caplog.text
        check_equal(teacher, half, rows())
        assert {row.hidden.dtype for row in teacher.targets(rows()).rows} == {torch.bfloat16}
        assert teacher.head.weight.dtype == torch.bfloat16
        assert "128 bytes per token in bfloat16" in str(teacher)


def test_a_different_model_name_warns_and_the_token_is_sent(served, checkpoint, caplog, monkeypatch):
    monkeypatch.setenv("TRL_OPSD_TEACHER_TOKEN", "secret")
    with pretended(checkpoint[1], models={"data": [{"id": "a teacher", "root": "/x/Other-7B"}]}) as server:
        teacher = served(server)
        assert "reports that it serves '/x/Other-7B'" in caplog.text
        assert server.tokens == {"Bearer secret"}
        assert teacher.context == 256, "of the checkpoint"
        assert "secret" not in caplog.text + str(teacher)
