"""A server of any kind as an engine: the main process sends the requests of all, and broadcasts the answers.

Rows taken as they end are requested by each process. How a kind of server is called, and sent weights, is its client's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from accelerate.utils import broadcast_object_list

from trl_opsd.host import Host
from trl_opsd.http.bounded_http import BoundedSession
from trl_opsd.models.head import model_shape
from trl_opsd.rollout.engine import Row, Rows
from trl_opsd.rollout.one_asks import asked_by_main, shared_errors
from trl_opsd.rollout.sessions import ServerKind, machines
from trl_opsd.rollout.weight_sync import Stream
from trl_opsd.types import Completion


class Facts(Protocol):
    """The configuration that a server reports."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""

    @property
    def context(self) -> int:
        """Context length in tokens, prompt and completion together."""

    @property
    def block_size(self) -> int:
        """Tokens in a block of its prefix cache."""


class Asker(Protocol):
    """A client of a process that sends no weights.

    Attributes:
        url (`str`): the address of the server.
        facts ([`Facts`]): the server's configuration.
        version (`str`, *optional*): the weights that completions have to be generated with.
    """

    url: str
    facts: Any
    version: str | None

    def write(self, rows: Sequence[Row]) -> list[Completion]:
        """Generates one completion for each prompt."""

    def write_each(self, rows: Sequence[Row]) -> Rows:
        """As `write`, and returns rows as they end."""


class Client(Asker, Protocol):
    """The client of the process that sends weights."""

    def knows(self, vocabulary: int) -> bool:
        """Whether the server's model has this many ids or more."""

    def connect(self, device: torch.device) -> torch.device:
        """Connects to send weights, again if it was connected, and returns the device where they have to be."""

    def check_connected(self) -> None:
        """Raises `ServerError` if it was closed, or the server may not have the latest weights."""

    def update(self, stream: Stream, /) -> None:
        """Replaces all weights by those of a stream that was entered."""

    def forget_prefixes(self) -> None:
        """Resets the prefix cache."""

    def close(self) -> None:
        """Disconnects, if it is connected."""


NewAsker: TypeAlias = Callable[[str, BoundedSession, Any], Asker]
"""Makes the client of a process that sends no weights, of an address, a session and facts."""


class ServerEngine:
    """A server as an engine. All methods but `write_each` and `close` are collective, each process with its own
    prompts.

    Only the main process has a `client`; the others get one from `new_asker`.
    """

    def __init__(
        self, trainer: Host, kind: ServerKind, client: Client | None, new_asker: NewAsker, deadline: float
    ) -> None:
        self._kind, self._client, self._process = kind, client, trainer.accelerator.process_index
        self._vocabulary = model_shape(trainer.model)[0]
        self.name, self.device = f"the {kind.name} server", trainer.accelerator.device
        # Only the main process has contacted the server.
        ((url, facts),) = broadcast_object_list([client and (client.url, client.facts)])
        self._asking = client or new_asker(url, kind.session(url, deadline), facts)
        self._machines = machines()

    @property
    def facts(self) -> Facts:
        """The server's configuration."""
        found: Facts = self._asking.facts
        return found

    @property
    def block_size(self) -> int:
        """Tokens in a block of the server's prefix cache."""
        return self.facts.block_size

    def connect(self) -> None:
        """Connects for weight syncs; rejects a server with another model, or one that this device cannot send to."""
        with shared_errors():
            if self._client is not None:
                if not self._client.knows(self._vocabulary):
                    raise ValueError(
                        f"The model of {self.name} at {self._client.url} knows fewer ids than the student, which has "
                        f"{self._vocabulary}: start it with the student's checkpoint."
                    )
                # From here on weights have to be on this device to be sent.
                self.device = self._client.connect(self.device)

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt, if all are valid; processes may have different numbers of them."""
        rows = list(zip(prompt_ids, options, strict=True))
        return asked_by_main(rows, None if self._client is None else self._write, self._process)

    def _write(self, rows: list[Row]) -> list[Completion]:
        self._check_prompts(rows)
        return self._asking.write(rows)

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> Rows:
        """Generates as `write`, without other processes, and returns rows as they end. All requests have begun then."""
        self._kind.check_reached_by_all(self._asking.url, self._machines)
        rows = list(zip(prompt_ids, options, strict=True))
        self._check_prompts(rows)
        return self._asking.write_each(rows)

    def check_connected(self) -> None:
        """Raises `ServerError` if it was closed, or weights cannot be sent any more."""
        with shared_errors():
            if self._client is not None:
                self._client.check_connected()

    def load(self, stream: Stream) -> None:
        """Replaces all weights; all processes iterate over the stream, and the main one sends it."""
        with shared_errors(), stream:
            if self._client is not None:
                self._client.update(stream)
        # With it each process checks which weights its completions are from.
        (self._asking.version,) = broadcast_object_list([self._asking.version])

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights."""
        with shared_errors():
            if self._client is not None:
                self._client.forget_prefixes()

    def wipe_cache(self) -> None:
        """No-op: the server loaded real weights; its cache holds no NaNs."""

    def close(self) -> None:
        """Disconnects from the server, so that another training run can use it."""
        if self._client is not None:
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
