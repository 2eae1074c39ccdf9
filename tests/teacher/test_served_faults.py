"""Whatever a server of a teacher does wrong is noticed, said once, and never trained on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import serving
import tiny
import torch
from pretended import after, hang_up, pretended
from transformers import AutoModelForCausalLM

from trl_opsd.run.errors import ServerError
from trl_opsd.teacher import FrozenTeacher, Resident, replica, replicas
from trl_opsd.teacher.served import ServedTeacher
from trl_opsd.types import Rollout

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The path of a teacher, and the teacher itself."""
    folder = tmp_path_factory.mktemp("teacher") / "untied"
    path = serving.save_teacher(folder, seed=1)
    return path, AutoModelForCausalLM.from_pretrained(path)


@pytest.fixture(scope="module")
def other():
    """Another teacher of the same shape."""
    return serving.spread_norms(tiny.qwen2(64, seed=1), by=0.7)


@pytest.fixture
def served(checkpoint) -> Callable[..., ServedTeacher]:
    def served(*servers: Any, **given: Any) -> ServedTeacher:
        options = {"deadline": 20.0, "path": checkpoint[0], **given}
        return ServedTeacher(urls=[one.url for one in servers], device=CPU, **options)

    return served


def rows(number: int = 6, seed: int = 0) -> Rollout:
    """Ragged rows: one twice, one of which nothing counts, one with a token of a tool in it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny.VOCABULARY, (number, 12), generator=generator)
    prompt, completion = ids[:, :5], ids[:, 5:]
    prompt_mask, mask = torch.ones_like(prompt), torch.ones_like(completion)
    for row in range(number):
        prompt_mask[row, : row % 4] = 0
        mask[row, 2 + row % 5 :] = 0
    prompt[1], prompt_mask[1], completion[1], mask[1] = prompt[0], prompt_mask[0], completion[0], mask[0]
    weights = mask.float()
    weights[2] = 0
    weights[3, 1] = 0
    return Rollout(
        prompt_ids=prompt, prompt_mask=prompt_mask, completion_ids=completion, completion_mask=mask, weights=weights
    )


def check_equal(teacher: ServedTeacher, model: Any, rollout: Rollout) -> None:
    """The targets of a served teacher are those of the model in this process."""
    here, there = FrozenTeacher(Resident(model, CPU)).targets(rollout), teacher.targets(rollout)
    for one, two in zip(here.rows, there.rows, strict=True):
        assert torch.equal(one.places, two.places)
        assert one.hidden.shape == two.hidden.shape
        torch.testing.assert_close(one.hidden, two.hidden, rtol=1e-5, atol=1e-5)


def test_each_row_is_read_once_up_to_the_last_token_that_counts(served, checkpoint):
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


def test_several_servers_share_the_rows(served, checkpoint):
    with pretended(checkpoint[1], after(0.05)) as one, pretended(checkpoint[1], after(0.05)) as other:
        teacher = served(one, other)
        check_equal(teacher, checkpoint[1], rows(20))
        assert min(len(one.asked), len(other.asked)) >= 2 + 6
        assert one.most_running > 2, "rows are read at the same time"


def test_rows_that_are_expected_are_read_early_and_found_in_any_grouping(served, checkpoint, monkeypatch):
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
        assert not teacher._expected

        monkeypatch.setattr("trl_opsd.teacher.served._EXPECTED_BYTES", 2 * 12 * 64 * 4)
        teacher.expect(rollout)
        assert len(teacher._expected) < 4, "what nobody asks for is dropped"
        check_equal(teacher, checkpoint[1], rollout)


def test_an_error_of_a_row_that_was_expected_is_raised_by_targets(served, checkpoint):
    with pretended(checkpoint[1], hang_up, faulty_from=2) as server:
        teacher = served(server)
        teacher.expect(rows())
        with pytest.raises(ServerError, match=r"No server of the teacher is left.*\n.*/pooling, failed"):
            teacher.targets(rows())


FAULTS = {
    "dies": (hang_up, "failed, see its log"),
    "garbage": (lambda _, states: b"\x00\x01garbage", "answered 9 bytes for"),
    "too few": (lambda _, states: states[1:], "It has to serve|return one for each token"),
    "last only": (lambda _, states: states[-1:], "Is it only the last one"),
    "strange extra": (lambda _, states: torch.cat([states.flip(0), states]), "return one for each token"),
    "nan": (lambda _, states: states.index_fill(0, torch.tensor([1]), float("nan")), "NaN or infinite states, at 1 of"),
    "normalised": (lambda _, states: states / states.norm(dim=-1, keepdim=True), "normalised to length 1"),
    "scaled": (lambda _, states: states * 1.05, "final norm of .* cannot have made"),
    "another model": (None, "final norm of .* cannot have made"),
    "redirect": (lambda *_: (302, b"", {"Location": "http://example.com"}), "redirects are not followed"),
    "gone": (lambda *_: (404, b"{}", {}), "as a server that generates"),
    "oversize": (lambda *_: b"0" * 10_000_000, "answered more than 1 MiB"),
    "compressed": (lambda *_: (200, b"x", {"Content-Encoding": "gzip"}), "compressed its answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_server_is_left_out_in_the_middle_of_a_batch(served, checkpoint, other, name, caplog):
    fault, said = FAULTS[name]
    fault = fault or (lambda server, states: serving_states(other, server.asked[-1], states))
    with pretended(checkpoint[1]) as good, pretended(checkpoint[1], fault, faulty_from=4) as bad:
        teacher = served(bad, good)
        check_equal(teacher, checkpoint[1], rows(24))
        left_out = [record.message for record in caplog.records if "is asked no more" in record.message]
        assert len(left_out) == 1
        assert f"{bad.url} is asked no more; {good.url} read its rows" in left_out[0]
        asked = len(bad.asked)
        check_equal(teacher, checkpoint[1], rows(24, seed=1))
        assert len(bad.asked) == asked

    with pretended(checkpoint[1], fault, faulty_from=2) as bad:
        teacher = served(bad)
        with pytest.raises(ServerError, match=f"(?s)No server of the teacher is left.*{bad.url}.*({said})"):
            teacher.targets(rows())


def serving_states(model: Any, ids: list[int], like: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    return states if states.shape == like.shape else states.expand_as(like)


def test_a_connection_may_break_once(served, checkpoint):
    broken = iter([True])

    def once(server, states):
        if next(broken, False):
            raise ConnectionError
        return states

    with pretended(checkpoint[1], once, faulty_from=2) as server:
        check_equal(served(server), checkpoint[1], rows())


def test_states_of_a_preempted_row_are_those_of_its_last_read(served, checkpoint):
    def preempted(server, states):
        return torch.cat([states[:2], states[:1], states])

    with pretended(checkpoint[1], preempted, faulty_from=2) as server:
        check_equal(served(server), checkpoint[1], rows())


def test_a_slow_server_holds_nobody_up(served, checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(replicas, "_SECONDS", 0.3)
    with pretended(checkpoint[1]) as good, pretended(checkpoint[1], after(30), faulty_from=2) as slow:
        teacher = served(slow, good)
        began = time.monotonic()
        check_equal(teacher, checkpoint[1], rows(24))
        assert time.monotonic() - began < 10
        assert "another was faster" in caplog.text


def test_a_server_that_does_not_answer_ends_the_run_at_its_deadline(served, checkpoint):
    with pretended(checkpoint[1], after(30), faulty_from=2) as server:
        teacher = served(server, deadline=1.0)
        with pytest.raises(ServerError, match=r"did not answer within 1 seconds, which follows from `ddp_timeout`"):
            teacher.targets(rows())


def test_an_id_that_the_teacher_lacks_is_not_sent(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        teacher, rollout = served(server), rows()
        rollout.completion_ids[5, 0] = tiny.VOCABULARY
        server.asked.clear()
        with pytest.raises(ValueError, match=r"token id 259, but the teacher's vocabulary has 259"):
            teacher.targets(rollout)
        assert not server.asked


def test_an_interrupt_ends_the_wait_and_leaves_no_thread_that_blocks_the_exit(served, checkpoint, interruptible):
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
    "generates": ({"fault": lambda *_: (404, b'{"detail":"Not Found"}', {})}, ServerError, "a server that generates"),
    "other task": (
        {"fault": lambda *_: (400, b'{"error":{"message":"Try switching the model\'s pooling_task"}}', {})},
        ServerError,
        "started for another task: start it with `vllm serve TEACHER --runner pooling",
    ),
    "token": ({"fault": lambda *_: (401, b"{}", {})}, ServerError, "`TRL_OPSD_TEACHER_TOKEN`"),
    "no vLLM": ({"models": {"hello": "world"}}, ServerError, "did not list a model .*: is it one, and the right port"),
    "both ways": ({"fault": lambda server, states: states.flip(0)}, ServerError, "depend on later tokens"),
    "zeroed": ({"fault": lambda server, states: states[1:2].expand_as(states)}, ServerError, "were not loaded"),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_START)
def test_what_is_wrong_with_a_server_is_said_at_the_start(served, checkpoint, name):
    given, kind, said = AT_START[name]
    with pretended(checkpoint[1], **given) as server, pytest.raises(kind, match=said):
        served(server)


def test_nothing_that_listens_is_said_with_the_command_that_starts_a_server(served, checkpoint):
    with pretended(checkpoint[1]) as server:
        pass
    with pytest.raises(ValueError, match=r"No teacher server at http://127.0.0.1:\d+ after `teacher_server_timeout=0`"):
        served(server)


def test_servers_of_two_teachers_are_no_replicas(served, checkpoint):
    perturbed = tiny.qwen2(64, seed=1)
    perturbed.load_state_dict(checkpoint[1].state_dict())
    with torch.no_grad():
        perturbed.model.embed_tokens.weight[::2] *= -1  # with the same final norm
    with (
        pretended(checkpoint[1]) as one,
        pretended(perturbed) as two,
        pytest.raises(ServerError, match=r"return different states for the same tokens, .* times their length apart"),
    ):
        served(one, two)


def test_the_dtype_of_a_server_is_found_and_its_states_are_sent_without_loss(served, checkpoint, caplog):
    half = tiny.qwen2(64, seed=1)
    half.load_state_dict(checkpoint[1].state_dict())
    half.bfloat16()
    with pretended(half) as server:
        teacher = served(server)
        assert "computes in torch.bfloat16 and the checkpoint is in torch.float32" in caplog.text
        check_equal(teacher, half, rows())
        assert {row.hidden.dtype for row in teacher.targets(rows()).rows} == {torch.bfloat16}
        assert teacher.head.weight.dtype == torch.bfloat16
        assert "which send 128 bytes per token, in bfloat16" in str(teacher)


def test_another_name_is_said_and_a_token_is_sent(served, checkpoint, caplog, monkeypatch):
    monkeypatch.setenv("TRL_OPSD_TEACHER_TOKEN", "secret")
    with pretended(checkpoint[1], models={"data": [{"id": "a teacher", "root": "/x/Other-7B"}]}) as server:
        teacher = served(server)
        assert "says that it serves '/x/Other-7B'" in caplog.text
        assert server.tokens == {"Bearer secret"}
        assert teacher.context == 256, "of the checkpoint"
        assert "secret" not in caplog.text + str(teacher)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_with_other_runs_is_asked_again(served, checkpoint, monkeypatch, status):
    monkeypatch.setattr(replica, "BREATH", 0.01)
    refusals = iter(range(40))

    def busy(_, states):
        return states if next(refusals, None) is None else (status, b"busy", {"Retry-After": "1"})

    with pretended(checkpoint[1]) as server:
        teacher = served(server)
        server.fault = busy
        check_equal(teacher, checkpoint[1], rows())
    assert next(refusals, None) is None, "more refusals than failures of a server that is left out"


def test_a_server_that_stays_busy_is_given_up_in_time(served, checkpoint, monkeypatch):
    monkeypatch.setattr(replica, "BREATH", 0.01)
    with pretended(checkpoint[1]) as server:
        teacher = served(server, deadline=1.0)
        server.fault = lambda *_: (503, b"full", {})
        with pytest.raises(ServerError, match=r"answered 503.*full"):
            teacher.targets(rows())
