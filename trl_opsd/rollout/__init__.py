"""Rollouts: token ids of prompts in, token ids of completions out."""

from __future__ import annotations

from trl_opsd.config import OPSDConfig
from trl_opsd.rollout.base import FixedRollout, RolloutBackend
from trl_opsd.rollout.hf import HFRollout

__all__ = ["FixedRollout", "HFRollout", "RolloutBackend"]


def chosen_rollout(rollout: RolloutBackend | None, args: OPSDConfig) -> RolloutBackend:
    """The backend that was passed, else vLLM with `use_vllm=True`, SGLang with `sglang_server_url`, or `generate`."""
    chosen = {
        f"`rollout`, a {type(rollout).__name__}": rollout is not None,
        "vLLM by `use_vllm=True`": args.use_vllm,
        "SGLang by `sglang_server_url`": args.sglang_server_url is not None,
    }
    if len(several := [name for name, is_chosen in chosen.items() if is_chosen]) > 1:
        raise ValueError(f"There are two rollouts: {' and '.join(several)}: remove one of them.")
    if rollout is not None:
        return rollout
    # Engines are imported where they are chosen: vLLM takes seconds, and any of them may be absent.
    if args.use_vllm and args.vllm_mode == "server":
        from trl_opsd.rollout.served import ServedRollout
        from trl_opsd.rollout.vllm_server import VLLMServer

        return ServedRollout(args, VLLMServer)
    if args.use_vllm:
        from trl_opsd.rollout.vllm import VLLMRollout

        return VLLMRollout(args)
    if args.sglang_server_url is not None:
        from trl_opsd.rollout.served import ServedRollout
        from trl_opsd.rollout.sglang import SGLangServer

        return ServedRollout(args, SGLangServer)
    return HFRollout()
