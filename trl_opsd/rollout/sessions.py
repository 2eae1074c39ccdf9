"""What the clients of all servers have in common: the limits of their requests, and where a server is."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlparse

from accelerate.utils import gather_object

from trl_opsd.run.bounded_http import Answer, BoundedSession, is_loopback
from trl_opsd.run.errors import ServerError

logger = logging.getLogger(__name__)

_BETWEEN = 2.0
"""Seconds between two questions whether a server is up."""


def session_with(server: str, option: str, base_url: str, deadline: float) -> BoundedSession:
    """A session with a server whose requests have to be answered within `deadline` seconds, to the last byte.

    Args:
        server (`str`):
            What answers, as an error message begins.
        option (`str`):
            The option with its address.
        base_url (`str`):
            The address.
        deadline (`float`):
            Seconds, nine tenths of `ddp_timeout`.
    """
    origin = ", nine tenths of `ddp_timeout`: see its log, and raise `ddp_timeout` if it only needs longer."
    # A proxy cannot reach our loopback.
    trust_env = not is_loopback(urlparse(base_url).hostname)
    return BoundedSession(server, option, deadline, origin, trust_env)


def wait_for_server(
    kind: str, base_url: str, why_not: Callable[[], str | None], seconds: float, timeout: str, address: str
) -> None:
    """Waits until a server is up.

    Args:
        kind (`str`):
            What it is, in messages.
        base_url (`str`):
            Its address.
        why_not (`Callable`):
            Asks it; returns why it is not up, or `None`.
        seconds (`float`):
            How long to wait.
        timeout, address (`str`):
            The options with both.

    Raises:
        ValueError: It is not up in time.
    """
    began, has_warned = monotonic(), False
    while why := why_not():
        if monotonic() - began >= seconds:
            raise ValueError(
                f"No {kind} server at {base_url} after `{timeout}={seconds:g}` seconds: {why}. Start one as "
                f"docs/rollouts.md says, or correct {address}."
            )
        if not has_warned:
            logger.warning(f"No {kind} server at {base_url} yet, waiting for up to {seconds:g} seconds.")
            has_warned = True
        sleep(min(_BETWEEN, max(seconds, 0.0)))


def content(answer: Answer, kind: type = dict) -> Any:
    """What a server answered, an object or a list, if it did what it was asked."""
    if answer.status_code != 200:
        raise ServerError(f"{answer.asked} answered {answer.status_code}: {answer.text[:500]}")
    return answer.json(kind) if answer.content else kind()


def machines() -> int:
    """The number of machines of the launch. Collective."""
    return len(set(gather_object([socket.gethostname()])))


def check_reached_by_all(server: str, base_url: str, machines: int, options: str) -> None:
    """Refuses an address that is another place on each of several machines, where each process asks for its own rows.

    Raises:
        ValueError: It is loopback.
    """
    if machines > 1 and is_loopback(urlparse(base_url).hostname):
        raise ValueError(
            f"Each process takes its rows from {server}, but {base_url} is another place on each of {machines} "
            f"machines: set {options} to an address that all of them reach."
        )
