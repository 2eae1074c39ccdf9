"""Reads a generation batch with a causal language model, a few rows at a time, each row once; nothing keeps a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from trl_opsd.backbone import completion_hidden
from trl_opsd.types import Rollout


def read(model: Any, rollout: Rollout, rows_per_pass: int, device: torch.device, progress: bool = False) -> Tensor:
    """The last hidden state at the position that predicts each completion token.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A causal language model.
        rollout ([`~types.Rollout`]):
            B rows of at most C completion tokens.
        rows_per_pass (`int`):
            Rows read in one forward pass.
        device (`torch.device`):
            Where the model expects its inputs.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.

    Returns:
        `torch.Tensor`: `[B, C, H]`, on the rollout's device.
    """
    chunks = list(rollout.chunks(rows_per_pass))
    passes = tqdm(chunks, desc="teach", unit="pass", delay=5, leave=False, disable=not progress)
    hidden_BCH: Tensor | None = None
    start = 0
    with torch.no_grad():
        for chunk in passes:
            chunk_hidden = completion_hidden(model, chunk.to(device))
            if hidden_BCH is None:
                shape = (*rollout.completion_ids.shape, chunk_hidden.size(-1))
                hidden_BCH = chunk_hidden.new_empty(shape, device=rollout.completion_ids.device)
            # Copied, because the chunk is a view that would keep the hidden states of the prompts alive.
            hidden_BCH[start : start + len(chunk_hidden)] = chunk_hidden
            start += len(chunk_hidden)
    assert hidden_BCH is not None, "a generation batch has rows"
    return hidden_BCH
