"""A teacher whose server returns states: what is asked, when, and what a wrong server is told at the start."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from served_lab import check_equal, rows
from support import tiny
from support.failing_server import after, hang_up, pretended

from trl_opsd.errors import ServerError
from trl_opsd.http.client import WrongAnswerError


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
        assert len(bad.asked) == 2 + 1 + 1, "and one of the first rows again"


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
    "generates": ({"fault": lambda *_: (404, b'{"detail":"Not Found"}', {})}, ServerError, "--runner pooling"),
    "other task": (
        {"fault": lambda *_: (400, b'{"error":{"message":"Try switching the model\'s pooling_task"}}', {})},
        ServerError,
        "it is started with `vllm serve TEACHER --runner pooling",
    ),
    "token": ({"fault": lambda *_: (401, b"{}", {})}, ServerError, "`TRL_OPSD_TEACHER_TOKEN`"),
    "no vLLM": ({"models": {"hello": "world"}}, ServerError, r"/v1/models returned data\.0\.id=.*: Field required"),
    "normalised": (
        {"fault": lambda _, states: states / states.norm(dim=-1, keepdim=True).clamp(min=1e-9)},
        ServerError,
        "normalised to length 1",
    ),
    "last only": ({"fault": lambda _, states: states[-1:]}, ServerError, "Was only the last token pooled"),
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
