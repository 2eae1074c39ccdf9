"""Probes before the first rollout that a student runs in training mode and that gradients reach its layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainingArguments

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split
from trl_opsd._compat.transformers import CHECKPOINTING
from trl_opsd.models.backbone import Run, call, completion_hidden
from trl_opsd.models.head import shape_of
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.probing import CANNOT_RUN
from trl_opsd.types import OutputHead, Rollout


def prove_training(model: CausalLM, run: Run | None = None) -> list[str]:
    """Refuses a student that fails in training mode or passes no gradient; names parameters out of reach."""
    # Dropout advances the random state, which the caller preserves.
    run = run or partial(call, model)
    # Other probes run in eval mode, in which some families differ. Of a sharded student no gradient is probed.
    whole = not any(map(is_split, model.parameters()))  # a graph without a backward pass disturbs hooks of shards
    try:
        with preserved_mode(model), torch.set_grad_enabled(whole), catch_warnings():
            if not whole:  # without gradients, as is meant here
                filterwarnings("ignore", "None of the inputs have requires_grad=True")
            model.train()
            hidden_BCH = run(completion_hidden, _row(OutputHead.of(model)))
    except (ValueError, *CANNOT_RUN) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"The student ({type(model).__name__}) cannot read eight tokens in training mode, {type(error).__name__}: "
            f"{error}. In eval mode it can: use another model as the student, or this one as a teacher."
        ) from error
    if not whole:
        return []
    of_head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    learns = {name: id(one) for name, one in model.named_parameters() if one.requires_grad and id(one) not in of_head}
    if learns and not hidden_BCH.requires_grad:
        raise ValueError(
            f"No gradient passes through the student ({type(model).__name__}), although parameters below its head "
            "require one, so they would never be updated: load it without quantisation for inference, without "
            f"`torch.no_grad` in its forward, and with `{CHECKPOINTING}_kwargs={{'use_reentrant': False}}`."
        )
    # Parameters outside the graph, such as a vision tower's, would make DDP wait for their gradients.
    reached = _reached(hidden_BCH)
    return [name for name, number in learns.items() if number not in reached]


def set_find_unused_parameters(names: Sequence[str], args: TrainingArguments, accelerator: Accelerator) -> None:
    """Sets DDP's `find_unused_parameters` where parameters get no gradient (it would hang), unless the user set it."""
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if names and args.ddp_find_unused_parameters is None and not reentrant:
        args.ddp_find_unused_parameters = accelerator.ddp_handler.find_unused_parameters = True


def _reached(hidden_BCH: Tensor) -> set[int]:
    """The `id` of every leaf tensor in the autograd graph of a hidden state."""
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
    """A row of three prompt and five completion tokens, spread over the vocabulary."""
    ids_1L = torch.arange(8, device=head.weight.device).mul(shape_of(head)[0] // 8)[None]
    ones_1L = torch.ones_like(ids_1L)
    return Rollout(
        prompt_ids=ids_1L[:, :3],
        prompt_mask=ones_1L[:, :3],
        completion_ids=ids_1L[:, 3:],
        completion_mask=ones_1L[:, 3:],
        weights=ones_1L[:, 3:].float(),
    )
