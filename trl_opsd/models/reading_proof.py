"""Determines which rows a model can read in one batch, before it is trained or used."""

from __future__ import annotations

import inspect
from functools import partial

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, backbone_of, call, context_of, hidden_states
from trl_opsd.models.head import shape_of
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.padding import Reading, prove_reading
from trl_opsd.models.probing import without_autocast_if_possible
from trl_opsd.run.precision import least_precise
from trl_opsd.run.rng import preserved_rng
from trl_opsd.types import OutputHead


def prove_padding(model: CausalLM, role: str, run: Run | None = None) -> Reading:
    """Runs a model on a padded and an unpadded row to determine which rows it can read in one batch.

    In `transformers`, padding changes the output of some families: learned positions that count it, convolutions and
    recurrences that read it, rotary frequencies that depend on the longest row. Costs two small forward passes for a
    family that is not affected, and leaves the random state unchanged.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model to probe.
        role (`str`):
            `"student"` or `"teacher"`, for the message.
        run (`Callable`, *optional*):
            `run(function, *args)` equals `function(model, *args)`, for a model that cannot be called directly.

    Raises:
        ValueError: No way of batching gives each row the states it has alone; the message has the difference.
    """
    run = run or partial(call, model)
    head = OutputHead.of(model)
    rounded = least_precise(model)
    takes_positions = "position_ids" in inspect.signature(backbone_of(model).forward).parameters
    with preserved_mode(model), torch.no_grad(), preserved_rng(head.weight.device):
        model.eval()
        reading: Reading = without_autocast_if_possible(
            model,
            role,
            lambda: prove_reading(
                lambda *inputs: run(hidden_states, *inputs).to(rounded),
                vocabulary=shape_of(head)[0],
                device=head.weight.device,
                borders=_borders(model) if takes_positions else set(),
                called=f"{role} ({type(model).__name__})",
            ),
        )
        return reading


def _borders(model: CausalLM) -> set[int]:
    """Positions within the context at which rotary frequencies may change."""
    config, name = model.config.get_text_config(), "original_max_position_embeddings"
    rope = getattr(config, "rope_parameters", None) or {}
    stated = [getattr(config, name, None)]
    stated += [one.get(name) for one in (rope, *rope.values()) if isinstance(one, dict)]
    return {border for border in stated if border and border < (context_of(model) or 0)}
