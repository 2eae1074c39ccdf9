"""Proves before the first rollout that a student reads in training mode too, and that gradients reach its layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainingArguments

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split
from trl_opsd.models.backbone import Run, call, completion_hidden
from trl_opsd.models.head import shape_of
from trl_opsd.models.probing import CANNOT_RUN
from trl_opsd.types import OutputHead, Rollout


def prove_training(model: CausalLM, run: Run | None = None) -> list[str]:
    """Runs one short row as training will; everything else is proved in eval mode, in which some families differ.

    The caller preserves the random state, of which dropout takes some.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, on eight tokens.
        run (`Callable`, *optional*):
            `run(function, *args)` equals `function(model, *args)`, for a model that cannot be called as it is.

    Returns:
        `list[str]`: names of parameters below the head that are to be trained and that text does not reach, such as
        those of a vision tower. None where it is split over processes, which makes nothing of it.

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
            hidden_BCH = run(completion_hidden, _row(OutputHead.of(model)))
    except (ValueError, *CANNOT_RUN) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"The student ({type(model).__name__}) cannot read eight tokens in training mode, {type(error).__name__}: "
            f"{error}. In eval mode it can: take another model as the student, or use this one as a teacher."
        ) from error
    finally:
        model.train(was_training)
    if not whole:
        return []
    of_head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    learns = {name: id(one) for name, one in model.named_parameters() if one.requires_grad and id(one) not in of_head}
    if learns and not hidden_BCH.requires_grad:
        raise ValueError(
            f"No gradient passes through the student ({type(model).__name__}), although parameters below its head "
            "require one, so these would stay as they are: load it without quantisation for inference, without "
            "`torch.no_grad` in its forward, and with `gradient_checkpointing_kwargs={'use_reentrant': False}`."
        )
    reached = _reached(hidden_BCH)
    return [name for name, number in learns.items() if number not in reached]


def heed_unreached(names: Sequence[str], args: TrainingArguments, accelerator: Accelerator) -> None:
    """Has data parallelism look for parameters without gradients, where it would wait for all of them.

    Args:
        names (`Sequence[str]`):
            As [`prove_training`] returned them.
        args ([`~transformers.TrainingArguments`]):
            `ddp_find_unused_parameters` is set where it was not.
        accelerator ([`~accelerate.Accelerator`]):
            Wraps the student later.
    """
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if names and args.ddp_find_unused_parameters is None and not reentrant:
        args.ddp_find_unused_parameters = accelerator.ddp_handler.find_unused_parameters = True


def _reached(hidden_BCH: Tensor) -> set[int]:
    """Numbers of the tensors that the gradient of a hidden state would be added to."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes: list[Any] = [hidden_BCH.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        nodes += [following for following, _ in node.next_functions]
    return found


def _row(head: OutputHead) -> Rollout:
    """Three tokens of a prompt and five of a completion, spread over the vocabulary."""
    ids_1L = torch.arange(8, device=head.weight.device).mul(shape_of(head)[0] // 8)[None]
    ones_1L = torch.ones_like(ids_1L)
    return Rollout(
        prompt_ids=ids_1L[:, :3],
        prompt_mask=ones_1L[:, :3],
        completion_ids=ids_1L[:, 3:],
        completion_mask=ones_1L[:, 3:],
        weights=ones_1L[:, 3:].float(),
    )
