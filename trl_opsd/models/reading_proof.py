"""Determines which rows a model can compute in one batch, or packed, before it is trained or used."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, backbone_of, call, context_of, hidden_states
from trl_opsd.models.head import shape_of
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.padding import Read, Reading, gap_of_packing, prove_reading
from trl_opsd.models.probing import CANNOT_RUN, without_autocast_if_possible
from trl_opsd.run.precision import least_precise
from trl_opsd.run.rng import preserved_rng
from trl_opsd.types import OutputHead


def prove_padding(model: CausalLM, role: str, run: Run | None = None) -> Reading:
    """Determines by forward passes which rows can share a batch; refuses a model for which none works."""
    # Borders are tested by position ids beyond them, which a model that takes none cannot be given.
    takes_positions = "position_ids" in inspect.signature(backbone_of(model).forward).parameters
    # In `transformers`, padding changes the output of some families: learned positions that count it, convolutions and
    # recurrences that read it, rotary frequencies that depend on the longest row. An unaffected family costs two small
    # passes.
    reading: Reading = _probed(
        model,
        role,
        run,
        lambda read, vocabulary, device: prove_reading(
            read,
            vocabulary,
            device,
            borders=_borders(model) if takes_positions else set(),
            called=f"{role} ({type(model).__name__})",
        ),
    )
    return reading


def prove_packing(model: CausalLM, role: str, reading: Reading, run: Run | None = None) -> None:
    """Refuses `padding_free` for a model whose packed rows change each other, which five small passes measure."""
    refused = f"`padding_free=True`: the {role} ({type(model).__name__})"
    if reading.padded_up_to != math.inf:
        raise ValueError(f"{refused} cannot read rows as one, it reads them {reading}: leave the option out.")
    if reason := _beyond_probe(model):
        raise ValueError(f"{refused} {reason}: leave the option out.")
    try:
        # It depends on architecture and kernels: convolutions and recurrences continue from row to row, and attention
        # needs restarting positions to separate rows.
        gap = _probed(model, role, run, gap_of_packing)
    except CANNOT_RUN as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"{refused} cannot read without an attention mask, {type(error).__name__}: {error}. Leave the option out."
        ) from error
    if gap is not None:
        raise ValueError(
            f"{refused} lets rows that are read as one change each other: the hidden state of a token is off by "
            f"{gap:.2g} of its norm. Leave the option out."
        )


def _beyond_probe(model: CausalLM) -> str | None:
    """Why packed rows would change each other or exceed a limit in this family, where only long rows show it."""
    config = model.config.get_text_config()
    for name in ("attention_chunk_size", "attn_temperature_tuning"):
        if getattr(config, name, None):
            return f"counts positions from the first row on for `{name}={getattr(config, name)!r}` (Llama 4)"
    if any(buffer.dim() == 4 for buffer in backbone_of(model).buffers()):
        return "keeps a mask of its context, which rows that are read as one may exceed (GPT-Neo)"
    return None


def _probed(model: CausalLM, role: str, run: Run | None, probe: Callable[[Read, int, torch.device], Any]) -> Any:
    """Calls a probe with a function that runs the model in eval mode; mode and random state are restored."""
    run = run or partial(call, model)
    head = OutputHead.of(model)
    rounded = least_precise(model)  # sets the tolerance: a bfloat16 layer in a float32 model rounds all states
    with preserved_mode(model), torch.no_grad(), preserved_rng(head.weight.device):
        model.eval()
        return without_autocast_if_possible(
            model,
            role,
            lambda: probe(
                lambda *inputs: run(hidden_states, *inputs).to(rounded), shape_of(head)[0], head.weight.device
            ),
        )


def _borders(model: CausalLM) -> set[int]:
    """Positions within the context at which rotary frequencies may change (RoPE scaling)."""
    config, name = model.config.get_text_config(), "original_max_position_embeddings"
    rope = getattr(config, "rope_parameters", None) or {}
    stated = [getattr(config, name, None)]
    stated += [one.get(name) for one in (rope, *rope.values()) if isinstance(one, dict)]
    return {border for border in stated if border and border < (context_of(model) or 0)}
