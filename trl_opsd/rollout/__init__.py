"""Rollouts: token ids of prompts in, token ids of completions out."""

from trl_opsd.rollout.base import RolloutBackend
from trl_opsd.rollout.fixed import FixedRollout
from trl_opsd.rollout.hf import HFRollout

__all__ = ["FixedRollout", "HFRollout", "RolloutBackend"]
