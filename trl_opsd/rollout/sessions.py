"""What the clients of all rollout servers share: requests, authentication, and waiting for a server."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from accelerate.utils import gather_object

from trl_opsd.errors import ServerError
from trl_opsd.http.addresses import is_this_machine
from trl_opsd.http.bounded_http import Answer, BoundedSession
from trl_opsd.http.server_tokens import ROLLOUT_TOKEN, token_header

logger = logging.getLogger(__name__)

_BETWEEN = 2.0
"""Seconds between two health checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """Words for messages about a kind of server, and how to wait for it."""

    name: str
    """Its name."""
    option: str
    """The option with its address."""
    address: str
    """All options for its address, in words."""
    timeout: str
    """The option with the seconds to wait for it."""
    context: str
    """How to start it with a longer context, in words."""
    health_seconds: float
    """A server that is up answers health checks within this time, however busy its model is."""

    def session(self, url: str, deadline: float) -> BoundedSession:
        """A session with a server, whose requests have to be answered within `deadline` seconds, to the last byte."""
        origin = ", nine tenths of `ddp_timeout`: see its log, and raise `ddp_timeout` if it only needs longer."
        # A proxy cannot reach our loopback.
        trust_env = not is_this_machine(urlsplit(url).hostname)
        headers = token_header(ROLLOUT_TOKEN)
        return BoundedSession(f"The {self.name} server", self.option, deadline, origin, trust_env, headers)

    def wait(self, session: BoundedSession, url: str, seconds: float) -> None:
        """Waits until a server is up; a `ValueError` if it is not in time."""
        began, has_warned = monotonic(), False
        while why := self._why_not_up(session, url):
            if monotonic() - began >= seconds:
                raise ValueError(
                    f"No {self.name} server at {url} after `{self.timeout}={seconds:g}` seconds: {why}. Start one as "
                    f"docs/rollouts.md says, or correct {self.address}."
                )
            if not has_warned:
                logger.warning(f"No {self.name} server at {url} yet, waiting for up to {seconds:g} seconds.")
                has_warned = True
            sleep(min(_BETWEEN, max(seconds, 0.0)))

    def _why_not_up(self, session: BoundedSession, url: str) -> str | None:
        try:
            status = session.get(f"{url}/health", seconds=self.health_seconds).status_code
        except ServerError as error:
            return str(error)
        return None if status == 200 else f"/health answers {status}, not 200"

    def check_reached_by_all(self, url: str, machines: int) -> None:
        """Rejects a loopback address in a launch of several machines, where it is another place on each."""
        if machines > 1 and is_this_machine(urlsplit(url).hostname):
            raise ValueError(
                f"Each process takes its rows from the {self.name} server, but {url} is another place on each of "
                f"{machines} machines: set {self.address} to an address that all of them reach."
            )


def content(answer: Answer, kind: type = dict) -> Any:
    """The content of a successful answer, an object or a list; any other status is a `ServerError`."""
    if answer.status_code != 200:
        key = f" Set the environment variable `{ROLLOUT_TOKEN}` to its key." if answer.status_code in (401, 403) else ""
        raise ServerError(f"{answer.asked} answered {answer.status_code}: {answer.text[:500]}{key}")
    return answer.json(kind) if answer.content else kind()


def accepts(answer: Answer) -> bool:
    """Whether a server knows the id whose bias was sent; refusals for other reasons are a `ServerError`."""
    if answer.status_code == 400 and b"logit_bias" in answer.content:
        return False
    content(answer)
    return True


def machines() -> int:
    """The number of machines of the launch. Collective."""
    return len(set(gather_object([socket.gethostname()])))
