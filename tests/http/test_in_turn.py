"""Addresses are asked in turn; the next takes the place of one that fails, and a wrong answer drops an address."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trl_opsd.errors import ServerError
from trl_opsd.http import in_turn
from trl_opsd.http.client import BusyError
from trl_opsd.http.in_turn import InTurn, WrongAnswerError

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def breathless(monkeypatch):
    """Addresses are asked again at once."""
    monkeypatch.setattr(in_turn, "PAUSE", 0.0)


def addresses(urls: str, deadline: float = 5.0, **given: Any) -> InTurn[Any]:
    kind = SimpleNamespace(name="model", subject="The server")
    clients: Any = [SimpleNamespace(url=url, kind=kind) for url in urls]
    return InTurn(clients, deadline, "an_option", **given)


def answered(servers: InTurn[Any], faults: dict[str, Any], requests: int = 1) -> tuple[list[Any], list[str]]:
    """What came of requests, one after the other, and the addresses that were asked; an error is raised by its url."""
    asked: list[str] = []

    async def ask(client: Any, seconds: float) -> str:
        asked.append(client.url)
        if client.url in faults:
            raise faults[client.url]
        return f"of {client.url}"

    async def each() -> list[Any]:
        return [await servers.answer(ask, "answered") for _ in range(requests)]

    return asyncio.run(each()), asked


def test_requests_go_to_the_addresses_in_turn():
    found, asked = answered(addresses("abc"), {}, 6)
    assert found == [f"of {url}" for url in asked]
    assert sorted(asked[:3]) == sorted(asked[3:]) == ["a", "b", "c"]


def test_failed_requests_go_on_until_their_address_is_dropped(caplog):
    found, asked = answered(addresses("ab"), {"a": ServerError("it broke")}, 12)
    assert found == ["of b"] * 12
    assert asked.count("a") == 3
    assert caplog.messages == ["The server at a is no longer used; its requests go to b. it broke"]


def test_a_wrong_answer_drops_an_address_at_once():
    found, asked = answered(addresses("ab"), {"a": WrongAnswerError("nonsense")}, 6)
    assert found == ["of b"] * 6
    assert asked.count("a") == 1


def late() -> ServerError:
    error = ServerError("no answer in time")
    error.__cause__ = TimeoutError()
    return error


def test_a_hanging_address_is_dropped_if_there_is_another():
    found, asked = answered(addresses("ab"), {"a": late()}, 6)
    assert found == ["of b"] * 6
    assert asked.count("a") == 1
    with pytest.raises(ServerError, match="All of the model's servers have failed"):
        answered(alone := addresses("a"), {"a": late()})
    assert alone._dropped == ["  a: no answer in time"]


@pytest.mark.parametrize("urls", ["a", "ab"])
def test_first_late_answer_is_warned_of_while_awaited(urls, caplog):
    said: list[list[str]] = []

    async def ask(client: Any, seconds: float) -> str:
        await asyncio.sleep(0.2)
        said.append(list(caplog.messages))
        return client.url

    async def each(servers: InTurn[Any]) -> list[str]:
        return [await servers.answer(ask, "answered") for _ in range(3)]

    warning = "The server at {} has not answered a request within 0.1 seconds; waiting up to 3 (from `an_option`): "
    found = asyncio.run(each(addresses(urls, deadline=9.0, late=0.1)))
    assert [len(one) for one in said] == [1, 1, 1]
    assert caplog.messages[0].startswith(warning.format(found[0]))
    caplog.clear()
    asyncio.run(each(addresses(urls, late=0.5)))
    asyncio.run(each(addresses(urls)))
    assert caplog.messages == []


def test_a_busy_address_is_kept():
    servers, faults = addresses("ab"), {"a": BusyError("full", 0.0)}
    assert answered(servers, faults, 12)[0] == ["of b"] * 12
    faults.clear()
    assert set(answered(servers, faults, 4)[0]) == {"of a", "of b"}


def test_an_error_names_each_address_and_its_reason():
    with pytest.raises(ServerError, match=r"All of the model's servers have failed:\n  b: it broke\n  a: it broke"):
        answered(addresses("ab"), dict.fromkeys("ab", ServerError("it broke")))
    busy = addresses("a", deadline=0.2)
    with pytest.raises(
        ServerError, match=r"(?s)None of the model's servers answered within 0.2 .*`an_option`.*a: full"
    ):
        answered(busy, {"a": BusyError("full", 9.0)})


def test_answers_of_a_dropped_address_are_not_used():
    servers = addresses("ab")
    wrong = asyncio.Event()

    async def ask(client: Any, seconds: float) -> str:
        if client.url == "b":
            return "good"
        if wrong.is_set():
            raise WrongAnswerError("nonsense")
        wrong.set()
        await asyncio.sleep(0.05)
        return "perhaps wrong too"

    async def both() -> list[str]:
        return await asyncio.gather(*[servers.answer(ask, "answered") for _ in range(4)])

    assert asyncio.run(both()) == ["good"] * 4
