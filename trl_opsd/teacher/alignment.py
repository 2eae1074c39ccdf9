"""Probes whether a user's teacher returns the states that predict the tokens, and not those one token further.

B rows · C completion tokens · n tokens of one completion · H hidden width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.types import Rollout, TeacherTargets

logger = get_logger(__name__)

_CHANGED = 0.05
"""Least difference of states of different inputs, relative to the spread within a row; rounding stays below."""
_QUOTED = 200
"""Characters quoted of an error."""
_CALLED_AGAIN = (
    "(For this check the teacher was called a second time, for two rows: one that replays recorded answers in order is "
    "now ahead by one.)"
)


def prove_alignment(
    read: Callable[[Rollout], TeacherTargets], rollout: Rollout, targets: TeacherTargets, where: str
) -> None:
    """Refuses targets that have read the token they should predict; `where` is their method, for messages."""
    # A teacher may be collective, so every process calls it, also without the three such tokens that a verdict needs.
    row = int(rollout.counts.sum(-1).argmax())
    places = rollout.counts[row].nonzero().flatten().tolist()
    up_to_last = rollout.completion_mask[row, : places[-1] + 1 if places else 0].nonzero().flatten().tolist()
    # A row is scored again beside a copy with another token before its last one. Only the last target may differ: an
    # earlier difference means that states are shifted towards later tokens, none that they are shifted back.
    pair = _with_another_token(rollout.select([row, row]), up_to_last)
    try:
        with preserved_rng(rollout.completion_ids.device):
            hidden_2CH = read(pair).hidden
    except Exception as error:  # a teacher that looks targets up has none for the changed row
        logger.warning(
            f"`{where}` could not read a row in which one token was changed, {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')[:_QUOTED]}. So it is not known whether its targets are those of "
            f"the tokens that they are compared at. {_CALLED_AGAIN}"
        )
        return
    read_nH, changed_nH = hidden_2CH[:, places].float()
    # Nothing can be concluded without three tokens, without another token, or from NaNs, which other checks report.
    if len(places) < 3 or torch.equal(*pair.completion_ids) or not hidden_2CH[:, places].isfinite().all():
        return
    if _differ(read_nH, targets.of(row, torch.tensor(places)).to(read_nH)).any():
        logger.warning(
            f"`{where}` returned other states for a row when it reads the row again, without the others of its batch: "
            "are the rows in order, is the model in eval mode, and does padding leave it unchanged? "
            f"{_CALLED_AGAIN}"
        )
        return
    differ = _differ(read_nH, changed_nH).tolist()
    first = differ.index(True) if any(differ) else None
    if first is None:
        logger.warning(
            f"`{where}` returned states that do not depend on the token right before the one that they predict: are "
            "they one token behind, or do they come from a cache, whatever the completion is? The first target is the "
            f"state at the last token of the prompt. {_CALLED_AGAIN}"
        )
    elif first == 0:
        logger.warning(
            f"`{where}` returned states of which the first already depends on later tokens of the completion, maybe on "
            "the one that it predicts. If the teacher is to judge with hindsight, there is nothing to do; this is said "
            f"once. {_CALLED_AGAIN}"
        )
    elif too_far := len(places) - 1 - first:
        raise ValueError(
            f"`{where}` returned states that are {too_far} token{'s' * (too_far > 1)} too far on: they have read the "
            "token that they should predict. Of a model's states after P prompt tokens and C completion tokens return "
            f"`hidden[:, P - 1 : -1]`; the student was not changed. {_CALLED_AGAIN}"
        )


def _with_another_token(pair: Rollout, places: list[int]) -> Rollout:
    """Replaces the last but one of these tokens in the second row by another token of the row, if it has another."""
    ids_2C = pair.completion_ids.clone()
    last_but_one = places[-2:][:1]
    known = [*ids_2C[1, places].tolist(), *pair.prompt_lists()[1]]
    ids_2C[1, last_but_one] = next((one for one in known if one not in ids_2C[1, last_but_one]), 0)
    return replace(pair, completion_ids=ids_2C)


def _differ(one_nH: Tensor, other_nH: Tensor) -> Tensor:
    """[n], whether states differ by more than rounding."""
    apart = (one_nH - one_nH[:1]).abs().max()
    return (one_nH - other_nH).abs().amax(-1) > _CHANGED * apart
