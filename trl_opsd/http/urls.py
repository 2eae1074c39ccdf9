"""Addresses of servers as options give them, which of them are on this machine, and the tokens for them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

# From the environment, because command lines are visible to other users, and options are logged.
TEACHER_TOKEN = "TRL_OPSD_TEACHER_TOKEN"
"""The variable with the token of a teacher's server, or of a proxy before it."""
ROLLOUT_TOKEN = "TRL_OPSD_ROLLOUT_TOKEN"
"""The variable with the `--api-key` of a vLLM or SGLang server that generates completions."""

ONLY = "teacher"
"""The name of a teacher that is the only one."""


def server_urls(option: str, value: Any) -> dict[str, tuple[str, ...]]:
    """Addresses of each teacher's servers by name: of one, several in a list or with commas, or a dict."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {ONLY: urls_of(option, value)}
    if not value:
        raise ValueError(
            f"`{option}` is an empty dict: expected teacher names with the address of a server; or remove the option."
        )
    return {name: urls_of(f"{option}[{name!r}]", one) for name, one in value.items()}


def is_origin(url: Any) -> bool:
    """Whether a text is the scheme, host and port of a server, and no more."""
    try:
        parts = urlsplit(str(url))
        known = parts.port is not None or ":" not in parts.netloc.rpartition("]")[2]
    except ValueError:  # a port that is no number
        return False
    return known and parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)


def urls_of(option: str, value: Any) -> tuple[str, ...]:
    """Addresses of an option, one or several (a list, or with commas), without trailing slashes."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"`{option}={value!r}`: expected the address of a server, or a list of several.")
    urls = tuple(_url(option, part.strip()) for part in parts)
    if len(set(urls)) < len(urls):
        raise ValueError(f"`{option}={value!r}` contains a server twice: remove one.")
    return urls


def _url(option: str, given: str) -> str:
    """The address without a trailing slash."""
    expected = "expected an address such as `http://127.0.0.1:8000`"
    if "@" in given:  # not quoted: it may hold a password
        raise ValueError(
            f"`{option}` contains a user or a password, which would be logged: {expected}; put a token into the "
            f"environment variable `{TEACHER_TOKEN}`."
        )
    if not is_origin(given):
        raise ValueError(f"`{option}={given!r}`: {expected}, with `http://` or `https://` and a host.")
    url = given.rstrip("/")
    if url.endswith(("/v1", "/pooling", "/models")):
        raise ValueError(
            f"`{option}={given!r}` ends in {urlsplit(url).path!r}, which is added automatically: {expected}."
        )
    return url


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


def some_urls(option: str, value: Any) -> None:
    """Refuses what is no address of a server, nor several."""
    if value is not None:
        urls_of(option, value)
