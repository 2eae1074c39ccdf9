"""Classifies addresses of this machine: reachable from here alone, or leading nowhere else."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str | None) -> bool:
    """Whether a server that listens on a host name or address is reached from this machine alone.

    `0.0.0.0` and `::` are not: what listens there listens on every interface.
    """
    return host == "localhost" or _is(host, "is_loopback")


def is_this_machine(host: str | None) -> bool:
    """Whether a client that connects to a host name or address gets no further than this machine, past any proxy.

    `0.0.0.0` and `::` are: a connection to them is one to loopback.
    """
    return is_loopback(host) or _is(host, "is_unspecified")


def _is(host: str | None, what: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host or ""), what))
    except ValueError:
        return False
