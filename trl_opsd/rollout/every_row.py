"""Shows logits processors and stopping criteria the whole batch, also after rows have left it.

Whatever processes logits may remember something of each row by its place: its prompt, the length of its padding, the
context of a watermark. Which do changes between versions of `transformers`, and a model may bring its own. So only
those known to read nothing but scores meet the rows that are left; others meet all rows, padded since they left.

B rows to begin with · n places in the batch now · L tokens so far · V logits
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


class OnlyKnown(LogitsProcessor):
    """Leaves no chance to ids that no tokenizer knows, as heads are padded to round numbers of rows, nor to those that
    stand for an image.
    """

    def __init__(self, vocabulary: int, placeholders: Collection[int] = ()) -> None:
        self._vocabulary, self._placeholders = vocabulary, list(placeholders)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self._vocabulary :] = -torch.inf
        scores[:, self._placeholders] = -torch.inf
        return scores


_READ_SCORES_ALONE = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    OnlyKnown,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}
"""Functions of one row of scores, and the ones that sort a vocabulary: worth sparing the rows that have left."""


def process(processors: LogitsProcessorList, ids_BL: Tensor, rows_n: Tensor, scores_nV: Tensor) -> Tensor:
    """What the processors make of the scores of the rows that are left.

    Args:
        processors ([`~transformers.LogitsProcessorList`]):
            Applied in their order.
        ids_BL (`torch.Tensor`):
            Every row, padded where it has left.
        rows_n (`torch.Tensor`):
            The row that each place holds.
        scores_nV (`torch.Tensor`):
            The scores of each place; may be written over.

    Returns:
        `torch.Tensor`: `[n, V]`.
    """
    everyone_is_here = len(rows_n) == len(ids_BL)
    for alone, group in groupby(processors, key=lambda processor: type(processor) in _READ_SCORES_ALONE):
        some = LogitsProcessorList(group)
        if everyone_is_here:
            scores_nV = some(ids_BL, scores_nV)
        elif alone:
            scores_nV = some(ids_BL[rows_n], scores_nV)
        else:
            scores_BV = scores_nV.new_zeros(len(ids_BL), scores_nV.size(-1))
            scores_nV = some(ids_BL, scores_BV.index_copy_(0, rows_n, scores_nV))[rows_n]
    return scores_nV


def ended(criteria: StoppingCriteriaList, ids_BL: Tensor, rows_n: Tensor) -> Tensor:
    """`[n]`, whether the row at each place ends with its last token."""
    ended_B: Tensor = criteria(ids_BL, None)
    return ended_B if len(rows_n) == len(ids_BL) else ended_B[rows_n]
