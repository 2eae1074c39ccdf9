"""A process group of this process and the workers of a server, separate from those of the launch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from accelerate.utils import patch_environment
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

MEET_SECONDS = 60.0
"""Both sides run and know the address: they meet at once, or cannot reach each other."""


class WeightGroup:
    """A group in which this process has rank 0, and broadcasts to the server's `workers`."""

    def __init__(self, name: str, host: str, workers: int, backend: str) -> None:
        self._name, self._size, self._backend = name, 1 + workers, backend
        self.address = _own_address(host)  # by which the server can reach this process
        # Bound here, since a `TCPStore` would listen on all interfaces.
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.create_server((self.address, 0), family=family)
        self.port: int = listener.getsockname()[1]
        """Port of the rendezvous, which listens on the interface of `address` only."""
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            self.address, self.port, self._size, is_master=True, timeout=timedelta(seconds=MEET_SECONDS),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._group: Any = None

    def meet(self) -> None:
        """Waits up to a minute for the others, who call SGLang's `init_custom_process_group` with the same store."""
        # `init_process_group` can only make the launch's default group, so this one is built from torch's internals.
        store = c10d.PrefixStore(self._name, self._store)
        # gloo listens on a public interface unless it is named one.
        is_loopback = self.address.startswith("127.") or self.address == "::1"
        interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if is_loopback else {}
        with patch_environment(**interface):
            self._group, _ = c10d._new_process_group_helper(
                self._size, 0, [], c10d.Backend(self._backend), store,
                group_name=c10d.GroupName(self._name), timeout=timedelta(seconds=MEET_SECONDS),
            )  # fmt: skip
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._size)}

    def send(self, tensor: Tensor, seconds: float) -> Any:
        """Starts to broadcast a tensor, and returns the work to `wait` for."""
        return self._group.broadcast(tensor, 0, timedelta(seconds=seconds))

    def abandon(self) -> None:
        """Aborts what is being sent."""
        # Not destroyed, and so left in torch's table: with gloo, destroying waits until its timeout.
        self._group.abort()

    def close(self) -> None:
        """Leaves the group after everything was received."""
        group, self._group = self._group, None
        if group is not None:
            c10d.destroy_process_group(group)


def _own_address(host: str) -> str:
    """The address of the interface from which a host is reached; loopback for a server on this machine."""
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # a datagram socket sends nothing
        return str(probe.getsockname()[0])
