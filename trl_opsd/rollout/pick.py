"""Which backend writes, by what the user gave and what the options say."""

from __future__ import annotations

from trl_opsd.config import OPSDConfig
from trl_opsd.rollout.base import RolloutBackend
from trl_opsd.rollout.hf import HFRollout


def picked(rollout: RolloutBackend | None, args: OPSDConfig) -> RolloutBackend:
    """The backend that was given, or vLLM with `use_vllm=True`, or `generate`.

    Raises:
        TypeError: What was given is no backend.
        ValueError: vLLM is not there, or an option cannot work with it.
    """
    if rollout is None:
        if args.use_vllm:  # both import vLLM, which takes seconds and may be absent
            if args.vllm_mode == "server":
                from trl_opsd.rollout.vllm_server import VLLMServerRollout

                return VLLMServerRollout(args)
            from trl_opsd.rollout.vllm import VLLMRollout

            return VLLMRollout(args)
        return HFRollout()
    if not isinstance(rollout, RolloutBackend):
        raise TypeError(f"`rollout` is a {type(rollout).__name__}: expected a `trl_opsd.RolloutBackend`.")
    return rollout
