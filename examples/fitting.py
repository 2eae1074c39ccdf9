"""Next-token training of a small model from scratch, in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tqdm import trange
from transformers import PreTrainedModel


def fit(
    model: PreTrainedModel, batches: Iterator[dict[str, torch.Tensor]], *, steps: int, learning_rate: float = 2e-3
) -> None:
    """Trains with AdamW, a warm-up and a linear decay.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model, which is changed.
        batches (`Iterator[dict[str, torch.Tensor]]`):
            What it is called with; `labels` among it.
        steps (`int`):
            Optimizer steps.
        learning_rate (`float`, *optional*, defaults to 2e-3):
            At its highest.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1 - step / steps))
    model.train()
    for step in (bar := trange(steps, unit="step")):
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels` of rows of both, [B, L], padded on the right, where nothing is learned."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), pad)
    labels = torch.full_like(ids, -100)
    for row, (tokens, theirs) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.tensor(theirs)
    return {"input_ids": ids, "labels": labels}
