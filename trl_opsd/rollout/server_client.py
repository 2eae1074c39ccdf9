"""TRL's client for a vLLM server with limits; TRL's own waits forever and resends non-idempotent requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from trl_opsd._compat.trl import VLLMClient
from trl_opsd.config import OPSDConfig
from trl_opsd.rollout import answers
from trl_opsd.rollout.asking import Asking
from trl_opsd.rollout.sessions import content, session_with, wait_for_server
from trl_opsd.run.bounded_http import is_loopback
from trl_opsd.run.errors import ServerError

_HEALTH_SECONDS = 10.0
"""A running server answers health checks at once, however busy its model is."""
_ABORT_SECONDS = 10.0
"""A server ends requests whose connection was closed after the decoding step that is under way."""


class ServerClient(Asking, VLLMClient):
    """TRL's client with deadlines, size limits and no retries, for the process that sends weights.

    Args:
        args ([`OPSDConfig`]):
            The address of the server, and how long to wait for it.
        deadline (`float`):
            Seconds within which any request has to be answered, to the last byte.

    Raises:
        ValueError: No server answers within `vllm_server_timeout` seconds.
        ServerError: An answer is not a vLLM server's. Every method may raise it.
    """

    def __init__(self, args: OPSDConfig, deadline: float) -> None:
        self._deadline = deadline
        with answers.parsing("/v1/models"):
            super().__init__(
                base_url=args.vllm_server_base_url,
                host=args.vllm_server_host,
                server_port=args.vllm_server_port,
                group_port=args.vllm_group_port,
                connection_timeout=args.vllm_server_timeout,
            )
            if not isinstance(self.model, str):
                raise TypeError(f"expected the name of a model, got {self.model!r}")

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Waits until the server is up. TRL calls this first of all, so the session is set up here.

        Raises:
            ValueError: It is not up in time.
        """
        self.session = session_with("The vLLM server", "vllm_server_base_url", self.base_url, self._deadline)
        address = "`vllm_server_host`, `vllm_server_port` or `vllm_server_base_url`"
        wait_for_server("vLLM", self.base_url, self._health_error, total_timeout, "vllm_server_timeout", address)

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, by its address."""
        return is_loopback(self.host)

    def facts(self) -> answers.ServerFacts:
        """The configuration that the server reports."""
        return answers.facts(self.get_server_info())

    def get_server_info(self) -> dict[str, Any]:
        """As TRL's, with the answer validated."""
        with answers.parsing("/server_info"):
            info: dict[str, Any] = super().get_server_info()
            return {"weight_transfer_config": None, **info}

    def get_world_size(self) -> int:
        """As TRL's, with the answer validated."""
        with answers.parsing("/get_world_size"):
            return answers.world_size(super().get_world_size())

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        """As TRL's, once no row is being written: a server whose weights are replaced during a decoding step dies."""
        self.forget_prefixes()
        super().update_named_params(metadata, named_params)

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights.

        Raises:
            ServerError: It still serves other requests after the time that it takes to end rows that were given up.
        """
        began = monotonic()
        while self._post(f"{self.base_url}/reset_prefix_cache", json={}).get("success") is False:
            if monotonic() - began >= _ABORT_SECONDS:
                raise ServerError(
                    f"The vLLM server at {self.base_url} did not reset its prefix cache because it is serving other "
                    "requests; completions would come from earlier weights. Use it for a single training run."
                )
            sleep(0.1)

    def init_communicator(self, device: Any = 0) -> None:
        """As TRL's, but with a server on this machine the rendezvous is on loopback, not on a public address.

        Raises:
            ValueError: Weights cannot be sent from this device.
        """
        try:
            with _rendezvous_at("127.0.0.1" if self.is_loopback else None):
                super().init_communicator(device)
        except NotImplementedError as error:
            raise ValueError(
                f"`vllm_mode='server'`: {error} Set `vllm_mode='colocate'` or `use_vllm=False`."
            ) from error

    def _health_error(self) -> str | None:
        try:
            status = self.session.get(f"{self.base_url}/health", seconds=_HEALTH_SECONDS).status_code
        except ServerError as error:
            return str(error)
        return None if status == 200 else f"/health answers {status}, not 200"

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return content(self.session.get(url, **kwargs))

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return content(self.session.post(url, **kwargs))


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
