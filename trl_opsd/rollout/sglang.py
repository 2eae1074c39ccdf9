"""Generates with an SGLang server: which options and weights it is sent."""

from __future__ import annotations

from typing import Any

from trl_opsd.config import OPSDConfig
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.sglang_asking import SGLangAsking
from trl_opsd.rollout.sglang_client import SGLANG, SGLangClient
from trl_opsd.rollout.sglang_options import sampling_params
from trl_opsd.rollout.weight_sync import weights_of
from trl_opsd.types import Weight

_MIN_BIAS = -1e9
"""The bias of an id that is never sampled; JSON has no infinity."""


class SGLangRollout(ServedRollout):
    """Generates with a separately started SGLang server (docs/rollouts.md); options are checked before models load."""

    def __init__(self, args: OPSDConfig) -> None:
        sampling_params(args, end_ids=[])
        super().__init__(args, SGLANG, SGLangClient, SGLangAsking)

    def __str__(self) -> str:
        return f"an SGLang server at {self._args.sglang_server_url}"

    def _sampled(self, end_ids: list[int], masked: list[str]) -> dict[str, Any]:
        options = sampling_params(self._args, end_ids)
        bias = {**(options.get("logit_bias") or {}), **dict.fromkeys(masked, _MIN_BIAS)}
        return {**options, "logit_bias": bias} if bias else options

    def _weights(self) -> list[Weight]:
        return weights_of(self._trainer.model)
