"""A server of any kind as an engine: the main process sends the requests of all, and broadcasts the completions.

Rows taken as they end are requested by each process. How a kind of server is called, and sent weights, is its client's.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from accelerate.utils import broadcast_object_list, gather_object

from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.host import Host
from trl_opsd.http.client import HTTPClient, Response, ServerKind
from trl_opsd.http.urls import is_this_machine
from trl_opsd.models.backbone import model_shape
from trl_opsd.rollout.engine import Row, Rows
from trl_opsd.rollout.weight_sync import Stream
from trl_opsd.types import Completion

_ORIGIN = ", nine tenths of `ddp_timeout`: see its log, and raise `ddp_timeout` if it only needs longer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The configuration that a server reports."""

    dtype: torch.dtype
    """The dtype it computes in."""
    context: int
    """Context length in tokens, prompt and completion together."""
    block_size: int
    """Tokens in a block of its prefix cache."""


class GenerationClient(ABC):
    """A client of a server that generates; failures of the server are `ServerError`.

    That of the main process waits for the server and reads its `facts`, which the others are given; only it connects
    and sends weights.
    """

    kind: ClassVar[ServerKind]
    longer_context: ClassVar[str]
    """How to start the server with a longer context, in words."""

    def __init__(self, args: OPSDConfig, deadline: float, facts: Any = None) -> None:
        self.args, self.url = args, self.address(args)
        self.http = HTTPClient(self.kind, self.url, deadline, _ORIGIN)
        if facts is None:
            self.http.wait_until_up(getattr(args, self.kind.timeout))
        self.facts = self.read_facts() if facts is None else facts
        self.version: str | None = None
        """The weights that completions have to be generated with, where the server reports them."""

    @staticmethod
    @abstractmethod
    def address(args: OPSDConfig) -> str:
        """The address of the server, without a trailing slash."""

    @abstractmethod
    def read_facts(self) -> Facts:
        """The configuration that the server reports."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> list[Completion]:
        """Generates one completion for each prompt."""

    @abstractmethod
    def write_each(self, rows: Sequence[Row]) -> Rows:
        """As `write`, with one request for each prompt; completions are returned as they end."""

    @abstractmethod
    def try_bias(self, token: int) -> Response:
        """The response to a request with a logit bias for a token id."""

    @abstractmethod
    def connect(self, device: torch.device) -> torch.device:
        """Connects to send weights, again if it was connected, and returns the device where they have to be."""

    @abstractmethod
    def check_connected(self) -> None:
        """Raises `ServerError` if it was closed, or the server may not have the latest weights."""

    @abstractmethod
    def update(self, stream: Stream, /) -> None:
        """Replaces all weights by those of a stream that was entered."""

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Resets the prefix cache."""

    @abstractmethod
    def close(self) -> None:
        """Disconnects, if it is connected."""

    def has_token(self, token: int) -> bool:
        """Whether the server's model has a token id; a bias for one that it lacks is refused before anything runs."""
        response = self.try_bias(token)
        if response.status == 400 and b"logit_bias" in response.content:
            return False
        response.check_status()
        return True


class ServerEngine:
    """A server as an engine. All methods but `write_each` and `close` are collective, each process with its own
    prompts.
    """

    def __init__(
        self, trainer: Host, kind: type[GenerationClient], client: GenerationClient | None, deadline: float
    ) -> None:
        self._is_main, self._process = client is not None, trainer.accelerator.process_index
        self._vocabulary = model_shape(trainer.model)[0]
        self.name, self.device = f"the {kind.kind.name} server", trainer.accelerator.device
        (facts,) = broadcast_object_list([client and client.facts])  # only the main process has contacted the server
        self._client = client or kind(trainer.args, deadline, facts)
        self._machines = len(set(gather_object([socket.gethostname()])))

    @property
    def facts(self) -> Facts:
        """The server's configuration."""
        found: Facts = self._client.facts
        return found

    @property
    def block_size(self) -> int:
        """Tokens in a block of the server's prefix cache."""
        return self.facts.block_size

    def connect(self) -> None:
        """Connects for weight syncs; rejects a server with another model, or one that this device cannot send to."""
        with shared_errors():
            if self._is_main:
                if not self._client.has_token(self._vocabulary - 1):
                    raise ValueError(
                        f"The model of {self.name} at {self._client.url} knows fewer ids than the student, which has "
                        f"{self._vocabulary}: start it with the student's checkpoint."
                    )
                self.device = self._client.connect(self.device)  # where weights have to be from now on

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt, if all are valid; processes may have different numbers of them."""
        by_process = gather_object([list(zip(prompt_ids, options, strict=True))])
        answers: list[Any] = [None]
        with shared_errors():
            if self._is_main:
                rows = [row for of_one in by_process for row in of_one]
                self._check_prompts(rows)
                rest = iter(self._client.write(rows))
                answers = [[[next(rest) for _ in of_one] for of_one in by_process]]
        (of_each,) = broadcast_object_list(answers)
        mine: list[Completion] = of_each[self._process]
        return mine

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> Rows:
        """Generates as `write`, without other processes, and returns rows as they end. All requests have begun then."""
        url, kind = self._client.url, self._client.kind
        if self._machines > 1 and is_this_machine(urlsplit(url).hostname):
            raise ValueError(
                f"Each process takes its rows from {self.name}, but {url} is another place on each of "
                f"{self._machines} machines: set {kind.address} to an address that all of them reach."
            )
        rows = list(zip(prompt_ids, options, strict=True))
        self._check_prompts(rows)
        return self._client.write_each(rows)

    def check_connected(self) -> None:
        """Raises `ServerError` if it was closed, or weights cannot be sent any more."""
        with shared_errors():
            if self._is_main:
                self._client.check_connected()

    def load(self, stream: Stream) -> None:
        """Replaces all weights; all processes iterate over the stream, and the main one sends it."""
        with shared_errors(), stream:
            if self._is_main:
                self._client.update(stream)
        # With it each process checks which weights its completions are from.
        (self._client.version,) = broadcast_object_list([self._client.version])

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights."""
        with shared_errors():
            if self._is_main:
                self._client.forget_prefixes()

    def wipe_cache(self) -> None:
        """No-op: the server loaded real weights; its cache holds no NaNs."""

    def close(self) -> None:
        """Disconnects from the server, so that another training run can use it."""
        if self._is_main:
            self._client.close()

    def _check_prompts(self, rows: list[Row]) -> None:
        for number, (ids, _) in enumerate(rows):
            if not ids:
                raise ValueError(f"Prompt {number} of a batch is empty, and cannot be sent to {self.name}.")
            for token in ids:  # some servers end at an id that they lack
                if type(token) is not int or not 0 <= token < self._vocabulary:
                    raise ValueError(
                        f"Prompt {number} of a batch has the id {token!r}, and cannot be sent to {self.name}: expected "
                        f"ids from 0 to {self._vocabulary - 1}."
                    )


@contextmanager
def shared_errors() -> Iterator[None]:
    """Raises an error of the main process in all, as `ServerError`, so that none waits for it. Collective."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    (message,) = broadcast_object_list([None if error is None else str(error)])
    if error is not None:
        raise error
    if message is not None:  # in another process, to which the error itself cannot always be sent
        raise ServerError(message)
