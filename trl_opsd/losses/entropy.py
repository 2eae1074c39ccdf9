"""The entropy of one model at each token, over tiles of a few tokens, in one product with its head.

N tokens in the loss · C tokens of a tile · R rows of a block · V vocabulary size
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.losses.streamed import _STRIDE_ELEMENTS, _block_rows, _product_dtype, _Side, _spans, memory_of, tile_of
from trl_opsd.types import LazyLogits


@torch.no_grad()
def streamed_entropy(model: LazyLogits, chunk_tokens: int | None = None, vocabulary: int | None = None) -> Tensor:
    """A model's entropy at each token, [N], nats, float32, without its logits in full and without a gradient.

    It is the `student_entropy` of [`~losses.streamed_divergence`] up to rounding, for one product with a head instead
    of two; `chunk_tokens` and `vocabulary` are those of that function.
    """
    side = _Side.of(model, _product_dtype(model), vocabulary)
    tokens, width, device = len(side.hidden_NH), len(side.weight_VH), side.hidden_NH.device
    stride = -(-width // _STRIDE_ELEMENTS) * _STRIDE_ELEMENTS
    tile_tokens = max(1, min(tokens, chunk_tokens or tile_of(tokens, 4 * stride, memory_of(device))))
    tile_CV = torch.empty(tile_tokens, stride, device=device)[:, :width]
    entropy_N = torch.empty(tokens, device=device)
    for tile in _spans(0, tokens, tile_tokens):
        side.project_(tile_CV, tile)
        for rows in _spans(tile.start, tile.stop, _block_rows(tile_CV)):
            logits_RV = tile_CV[rows.start - tile.start : rows.stop - tile.start]
            side.finish(logits_RV)
            entropy_N[rows] = _entropy_(logits_RV)
    return entropy_N


def _entropy_(logits_RV: Tensor) -> Tensor:
    """[R]; overwrites the logits."""
    logits_RV.sub_(logits_RV.amax(-1, keepdim=True))
    probs_RV = logits_RV.exp()
    total_R = probs_RV.sum(-1)
    return total_R.log() - probs_RV.mul_(logits_RV).sum(-1) / total_R
