"""Several addresses of one thing: requests go to them in turn, and one that fails is sent to the next.

An address that fails again and again is dropped; one that answers wrongly, or leaves others to answer in time, at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from trl_opsd.errors import ServerError
from trl_opsd.http.client import BusyError, HTTPClient, warn_in_main

C = TypeVar("C", bound=HTTPClient)
T = TypeVar("T")

FAILURES = 3
"""Consecutive failures after which an address is dropped; a connection may break once."""
PAUSE = 1.0
"""Seconds before an address whose request failed gets another one, unless it is busy and says how long."""
_AT_ONCE = 32
"""Maximum requests in flight per address, which batches them."""


class WrongAnswerError(ServerError):
    """A server returned something other than the request's answer; other requests cannot trust it either."""


@dataclass(eq=False, slots=True)
class _Address(Generic[C]):
    client: C
    failures: int = 0
    failed_at: float = 0.0
    free_at: float = 0.0
    last_error: str = "no response"


class InTurn(Generic[C]):
    """Addresses that can all answer the same requests; a request has `deadline` seconds for all attempts.

    `origin` is the option that the deadline comes from. An address is dropped after `failures` in a row, and an attempt
    has that share of the deadline; the first that is not answered within `late` seconds is a warning.
    """

    def __init__(
        self, clients: Sequence[C], deadline: float, origin: str, failures: int = FAILURES, late: float = math.inf
    ) -> None:
        self._live = [_Address(client) for client in clients]
        self._deadline, self._origin, self._failures, self._late = deadline, origin, failures, late
        self._dropped: list[str] = []
        self._turn, self._name = 0, f"the {clients[0].kind.name}'s servers"
        self._room = asyncio.Semaphore(_AT_ONCE * len(clients))

    async def answer(self, ask: Callable[[C, float], Awaitable[T]], what: str) -> T:
        """What `ask` returns for the first address that answers; it gets a client, and the seconds of an attempt.

        Asking twice must change nothing. A `ServerError` if none answers in time, or all have been dropped; it says
        that they have not done `what`.
        """
        try:
            async with asyncio.timeout(self._deadline), self._room:
                turn = self._turn = self._turn + 1
                while True:
                    address, began, turn = await self._next(turn), monotonic(), turn + 1
                    alarm = asyncio.get_running_loop().call_later(self._late, self._warn_of_delay, address.client)
                    try:
                        found = await ask(address.client, self._deadline / self._failures)
                    except ServerError as error:
                        self._count(address, error, began)
                        continue
                    finally:
                        alarm.cancel()
                    if address in self._live:  # the other answers of a dropped one may be wrong too
                        address.failures = 0
                        return found
        except TimeoutError:
            errors = [*self._dropped, *(f"  {one.client.url}: {one.last_error}" for one in self._live)]
            message = (
                f"None of {self._name} {what} within {self._deadline:g} seconds (from `{self._origin}`): see their "
                f"logs, and raise `{self._origin}` if they just need more time."
            )
            raise ServerError("\n".join([message, *errors])) from None

    async def _next(self, turn: int) -> _Address[C]:
        """The next address in turn that may be asked now; waits if there is none."""
        while self._live:
            now = monotonic()
            if ready := [one for one in self._live if one.free_at <= now]:
                return ready[turn % len(ready)]
            await asyncio.sleep(min(one.free_at for one in self._live) - now)
        raise ServerError("\n".join([f"All of {self._name} have failed:", *self._dropped]))

    def _warn_of_delay(self, client: C) -> None:
        if self._late < math.inf:
            warn_in_main(
                f"{client.kind.subject} at {client.url} has not answered a request within {self._late:g} seconds; "
                f"waiting up to {self._deadline / self._failures:g} (from `{self._origin}`): see its log."
            )
        self._late = math.inf

    def _count(self, address: _Address[C], error: ServerError, began: float) -> None:
        """Lets an address rest, or drops it. Busy is no failure."""
        address.last_error, address.free_at = str(error), monotonic() + PAUSE
        if isinstance(error, BusyError):
            address.free_at = monotonic() + max(error.seconds, PAUSE)
        elif began >= address.failed_at:  # requests in flight at a failure fail with it, and count once
            address.failures, address.failed_at = address.failures + 1, monotonic()
        # A server that hangs would get its share of the requests, each for as long as an attempt may take.
        hangs = len(self._live) > 1 and isinstance(error.__cause__, TimeoutError)
        is_unfit = hangs or isinstance(error, WrongAnswerError) or address.failures >= self._failures
        if address in self._live and is_unfit:
            self._live.remove(address)
            self._dropped.append(f"  {address.client.url}: {error}")
            if self._live:
                who, left = address.client.kind.subject, ", ".join(one.client.url for one in self._live)
                warn_in_main(f"{who} at {address.client.url} is no longer used; its requests go to {left}. {error}")
