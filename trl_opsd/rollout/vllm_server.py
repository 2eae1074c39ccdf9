"""Generates with a vLLM server: which options and weights it is sent."""

from __future__ import annotations

from typing import Any

from trl_opsd._compat.vllm.architectures import HEAD, may_have_head
from trl_opsd.config import OPSDConfig
from trl_opsd.rollout import server_client
from trl_opsd.rollout.asking import Asking
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.server_client import VLLM, ServerClient
from trl_opsd.rollout.vllm_sampling import request_options
from trl_opsd.rollout.weight_sync import weights_of
from trl_opsd.types import Weight

_MIN_BIAS = -100.0
"""The lowest logit bias that a server accepts."""


class VLLMServerRollout(ServedRollout):
    """Generates with a separately started vLLM server (docs/rollouts.md); options are checked before models load."""

    def __init__(self, args: OPSDConfig) -> None:
        _check_options(args)
        super().__init__(args, VLLM, ServerClient, Asking)

    def __str__(self) -> str:
        args = self._args
        return f"a vLLM server at {args.vllm_server_base_url or f'{args.vllm_server_host}:{args.vllm_server_port}'}"

    def _sampled(self, end_ids: list[int], masked: list[str]) -> dict[str, Any]:
        options = request_options(self._args, end_ids)
        return {**options, "logit_bias": {**(options.get("logit_bias") or {}), **dict.fromkeys(masked, _MIN_BIAS)}}

    def _weights(self) -> list[Weight]:
        model = self._trainer.model
        has_head = may_have_head(model.config)
        return [weight for weight in weights_of(model) if has_head or weight.name != HEAD]


def _check_options(args: OPSDConfig) -> None:
    if args.vllm_weight_sync == "adapter":
        raise ValueError(
            "`vllm_weight_sync='adapter'` with `vllm_mode='server'`: a server takes whole weights only: use 'auto'."
        )
    if args.vllm_enable_sleep_mode:
        raise ValueError(
            "`vllm_enable_sleep_mode=True` with `vllm_mode='server'`: a server has a device of its own and does not "
            "sleep: set it to False."
        )
    request_options(args, end_ids=[])
    if args.device.type != server_client.SENDS_FROM:
        raise ValueError(
            f"`vllm_mode='server'` on the device '{args.device}': weights are sent to a vLLM server with NCCL, from a "
            "CUDA device alone. Set `vllm_mode='colocate'` or `use_vllm=False`, or take an SGLang server, by "
            "`sglang_server_url`."
        )
