"""The output head of a model: its shape, how it is gathered, and the check that it reproduces the model's logits.

B rows · L tokens · V vocabulary size · H hidden size
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import in_zero3, unsharded, whole_shape
from trl_opsd.models.backbone import Run, call, hidden_states
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.probing import explain_forward_errors, without_autocast_if_possible
from trl_opsd.types import OutputHead


def shape_of(head: OutputHead) -> tuple[int, int]:
    """V and H, also where ZeRO-3 has sharded the weight."""
    rows, width = whole_shape(head.weight)
    return rows, width


def gathered_head(*heads: OutputHead) -> AbstractContextManager[Any]:
    """Gathers heads that ZeRO-3 has sharded while the context is open; a no-op otherwise."""
    parts = [part for head in heads for part in (head.weight, head.bias) if part is not None and in_zero3(part)]
    split = list({id(part): part for part in parts}.values())  # a teacher may share the student's head
    from trl_opsd._compat.trl import maybe_gather_lm_head_ctx

    context: AbstractContextManager[Any] = maybe_gather_lm_head_ctx(*split)
    return context


def model_shape(model: CausalLM) -> tuple[int, int]:
    """V and H of a model's head."""
    return shape_of(OutputHead.of(model))


@contextmanager
def whole_head(model: CausalLM) -> Iterator[OutputHead]:
    """The head of a model, gathered while the context is open if ZeRO-3 or FSDP2 has sharded it. Collective."""
    with unsharded(model.get_output_embeddings()):
        head = OutputHead.of(model)
        with gathered_head(head):
            yield head


def prove_head(model: CausalLM, role: str, run: Run | None = None) -> None:
    """Refuses a model whose own logits differ from [`~types.OutputHead`] applied to its last hidden state."""
    head = OutputHead.of(model)
    # The loss never calls the model's own head, so an architecture that post-processes its logits in a way that
    # `OutputHead.of` cannot read would silently be trained on a wrong objective.
    rows, expected = shape_of(head)[0], model.config.get_text_config().vocab_size
    if rows != expected:
        raise ValueError(
            f"The head of the {role} ({type(model).__name__}) has {rows} rows, but its config says "
            f"vocab_size={expected}: resize with `model.resize_token_embeddings(n)`, which changes both, or repair the "
            "config."
        )
    run = run or partial(call, model)
    # Spread over the vocabulary, without advancing the random state of training.
    ids_BL = torch.arange(8, device=head.weight.device).mul(rows // 8)[None]
    with preserved_mode(model), torch.no_grad(), explain_forward_errors(model, role):
        model.eval()
        hidden_BLH, own_BLV = without_autocast_if_possible(model, role, lambda: _read_both(run, ids_BL))
        hidden_BLH, expected_BLV = hidden_BLH.to(head.weight.device), own_BLV.float().to(head.weight.device)
        with torch.autocast(head.weight.device.type, enabled=False), whole_head(model) as head:
            actual_BLV = logits_of(hidden_BLH, head)
    if not (expected_BLV.amax(-1) > expected_BLV.amin(-1)).any():
        raise ValueError(
            f"The {role} ({type(model).__name__}) gives all {rows} tokens the same logit for any input: its head is "
            "zeroed, or its logits are NaN; load it again."
        )
    if expected_BLV.shape != actual_BLV.shape:
        gap = f"shapes {tuple(expected_BLV.shape)} and {tuple(actual_BLV.shape)}"
    else:
        largest = expected_BLV.abs().max()
        difference = (expected_BLV - actual_BLV).abs().max()
        # Half precision rounds the logits themselves; in single precision only the summation order differs.
        tolerance = 2e-2 if {head.weight.dtype, own_BLV.dtype} & {torch.bfloat16, torch.float16} else 1e-4
        if difference <= tolerance * largest:
            return
        gap = f"a difference of {difference:.3g} where the largest logit is {largest:.3g}"
    raise ValueError(
        f"The {role} ({type(model).__name__}) does not compute its logits as `softcap * tanh(scale * (hidden @ "
        f"weight.T + bias) / softcap)` with scale={head.scale} and softcap={head.softcap}: {gap}. The loss would "
        "be computed from logits other than the model's own. Use an architecture whose head has this form, "
        "or report the unsupported one."
    )


def _read_both(run: Run, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """The last hidden state and the model's own logits."""
    return run(hidden_states, ids_BL, torch.ones_like(ids_BL)), run(_own_logits, ids_BL)


def _own_logits(model: CausalLM, input_ids_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(input_ids=input_ids_BL, use_cache=False).logits
    return logits_BLV


def logits_of(hidden_BLH: Tensor, head: OutputHead) -> Tensor:
    """[..., V], float32: the logits of hidden states [..., H]."""
    logits_BLV = nn.functional.linear(hidden_BLH.to(head.weight.dtype), head.weight, head.bias).float() * head.scale
    return logits_BLV if head.softcap is None else head.softcap * torch.tanh(logits_BLV / head.softcap)
