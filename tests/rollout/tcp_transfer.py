"""Sends weights to a vLLM server over TCP where there is no NCCL; both sides import it, all else is unchanged.

The server loads it by `--worker-extension-cls tcp_transfer.Extension`, the trainer calls [`use`].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class TCPTransferEngine(NCCLWeightTransferEngine):
    """vLLM's own engine, receiving from a store instead of over NCCL; it prepares and finishes a reload as usual."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.group = StatelessProcessGroup.create(init_info.master_address, init_info.master_port, 1, 2)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM then waits for an accelerator

    def receive_weights(self, update_info: Any) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = self.group.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)), src=0)
            self.model.load_weights([(name, weight)])


class Extension:
    """Empty: naming it makes the server import this file."""


WeightTransferEngineFactory.register_engine("tcp", TCPTransferEngine)


class _Endpoint:
    """The trainer's side, in place of vLLM's communicator."""

    def __init__(self, init_info: dict[str, Any]) -> None:
        met_at.append(init_info["master_address"])
        self.group = StatelessProcessGroup.create(init_info["master_address"], init_info["master_port"], 0, 2)


met_at: list[str] = []
"""The addresses where server and trainer met."""


def _send(
    iterator: Iterator[tuple[str, Tensor]], group: _Endpoint, src: int, post_iter_func: Callable[[Any], Tensor]
) -> None:
    for item in iterator:
        group.group.broadcast(post_iter_func(item), src)


def use(patch: pytest.MonkeyPatch) -> None:
    """Makes TRL's client send over TCP, from a CPU."""
    from trl.generation import vllm_client

    opens = vllm_client.VLLMClient.init_communicator
    patch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: opens(self, "cuda"))
    patch.setattr(vllm_client, "open_trainer_endpoint", _Endpoint)
    patch.setattr(vllm_client, "packed_nccl_broadcast_producer", _send)
