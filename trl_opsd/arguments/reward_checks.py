"""Checks rewards against the options and the rows, and makes functions of them once the student is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger

from trl_opsd.config import OPSDConfig
from trl_opsd.data.datasets import AnyDataset, columns_of
from trl_opsd.models.checks import whole_checkpoint
from trl_opsd.rewards.functions import Rewards
from trl_opsd.rewards.given import Given, check_columns
from trl_opsd.rewards.model import RewardModel, loaded_model

__all__ = ["build_rewards", "check_rows_of_rewards"]

logger = get_logger(__name__)


def check_rows_of_rewards(
    rewards: Sequence[Given],
    datasets: Mapping[str, AnyDataset | None],
    args: OPSDConfig,
    row_columns: Collection[str],
    reads_solutions: bool,
) -> None:
    """Checks that functions can be called for the rows that are evaluated, and learned where they are called then."""
    known: dict[str, Collection[str] | None] = {}
    for where, dataset in datasets.items():
        if dataset is None or (where == "train_dataset" and not args.reward_weight):
            continue
        columns = columns_of(dataset)
        if columns is not None:
            seen = {one for one in columns if one in row_columns or not args.remove_unused_columns}
            columns = [*seen, *(("solution",) if reads_solutions and "privileged_context" in seen else ())]
        known[where] = columns
    check_columns(rewards, known)


def warn_of_evaluations_only(rewards: Sequence[Given], args: OPSDConfig, train_dataset: Any) -> None:
    """Says that a training does not call reward functions, if no evaluation of its does."""
    if rewards and not args.reward_weight and train_dataset is not None and args.eval_strategy == "no":
        logger.warning(
            "`reward_funcs` are called in evaluations only, and this training has none: set `reward_weight` above 0 to "
            "learn from rewards, or `eval_strategy` to have them reported."
        )


def build_rewards(
    rewards: Sequence[Given], args: OPSDConfig, template: Mapping[str, Any], device: torch.device
) -> Rewards | None:
    """Functions of all rewards, with their models loaded; `None` if there are none."""
    if not rewards:
        return None
    functions = {}
    for number, one in enumerate(rewards):
        function = one.source
        if one.is_model:
            assert one.tokenizer is not None, "it was loaded with the arguments"
            with whole_checkpoint(f"reward_funcs[{number}]"):
                model = loaded_model(function) if isinstance(function, str) else function
            placed = model if getattr(model, "hf_device_map", None) else model.to(device)
            function = RewardModel(placed, one.tokenizer, template, args.per_device_train_batch_size)
        functions[one.name] = function
    weights = torch.tensor(args.reward_weights or [1.0] * len(functions), dtype=torch.float32)
    return Rewards(functions=functions, weights=weights)
