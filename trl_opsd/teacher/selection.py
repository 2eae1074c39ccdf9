"""Selects the tokens of each row with the highest scores, so that the loss's products are computed for them only.

B rows · C completion tokens · N tokens in the loss · K of them that are selected
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from trl_opsd.teacher.routed import Share


def best(share: Share, scores_N: Tensor) -> Share:
    """The tokens of each row with the highest scores, of equal ones the first, without waiting for a device."""
    device, (rows, columns) = scores_N.device, share.weights_BC.shape
    assert share.highest_K is not None, "made with a selection"
    places_N = share.places_N.to(device, non_blocking=True)
    # A score that is NaN or infinite sorts first, so that the fault reaches the loss.
    by_score_N = scores_N.argsort(descending=True, stable=True)
    # Sorted by score and then stably by row, each row's highest come first, at indices known on the host.
    by_row_N = by_score_N[(places_N[by_score_N] // columns).argsort(stable=True)]
    best_K = by_row_N[share.highest_K.to(device, non_blocking=True)].sort().values
    places_K, total_B = places_N[best_K], share.weights_BC.sum(1).to(device, non_blocking=True)
    weights_K = share.weights_BC.flatten()[share.places_N].to(device, non_blocking=True)[best_K]
    rows_K = places_K // columns
    # The selected weights keep their ratios and are scaled to the sum of all weights of their row.
    kept_B = weights_K.new_zeros(rows).index_add(0, rows_K, weights_K)
    weights_K = weights_K * (total_B / kept_B)[rows_K]
    weights_BC = weights_K.new_zeros(rows * columns).index_copy(0, places_K, weights_K).view(rows, columns)
    return replace(
        share,
        places_N=places_K,
        weights_BC=weights_BC,
        weights_N=weights_K,
        kept_N=best_K if share.kept_N is None else share.kept_N.to(device, non_blocking=True)[best_K],
        highest_K=None,
    )
