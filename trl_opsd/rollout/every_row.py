"""Calls logits processors and stopping criteria with the whole batch, also after rows have left it.

A logits processor may keep state for each row by its index: its prompt, the length of its padding, the context of a
watermark. Which do so changes between versions of `transformers`, and a model may bring its own. So only those known
to read nothing but scores are called with the remaining rows; others get all rows, padded since they left.

B rows at the start · n places in the batch now · L tokens so far · V logits
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class KnownTokensOnly(LogitsProcessor):
    """Masks ids beyond the vocabulary, which heads padded to round sizes have, and placeholders for images."""

    def __init__(self, vocabulary: int, placeholders: Collection[int] = ()) -> None:
        self._vocabulary, self._placeholders = vocabulary, torch.tensor([*placeholders], dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self._vocabulary :].fill_(-torch.inf)
        self._placeholders = self._placeholders.to(scores.device)  # once: a copy waits for the device
        return scores.index_fill_(1, self._placeholders, -torch.inf)


_SCORES_ONLY = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    KnownTokensOnly,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}
"""Functions of one row of scores. Those that sort the vocabulary are expensive: skipping finished rows pays."""


def process(processors: LogitsProcessorList, ids_BL: Tensor, rows_n: Tensor, scores_nV: Tensor) -> Tensor:
    """Applies the processors, in order, to the scores of the remaining rows, which may be overwritten."""
    is_complete = len(rows_n) == len(ids_BL)
    for scores_only, group in groupby(processors, key=lambda processor: type(processor) in _SCORES_ONLY):
        some = LogitsProcessorList(group)
        if is_complete:
            scores_nV = some(ids_BL, scores_nV)
        elif scores_only:
            scores_nV = some(ids_BL[rows_n], scores_nV)
        else:
            # These may index their state by row, so each row has to be where it was at the start.
            scores_BV = scores_nV.new_zeros(len(ids_BL), scores_nV.size(-1))
            scores_nV = some(ids_BL, scores_BV.index_copy_(0, rows_n, scores_nV))[rows_n]
    return scores_nV


def ended(criteria: StoppingCriteriaList, ids_BL: Tensor, rows_n: Tensor) -> Tensor:
    """`[n]`, whether the row at each place ends with its last token."""
    ended_B: Tensor = criteria(ids_BL, None)
    return ended_B if len(rows_n) == len(ids_BL) else ended_B[rows_n]
