"""Addresses of servers as options give them: one, several, or several by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from trl_opsd.http.server_tokens import TEACHER_TOKEN

ONLY = "teacher"
"""The name of a teacher that is the only one."""


def server_urls(option: str, value: Any) -> dict[str, tuple[str, ...]]:
    """Addresses of each teacher's servers by name: of one, several in a list or with commas, or a dict."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {ONLY: _urls(option, value)}
    if not value:
        raise ValueError(f"`{option}` is an empty dict: name a teacher and its server, or leave it out.")
    return {name: _urls(f"{option}[{name!r}]", one) for name, one in value.items()}


def is_origin(url: Any) -> bool:
    """Whether a text is the scheme, host and port of a server, and no more."""
    try:
        parts = urlsplit(str(url))
        known = parts.port is not None or ":" not in parts.netloc.rpartition("]")[2]
    except ValueError:  # a port that is no number
        return False
    return known and parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)


def _urls(called: str, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"`{called}={value!r}`: expected the address of a server, or a list of several.")
    urls = tuple(_url(called, part.strip()) for part in parts)
    if len(set(urls)) < len(urls):
        raise ValueError(f"`{called}={value!r}` names a server twice: leave one out.")
    return urls


def _url(called: str, given: str) -> str:
    """The address without a trailing slash; an error does not quote a password in it."""
    expected = "expected an address as `http://127.0.0.1:8000`"
    try:
        parts = urlsplit(given)  # `port` is parsed only when it is read, and may raise
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if "@" in given:
        raise ValueError(
            f"`{called}` has a user or a password in it, which would be logged: {expected}; a token is read from the "
            f"environment variable `{TEACHER_TOKEN}`."
        )
    if not is_address or parts.query or parts.fragment:
        raise ValueError(f"`{called}={given!r}`: {expected}, with `http://` or `https://` and a host.")
    if (path := parts.path.rstrip("/")).endswith(("/v1", "/pooling", "/models")):
        raise ValueError(f"`{called}={given!r}` ends in {path!r}, which is added: {expected}.")
    return given.rstrip("/")
