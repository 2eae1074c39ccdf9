"""The methods of TRL's loop that we override have the signatures we expect, and our overrides are used."""

from __future__ import annotations

import functools
import inspect
import operator

import pytest
import tiny
import torch
from transformers import Trainer
from trl import DistillationTrainer

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd.loop import (
    ahead,
    dealing,
    evaluation,
    generations,
    hooks,
    logged,
    saving,
    steps,
    upstream_fixes,
)
from trl_opsd.loop.ahead import Ahead
from trl_opsd.loop.dealing import Dealing
from trl_opsd.loop.evaluation import Evaluations
from trl_opsd.loop.generations import Generations
from trl_opsd.loop.hooks import TrainerHooks
from trl_opsd.loop.logged import Logged
from trl_opsd.loop.saving import SafeCheckpoints
from trl_opsd.loop.steps import GuardedSteps
from trl_opsd.loop.upstream_fixes import UpstreamFixes

pytestmark = pytest.mark.quick

TABLES = (
    (DistillationTrainer, TrainerHooks, hooks.SEAMS),
