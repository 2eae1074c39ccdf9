"""Servers that generate, as one engine: rows are dealt by speed, and those of one that fails go to the others.

An address that fails is used no more in this run: what it would need is all the weights since, and a proof of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from trl_opsd.errors import ServerError
from trl_opsd.http.client import CONCURRENT, Background, Response, Responses
from trl_opsd.rollout.generation_client import GenerationClient, fitting_prompts, nothing_for, shared_errors
from trl_opsd.rollout.sync_proof import Proof
from trl_opsd.types import Completion

T = TypeVar("T")

logger = get_logger(__name__)

_NEWEST = 0.2
"""Weight of a row in the mean speed of a server."""
WATCHED = 30.0
"""Seconds that a row takes before the client starts to poll whether its server is up."""


@dataclass(eq=False, slots=True)
class _Speed:
    running: int = 0
    """Rows that were requested and have not ended."""
    rate: float = 0.0
    """Rows per second, of as many at a time as it had; 0 until a row has ended."""


class Servers:
    """One server or several, of one kind, that hold the same student."""

    def __init__(self, clients: Sequence[GenerationClient]) -> None:
        self.live = list(clients)
        """Those that have the latest weights; the same in all processes whenever weights are sent."""
        self._lost: dict[GenerationClient, str] = {}
        self._speeds = {client: _Speed() for client in clients}
        self.is_proved = False
        """Whether each has agreed with the student once, so that a later failure is not the student's."""
        self._background = Background()

    def __str__(self) -> str:
        kind, urls = self.live[0].kind.name, " and ".join(one.url for one in self.live)
        one = f"{'an' if kind == 'SGLang' else 'a'} {kind} server"
        return f"{one} at {urls}" if len(self.live) == 1 else f"{kind} servers at {urls}"

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.live[0].name if len(self.live) == 1 else f"the {self.live[0].kind.name} servers"

    @property
    def block_size(self) -> int:
        """Tokens in the largest block of a prefix cache."""
        return max(one.block_size for one in self.live)

    # ---- Completions --------------------------------------------------------------------------------------------

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt; processes may have different numbers of them. Collective."""
        with shared_errors():
            found = dict(self.write_each(prompt_ids, options))
        return [found[number] for number in range(len(prompt_ids))]

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> Responses[Completion]:
        """Generates as `write`, without other processes, and returns rows as they end. All requests have begun then."""
        if len(self.live) == 1:
            return self.live[0].write_each(prompt_ids, options)
        longest = min(one.facts.longest_prompt for one in self.live)
        fitting = fitting_prompts(prompt_ids, self.live[0].vocabulary, longest, self.name)

        turn = asyncio.Semaphore(CONCURRENT)

        async def ask(ids: list[int], own: dict[str, Any], fits: bool) -> Completion:
            if not fits:
                return nothing_for(ids)
            async with turn:
                return await asked(ids, own)

        async def asked(ids: list[int], own: dict[str, Any]) -> Completion:
            while True:
                client = self._next()
                body, version = client.body(ids, own), client.version
                speed, began = self._speeds[client], monotonic()
                speed.running += 1
                together = speed.running
                try:
                    response = await _posted(client, body)
                except ServerError as error:
                    if isinstance(error.__cause__, TimeoutError):  # other processes wait no longer than this one
                        raise
                    self._drop(client, error)
                    continue
                finally:
                    speed.running -= 1
                if response.status >= 500:
                    said = f"{response.request} returned {response.status}: {response.text[:300]}"
                    self._drop(client, ServerError(said))
                    continue
                rate = together / max(monotonic() - began, 1e-6)
                speed.rate = rate if not speed.rate else (1 - _NEWEST) * speed.rate + _NEWEST * rate
                return client.read(ids, body, version, response)

        rows = zip(prompt_ids, options, fitting, strict=True)
        return Responses([self._background.start(ask(*row)) for row in rows], lambda number, found: found)

    def _next(self) -> GenerationClient:
        """The server that would end another row first."""
        known = [rate for one in self.live if (rate := self._speeds[one].rate)]
        usual = sum(known) / len(known) if known else 1.0
        return min(self.live, key=lambda one: (self._speeds[one].running + 1) / (self._speeds[one].rate or usual))

    def _drop(self, client: GenerationClient, why: Exception) -> None:
        """Uses a server no more; raises the reason if it is the last. The main process warns, once."""
        if client not in self.live:
            return
        if len(self.live) == 1:
            raise why
        self.live = [one for one in self.live if one is not client]
        self._lost[client] = str(why)
        left = " and ".join(one.url for one in self.live)
        logger.warning(f"{client.name} is used no more in this run, its rows go to {left}: {why}")

    # ---- Weights ------------------------------------------------------------------------------------------------

    def each(self, call: Callable[[GenerationClient], T]) -> list[T]:
        """Calls it for each server. One for which it fails is dropped if it is gone by then, or had agreed with the
        student before; else the error is raised. Collective.
        """
        self.agree()
        found: list[T] = []
        for client in self.live:
            try:
                found.append(call(client))
            except Exception as error:  # in all processes
                if len(self.live) == 1 or not self._is_lost(client, error):
                    raise
                self._drop(client, error)
        return found

    def agree(self) -> None:
        """Drops what any process has dropped. Collective."""
        clients = {one.url: one for one in self._speeds}
        for lost in gather_object([{one.url: why for one, why in self._lost.items()}]):
            for url, why in lost.items():
                self._drop(clients[url], ServerError(why))

    def _is_lost(self, client: GenerationClient, error: Exception) -> bool:
        """Whether the others go on without it, as the main process decides. Collective."""
        is_lost = self.is_proved and isinstance(error, ServerError)
        if not is_lost and client.args.process_index == 0:
            try:
                client.http.wait_until_up(0.0)
            except ValueError:
                is_lost = True
        return bool(broadcast_object_list([is_lost])[0])

    def connect(self, vocabulary: int, device: torch.device, by_adapter: bool) -> None:
        """Connects each to be sent weights, or adapters. Collective."""
        try:
            for client in self.live:
                client.connect(vocabulary, device, by_adapter)
        except BaseException:
            with suppress(ServerError):
                self.close()  # else those before it would stay connected
            raise

    def check_connected(self) -> None:
        """Raises `ServerError` if they were closed, or weights cannot be sent any more. Collective."""
        self.agree()
        for client in self.live:
            client.check_connected()

    def forget_prefixes(self) -> None:
        """Resets the prefix caches. Collective."""
        self.each(lambda client: client.forget_prefixes())

    def wipe_cache(self) -> None:
        """No-op: servers loaded real weights; their caches hold no NaNs."""

    def close(self) -> None:
        """Disconnects each that is connected, so that another training run can use it."""
        errors = []
        for client in self._speeds:
            try:
                client.give_back()
            except ServerError as error:
                errors += [error] * (client in self.live)
        if errors:
            raise errors[0]

    def proofs(self, made: Callable[[GenerationClient], Proof]) -> Proof:
        """A proof of the weights of each."""
        self.is_proved = False  # of another student
        return _Proofs(self, {client: made(client) for client in self.live})


async def _posted(client: GenerationClient, body: dict[str, Any]) -> Response:
    """The response to a row; an error also when the server's machine is lost, which closes no connection."""
    asking = asyncio.create_task(client.http.request("POST", client.path, json=body))
    try:
        while not (await asyncio.wait([asking], timeout=WATCHED))[0]:
            try:
                await client.http.request("GET", "/health", seconds=client.kind.health_seconds)
            except ServerError as error:
                raise ServerError(str(error)) from None  # it is this that took too long, not the row
        return await asking
    finally:
        asking.cancel()


class _Proofs(Proof):
    """Verifies a weight sync with each server that is left, one after the other. All collective."""

    def __init__(self, servers: Servers, each: dict[GenerationClient, Proof]) -> None:
        self._servers, self._each = servers, each

    def take_prompts(self, prompt_ids: list[list[int]]) -> None:
        for client in self._servers.live:
            self._each[client].take_prompts(prompt_ids)

    def record_scores(self) -> None:
        self._servers.each(lambda client: self._each[client].record_scores())

    def check(self) -> float:
        """The largest log-probability difference in nats over all servers and processes."""
        largest = max(self._servers.each(lambda client: self._each[client].check()))
        self._servers.is_proved = True
        return largest
