"""Addresses of servers as options give them, which of them are on this machine, and the tokens for them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

# From the environment, because command lines are visible to other users, and options are logged.
TEACHER_TOKEN = "TRL_OPSD_TEACHER_TOKEN"
"""The variable with the token of a teacher's server, or of a proxy before it."""
ROLLOUT_TOKEN = "TRL_OPSD_ROLLOUT_TOKEN"
"""The variable with the `--api-key` of a vLLM or SGLang server that generates completions."""

ONLY = "teacher"
"""The name of a teacher that is the only one."""


def server_urls(option: str, value: Any) -> dict[str, str]:
    """The address of each teacher's server by its name, of one or a dict."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {ONLY: url_of(option, value)}
    return {name: url_of(f"{option}[{name!r}]", one) for name, one in value.items()}


def url_of(option: str, value: Any) -> str:
    """The address of an option, without a trailing slash."""
    given = value.strip() if isinstance(value, str) else str(value)
    expected = "expected one address (for several devices see docs/generation.md) such as `http://127.0.0.1:8000`"
    if "@" in given:  # not quoted: it may hold a password
        raise ValueError(
            f"`{option}` contains a user or a password, which would be logged: {expected}; put a token into the "
            f"environment variable `{TEACHER_TOKEN}`."
        )
    try:
        parts = urlsplit(given)
        has_port = parts.port is not None or ":" not in parts.netloc.rpartition("]")[2]
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_origin = is_http and has_port and not (parts.query or parts.fragment)
    except ValueError:  # a port that is no number
        is_origin = False
    if not is_origin:
        raise ValueError(f"`{option}={given!r}`: {expected}, with `http://` or `https://` and a host.")
    return given.rstrip("/")


def is_this_machine(host: str | None) -> bool:
    """Whether a client that connects to a host name or address gets no further than this machine, past any proxy.

    `0.0.0.0` and `::` are: a connection to them is one to loopback.
    """
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def token_header(variable: str) -> dict[str, str]:
    """The authorization header with the token (vLLM and SGLang: API key) of an environment variable; empty without one.

    An error does not quote it.
    """
    token = os.environ.get(variable, "")
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"{variable} contains spaces, line breaks or non-ASCII characters: expected `A-Za-z0-9_-`.")
    return {"Authorization": f"Bearer {token}"} if token else {}
