"""Proves before the first rollout that a student reads in training mode too, and that gradients reach its layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from trl_opsd._compat.shards import is_split
from trl_opsd.backbone import CANNOT_RUN, Run, call, completion_hidden
from trl_opsd.padding import Reading
from trl_opsd.types import OutputHead, Rollout


def prove_training(model: Any, reading: Reading, run: Run | None = None) -> None:
    """Runs one short row as training will; everything else is proved in eval mode, in which some families differ.

    The caller preserves the random state, of which dropout takes some.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, on eight tokens.
        reading ([`~padding.Reading`]):
            How it reads rows.
        run (`Callable`, *optional*):
            `run(function, *args)` equals `function(model, *args)`, for a model that cannot be called as it is.

    Raises:
        ValueError: It cannot be run in training mode; or no gradient passes through it, which is not looked at where it
            is split over processes.
    """
    run = run or partial(call, model)
    whole = not any(map(is_split, model.parameters()))  # else a graph without a backward pass would disturb its hooks
    was_training = model.training
    model.train()
    try:
        with torch.set_grad_enabled(whole):
            hidden_BCH = run(completion_hidden, _row(OutputHead.of(model)), reading)
    except (ValueError, *CANNOT_RUN) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"The student ({type(model).__name__}) cannot read eight tokens in training mode, {type(error).__name__}: "
            f"{error}. In eval mode it can: take another model as the student, or use this one as a teacher."
        ) from error
    finally:
        model.train(was_training)
    if whole and _learns_below_its_head(model) and not hidden_BCH.requires_grad:
        raise ValueError(
            f"No gradient passes through the student ({type(model).__name__}), although parameters below its head "
            "require one, so these would stay as they are: load it without quantisation for inference, without "
            "`torch.no_grad` in its forward, and with `gradient_checkpointing_kwargs={'use_reentrant': False}`."
        )


def _learns_below_its_head(model: Any) -> bool:
    of_head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    return any(one.requires_grad and id(one) not in of_head for one in model.parameters())


def _row(head: OutputHead) -> Rollout:
    """Three tokens of a prompt and five of a completion, spread over the vocabulary."""
    ids_1L = torch.arange(8, device=head.weight.device).mul(head.shape[0] // 8)[None]
    ones_1L = torch.ones_like(ids_1L)
    return Rollout(
        prompt_ids=ids_1L[:, :3],
        prompt_mask=ones_1L[:, :3],
        completion_ids=ids_1L[:, 3:],
        completion_mask=ones_1L[:, 3:],
        loss_mask=ones_1L[:, 3:],
    )
