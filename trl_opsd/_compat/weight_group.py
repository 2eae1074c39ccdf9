"""A process group of this process and the workers of a server, apart from those of the launch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

MEET_SECONDS = 60.0
"""Both sides are running and told each other where to meet: they do so at once, or cannot reach each other."""


class WeightGroup:
    """A group in which this process is the first, and broadcasts.

    Args:
        name (`str`):
            Its name on both sides.
        host (`str`):
            The server, from which the address follows that it can reach this process by.
        workers (`int`):
            The others in the group.
        backend (`str`):
            `"gloo"` or `"nccl"`.
    """

    def __init__(self, name: str, host: str, workers: int, backend: str) -> None:
        self._name, self._size, self._backend = name, 1 + workers, backend
        self.address = _own_address(host)
        listener = socket.create_server((self.address, 0), family=_family(self.address))
        self.port: int = listener.getsockname()[1]
        """Port of the rendezvous, on the interface with `address` alone."""
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            self.address, self.port, self._size, is_master=True, timeout=timedelta(seconds=MEET_SECONDS),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._group: Any = None

    def meet(self) -> None:
        """Waits for the others, who do what SGLang's `init_custom_process_group` does with the same store.

        Raises:
            RuntimeError: They do not come within a minute.
        """
        store = c10d.PrefixStore(self._name, self._store)
        with _interface_of(self.address):
            self._group, _ = c10d._new_process_group_helper(
                self._size, 0, [], c10d.Backend(self._backend), store,
                group_name=c10d.GroupName(self._name), timeout=timedelta(seconds=MEET_SECONDS),
            )  # fmt: skip
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._size)}

    def send(self, tensor: Tensor, seconds: float) -> Any:
        """Begins to broadcast a tensor, and returns what to `wait` for."""
        return self._group.broadcast(tensor, 0, timedelta(seconds=seconds))

    def abandon(self) -> None:
        """Gives up what is being sent. The group stays in torch's table: to destroy it is to wait until its time is
        over, with gloo, which knows no other end.
        """
        self._group.abort()

    def close(self) -> None:
        """Leaves the group, when all has been received."""
        group, self._group = self._group, None
        if group is not None:
            c10d.destroy_process_group(group)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _own_address(host: str) -> str:
    """The address of the interface from which a host is reached; loopback for a server on this machine."""
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


@contextmanager
def _interface_of(address: str) -> Iterator[None]:
    """Has gloo listen on loopback if the server is there, unless the user has chosen an interface."""
    if not (address.startswith("127.") or address == "::1") or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
