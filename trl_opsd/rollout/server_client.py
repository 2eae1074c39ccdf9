"""Speaks with a vLLM server through TRL's client: every request has a deadline and is sent once."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter

from trl_opsd._compat.trl import VLLMClient
from trl_opsd._compat.vllm import Written

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
"""A machine that is there takes a connection at once, however busy its model is."""


class ServerError(RuntimeError):
    """A vLLM server did not do what it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says it runs."""

    dtype: torch.dtype
    """What it computes in."""
    context: int
    """Tokens of prompt and completion together."""
    block_size: int
    """Tokens that are cached together."""


class ServerClient(VLLMClient):
    """TRL's client, which by itself waits without limit and repeats requests that are no longer the same then.

    Args:
        args ([`OPSDConfig`]):
            Says where the server is, and for how long it is waited for.
        deadline (`float`):
            Seconds within which any request has to be answered.

    Raises:
        ValueError: No server answers within `vllm_server_timeout` seconds.
    """

    def __init__(self, args: Any, deadline: float) -> None:
        self._deadline = deadline
        super().__init__(
            base_url=args.vllm_server_base_url,
            host=args.vllm_server_host,
            server_port=args.vllm_server_port,
            group_port=args.vllm_group_port,
            connection_timeout=args.vllm_server_timeout,
        )

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Waits until the server is up. TRL calls this first of all, so the session is set up here.

        Raises:
            ValueError: It is not up in time.
        """
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Once(self._deadline))
        # A connection that was kept may be closed by the server just when it is used again.
        self.session.headers["Connection"] = "close"
        self.session.trust_env = not self.is_loopback  # a proxy is no way to loopback
        began, said = monotonic(), False
        while why := self._why_not_up():
            if monotonic() - began >= total_timeout:
                raise ValueError(
                    f"No vLLM server at {self.base_url} after `vllm_server_timeout={total_timeout:g}` seconds: {why}. "
                    "Start one as docs/rollouts.md says, or correct `vllm_server_host`, `vllm_server_port` or "
                    "`vllm_server_base_url`."
                )
            if not said:
                logger.warning(f"No vLLM server at {self.base_url} yet, waiting for up to {total_timeout:g} seconds.")
                said = True
            sleep(min(retry_interval, max(total_timeout, 0.0)))

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, by its address."""
        if self.host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return address.is_loopback or address.is_unspecified

    def facts(self) -> ServerFacts:
        """What the server says it runs."""
        info = self.get_server_info()
        model = info["model_config"]
        return ServerFacts(
            dtype=getattr(torch, str(model["dtype"]).removeprefix("torch.")),
            context=model["max_model_len"],
            block_size=info["cache_config"]["block_size"],
        )

    def write(self, prompt_ids: list[list[int]], options: dict[str, Any]) -> list[Written]:
        """Has one completion written after each prompt.

        Args:
            prompt_ids (`list[list[int]]`):
                Not padded.
            options (`dict`):
                Of all of them, in the server's words.
        """
        choices = self._ask(
            "/v1/completions",
            model=self.model,
            prompt=prompt_ids,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            **options,
        )["choices"]
        return [_written(choice) for choice in sorted(choices, key=lambda choice: choice["index"])]

    def forget_prefixes(self) -> None:
        """Drops what was computed from prompts with weights that are no longer there."""
        if self._ask("/reset_prefix_cache").get("success") is False:
            raise ServerError(
                f"The vLLM server at {self.base_url} did not reset its prefix cache, as it is answering somebody else; "
                "completions would come from earlier weights. Give it to one training alone."
            )

    def init_communicator(self, device: Any = 0) -> None:
        """As TRL's, but for a server on this machine the two meet on loopback, not on a public address.

        Raises:
            ValueError: Weights cannot be sent from this device.
        """
        try:
            with _meeting_at("127.0.0.1" if self.is_loopback else None):
                super().init_communicator(device)
        except NotImplementedError as error:
            raise ValueError(
                f"`vllm_mode='server'`: {error} Set `vllm_mode='colocate'` or `use_vllm=False`."
            ) from error

    def _why_not_up(self) -> str | None:
        try:
            status = self.session.get(f"{self.base_url}/health", timeout=_CONNECT_SECONDS).status_code
        except requests.RequestException as error:
            return f"{type(error).__name__}: {error}"
        return None if status == 200 else f"/health answers {status}, not 200"

    def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        asked = f"The vLLM server at {self.base_url}, asked for {path},"
        try:
            response = self.session.post(f"{self.base_url}{path}", json=body)
        except requests.Timeout as error:
            raise ServerError(
                f"{asked} did not answer within {self._deadline:g} seconds, nine tenths of `ddp_timeout`: see its log, "
                "and raise `ddp_timeout` if it only needs longer."
            ) from error
        except requests.RequestException as error:
            raise ServerError(f"{asked} failed: {type(error).__name__}: {error}. See its log.") from error
        if response.status_code != 200:
            raise ServerError(f"{asked} answered {response.status_code}: {response.text[:500]}")
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer


class _Once(HTTPAdapter):
    """Sends a request once and waits for the answer no longer than the deadline."""

    def __init__(self, deadline: float) -> None:
        super().__init__(max_retries=0)
        self._timeout = (_CONNECT_SECONDS, deadline)

    def send(self, request: Any, stream: bool = False, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().send(request, stream, timeout or self._timeout, *args, **kwargs)


def _written(choice: dict[str, Any]) -> Written:
    ids = choice["prompt_token_ids"]
    scored = (choice.get("prompt_logprobs") or [])[1:]
    return Written(
        prompt_ids=ids,
        completion_ids=choice["token_ids"],
        prompt_logprobs=[one[str(token)]["logprob"] for token, one in zip(ids[1:], scored, strict=False)],
        logprobs=(choice.get("logprobs") or {}).get("token_logprobs", []),
    )


@contextmanager
def _meeting_at(address: str | None) -> Iterator[None]:
    """Names the address where server and trainer meet to exchange weights, unless the user has."""
    if address is None or "VLLM_HOST_IP" in os.environ:
        yield
        return
    os.environ["VLLM_HOST_IP"] = address
    try:
        yield
    finally:
        del os.environ["VLLM_HOST_IP"]
