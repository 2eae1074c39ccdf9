"""TRL's client for a vLLM server with limits; TRL's own waits forever and resends non-idempotent requests."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any
from weakref import WeakValueDictionary

import torch

from trl_opsd._compat.trl import VLLMClient
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.http.addresses import is_this_machine
from trl_opsd.rollout import answers
from trl_opsd.rollout.asking import Asking
from trl_opsd.rollout.sessions import ServerKind, accepts, content
from trl_opsd.rollout.weight_sync import Stream

VLLM = ServerKind(
    name="vLLM",
    option="vllm_server_base_url",
    address="`vllm_server_host`, `vllm_server_port` or `vllm_server_base_url`",
    timeout="vllm_server_timeout",
    context="a larger `--max-model-len`",
    health_seconds=10.0,
)
_ABORT_SECONDS = 10.0
"""A server ends requests whose connection was closed only after the current decoding step."""
_connected: WeakValueDictionary[int, ServerClient] = WeakValueDictionary()
"""The client of this process that last used each group port."""

SENDS_FROM = "cuda"
"""The type of device that TRL's client can send weights from: it has only NCCL."""


class ServerClient(Asking, VLLMClient):
    """TRL's client with deadlines, size limits and no retries, for the process that sends weights."""

    def __init__(self, args: OPSDConfig, deadline: float) -> None:
        self._deadline = deadline
        with answers.parsing("/v1/models"):
            VLLMClient.__init__(
                self,
                base_url=args.vllm_server_base_url,
                host=args.vllm_server_host,
                server_port=args.vllm_server_port,
                group_port=args.vllm_group_port,
                connection_timeout=args.vllm_server_timeout,
            )
            if not isinstance(self.model, str):
                raise TypeError(f"expected the name of a model, got {self.model!r}")
        info = self.get_server_info()
        Asking.__init__(self, self.base_url, self.session, answers.facts(info, self.model))
        if info["weight_transfer_config"] is None:
            raise ValueError(
                f"The vLLM server at {self.url} cannot be sent weights: start it with "
                """`--weight-transfer-config '{"backend": "nccl"}'`, as docs/rollouts.md says."""
            )

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Waits until the server is up. TRL calls this first of all, so the session is created here."""
        self.session = VLLM.session(self.base_url, self._deadline)
        VLLM.wait(self.session, self.base_url, total_timeout)

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, by its address."""
        return is_this_machine(self.host)

    def knows(self, vocabulary: int) -> bool:
        """Whether the server's model has this many ids or more."""
        # A bias for an id that the model lacks is refused before anything runs.
        asked = {"max_tokens": 1, "logit_bias": {str(vocabulary - 1): 0.0}}
        return accepts(self.session.post(self._route, json=self._body([[0]], asked)))

    def get_server_info(self) -> dict[str, Any]:
        """As TRL's, with the answer validated."""
        try:
            with answers.parsing("/server_info"):
                info: dict[str, Any] = super().get_server_info()
                return {"weight_transfer_config": None, **info}
        except RuntimeError as error:  # TRL's says which environment variable the server lacks
            raise ServerError(str(error)) from error

    def get_world_size(self) -> int:
        """As TRL's, with the answer validated."""
        with answers.parsing("/get_world_size"):
            return answers.world_size(super().get_world_size())

    def connect(self, device: torch.device) -> torch.device:
        """Connects to send weights; a server on this machine is met on loopback, not on a public address.

        An earlier connection of this process over the same port is closed: only one client at a time can have it.
        """
        # The earlier client listens at the port until it is closed.
        _connected.get(self.group_port, self).close()
        self.close()
        _check_free(self.group_port)
        try:
            with _rendezvous_at("127.0.0.1" if self.is_loopback else None):
                self.init_communicator(device)
        except BaseException:
            self.close()  # else the port would be held
            raise
        _connected[self.group_port] = self
        return device

    def check_connected(self) -> None:
        """Raises `ServerError` if another may be connected instead: a vLLM server does not say whose weights it has."""
        if self.communicator is None:
            raise ServerError(
                f"The vLLM server at {self.url} is not connected to any more: the rollout was closed, or another "
                f"trainer of this process has connected over `vllm_group_port={self.group_port}`. Build the trainer "
                "again; two at the same time need a server and a port each."
            )

    def update(self, stream: Stream) -> None:
        """Replaces all weights while no row is generated: new weights during a decoding step would end the server."""
        self.check_connected()
        self.forget_prefixes()
        self.update_named_params(stream.announced(), iter(stream))

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights; waits for rows that are being cancelled."""
        began = monotonic()
        while self._post(f"{self.url}/reset_prefix_cache", json={}).get("success") is False:
            if monotonic() - began >= _ABORT_SECONDS:
                raise ServerError(
                    f"The vLLM server at {self.url} did not reset its prefix cache because it is serving other "
                    "requests; completions would come from earlier weights. Use it for a single training run."
                )
            sleep(0.1)

    def close(self) -> None:
        """Disconnects, so that the port is free, and another training run can use the server."""
        # TRL registers it, which would keep this client alive until the program ends.
        atexit.unregister(self.close_communicator)
        self.close_communicator()

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return content(self.session.get(url, **kwargs))

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return content(self.session.post(url, **kwargs))


def _check_free(port: int) -> None:
    """Rejects a port that is in use: the server would connect to that, and both would wait for minutes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"`vllm_group_port={port}`, where the vLLM server meets this process, cannot be listened on ({error}): "
                "set it to a free port; another training on this machine may have this one."
            ) from error


@contextmanager
def _rendezvous_at(address: str | None) -> Iterator[None]:
    """Sets the address where server and trainer connect to exchange weights, unless the user has set it."""
    if address is None or "VLLM_HOST_IP" in os.environ:
        yield
        return
    os.environ["VLLM_HOST_IP"] = address
    try:
        yield
    finally:
        del os.environ["VLLM_HOST_IP"]
