"""However long the server of a teacher takes, a batch has one deadline; what fails once is asked again."""

from __future__ import annotations

import time
from contextlib import contextmanager
from weakref import WeakSet

import pytest
from served_lab import check_equal, rows
from support.failing_server import after, pretended

from trl_opsd import OPSDConfig
from trl_opsd._compat.http import BusyError, Response
from trl_opsd.errors import ServerError
from trl_opsd.teacher import servers as teacher_servers
from trl_opsd.teacher.checks import deadline
from trl_opsd.types.targets import Keeper


@pytest.fixture
def breathless(monkeypatch):
    """Servers are asked again at once."""
    monkeypatch.setattr(teacher_servers, "PAUSE", 0.01)


@contextmanager
def takes(least: float, most: float):
    began = time.monotonic()
    yield
    assert least <= time.monotonic() - began < most


def refuse_then(refusals: int, answer, status: int = 503, **headers: str):
    """Says that it is busy so often, then answers so."""
    left = iter(range(refusals))
    return lambda server, states: answer(server, states) if next(left, None) is None else (status, b"full", {**headers})


def well(_, states):
    return states


# ---- One deadline ----


@pytest.mark.parametrize("fault", ["hangs", "busy", "busy, then hangs"])
def test_a_batch_has_one_deadline(served, checkpoint, breathless, fault):
    faults = {
        "hangs": (after(30), "within 1 seconds (from `ddp_timeout`)"),
        "busy": (lambda *_: (503, b"full", {}), "returned 503: full"),
        "busy, then hangs": (refuse_then(60, after(30)), "returned 503"),
    }
    with pretended(checkpoint[1]) as server:
        teacher = served(server, deadline=1.0)
        server.fault = faults[fault][0]
        said = f"The teacher's server at {server.url} has not scored a row"
        with takes(0.9, 1.6), pytest.raises(ServerError, match=said) as error:
            teacher.targets(rows())
        assert fault == "busy, then hangs" or faults[fault][1] in str(error.value)


@pytest.mark.quick
def test_teachers_behind_servers_share_the_deadline(tmp_path):
    for urls, share in (("http://a:1", 1), ({"math": "http://a:1", "code": "http://b:1"}, 2)):
        args = OPSDConfig(str(tmp_path), teacher_server_url=urls, ddp_timeout=1000, use_cpu=True)
        assert deadline(args) == 900 / share


def test_server_that_hangs_at_start_fails_within_its_timeout(served, checkpoint, monkeypatch):
    monkeypatch.setattr(teacher_servers, "_PROBE_SECONDS", 0.5)
    with pretended(checkpoint[1], after(30)) as server:
        for timeout, seconds in ((0.0, 0.5), (1.0, 1.0)):
            said = rf"scored a row of 9 tokens within {seconds:g} seconds \(from `teacher_server_timeout`\)"
            with takes(seconds - 0.1, seconds + 0.5), pytest.raises(ServerError, match=said):
                served(server, deadline=1000.0, timeout=timeout)
        server.fault = lambda *_: (503, b"full", {"Retry-After": "1"})
        with takes(0, 1), pytest.raises(ServerError, match="returned 503"):
            served(server, deadline=1000.0)


def test_server_that_is_busy_at_start_is_waited_for(served, checkpoint, breathless):
    with pretended(checkpoint[1], refuse_then(7, well)) as server:
        check_equal(served(server), checkpoint[1], rows())


# ---- What is asked again ----


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(served, checkpoint, breathless, status):
    with pretended(checkpoint[1]) as server:
        teacher = served(server)
        server.fault = refuse_then(40, well, status)
        check_equal(teacher, checkpoint[1], rows())
        assert len(server.asked) == 2 + 40 + 4 + 1, "more refusals than attempts"


@pytest.mark.parametrize(("said", "expected"), [("1", 1.0), ("0", 0), ("soon", 0), ("600", 60.0), ("", 0)])
@pytest.mark.quick
def test_retry_after_is_parsed_and_capped(said, expected):
    with pytest.raises(BusyError) as busy:
        Response("It", 503, bytearray(b"full"), "TOKEN", said).check_status()
    assert busy.value.seconds == expected


def test_a_busy_server_is_not_asked_before_retry_after(served, checkpoint, breathless):
    with pretended(checkpoint[1]) as server:
        teacher = served(server)
        server.fault = refuse_then(4, well, **{"Retry-After": "2"})
        with takes(2, 4):
            check_equal(teacher, checkpoint[1], rows())
        assert len(server.asked) == 2 + 4 + 4 + 1, "each of four rows was refused once"


def test_an_unanswered_row_is_requested_again(served, checkpoint):
    hangs = iter([True])

    def once(server, states):
        return after(30)(server, states) if next(hangs, False) else states

    with pretended(checkpoint[1], once, faulty_from=2) as server:
        teacher = served(server, deadline=6.0)
        with takes(1.9, 5):
            check_equal(teacher, checkpoint[1], rows())
        assert len(server.asked) == 2 + 4 + 1 + 1


def test_states_that_come_late_are_right_and_warned_of_once(served, checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(teacher_servers, "_PROBE_SECONDS", 0.0)
    with pretended(checkpoint[1], after(1.5), faulty_from=2) as server:
        teacher = served(server, timeout=1.0)
        for seed in range(2):
            check_equal(teacher, checkpoint[1], rows(4, seed=seed))
        said = f"{server.url} has not answered a request within 1 seconds; waiting up to 6.66667 (from `ddp_timeout`)"
        assert [said in one for one in caplog.messages].count(True) == 1


def test_rows_of_dropped_connections_are_requested_again(served, checkpoint, breathless):
    refused = set()

    def once(server, states):
        with server.lock:
            is_new = (row := tuple(server.row.ids)) not in refused
            refused.add(row)
        if is_new:
            raise ConnectionError
        return states

    with pretended(checkpoint[1], once, faulty_from=2) as server:
        check_equal(served(server), checkpoint[1], rows(22))
        assert len(server.asked) == 2 + 2 * 21, "20 different rows, and one of the first, each asked for twice"


# ---- What is kept ----


def test_states_are_not_held_twice(served, checkpoint, monkeypatch):
    with pretended(checkpoint[1]) as server:
        teacher, rollout = served(server), rows(20)
        held, left = WeakSet(), []
        start, put = teacher._server.start, Keeper.put

        def started(*given):
            future = start(*given)
            future.result()
            held.add(future)
            return future

        def noted(*given):
            left.append(len(held))
            return put(*given)

        monkeypatch.setattr(teacher._server, "start", started)
        monkeypatch.setattr(Keeper, "put", noted)
        teacher.targets(rollout)
        assert left[0] == 18, (
            "20 rows: one is put, one counts nowhere, one is another's; and one of the first rows again"
        )
        assert left[-1] <= 3, f"answers that were held when each row was kept: {left}"
        assert left == sorted(left, reverse=True)
