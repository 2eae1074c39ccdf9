"""The output head of a model: its shape, how it is made whole, and the proof that it is all there is to the logits.

B rows · L tokens · V vocabulary · H hidden width
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
from trl_opsd._compat.trl import maybe_gather_lm_head_ctx
from trl_opsd.models.backbone import Run, call, hidden_states
from trl_opsd.models.probing import most_exactly, readable
from trl_opsd.types import OutputHead


def shape_of(head: OutputHead) -> tuple[int, int]:
    """V and H, also where ZeRO-3 has split the weight."""
    rows, width = whole_shape(head.weight)
    return rows, width


def gathered_head(*heads: OutputHead) -> AbstractContextManager[Any]:
    """Makes heads that ZeRO-3 has split whole for as long as the context lasts; does nothing elsewhere."""
    parts = [part for head in heads for part in (head.weight, head.bias) if part is not None and in_zero3(part)]
    split = list({id(part): part for part in parts}.values())  # a teacher may have the student's own head
    context: AbstractContextManager[Any] = maybe_gather_lm_head_ctx(*split)
    return context


def model_shape(model: CausalLM) -> tuple[int, int]:
    """V and H of a model's head."""
    return shape_of(OutputHead.of(model))


@contextmanager
def whole_head(model: CausalLM) -> Iterator[OutputHead]:
    """The head of a model, gathered for as long as the context lasts if ZeRO-3 or FSDP2 has split it. Collective."""
    with unsharded(model.get_output_embeddings()):
        head = OutputHead.of(model)
        with gathered_head(head):
            yield head


def prove_head(model: CausalLM, role: str, run: Run | None = None) -> None:
    """Checks by computing both that `model(x).logits` is what [`~types.OutputHead`] makes of the last hidden state,
    and that the head has as many rows as the config says.

    The loss never calls the model's own head, so an architecture that post-processes its logits in a way
    [`~types.OutputHead.of`] cannot read would be trained on a wrong objective without any sign of it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model to probe, on eight tokens.
        role (`str`):
            `"student"` or `"teacher"`, for the message.
        run (`Callable`, *optional*):
            `run(function, *args)` equals `function(model, *args)`, for a model that cannot be called as it is.

    Raises:
        ValueError: Two of them differ by more than rounding; the message gives both. Or all logits are the same, or
            the model cannot be run, because its weights have dtypes that do not go together.
    """
    head = OutputHead.of(model)
    rows, said = shape_of(head)[0], model.config.get_text_config().vocab_size
    if rows != said:
        raise ValueError(
            f"The head of the {role} ({type(model).__name__}) has {rows} rows, but its config says vocab_size={said}: "
            "resize with `model.resize_token_embeddings(n)`, which changes both, or repair the config."
        )
    run = run or partial(call, model)
    # Spread over the vocabulary, and without drawing from the random state of training.
    ids_BL = torch.arange(8, device=head.weight.device).mul(rows // 8)[None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), readable(model, role):
            hidden_BLH, own_BLV = most_exactly(model, role, lambda: _read_both(run, ids_BL))
            hidden_BLH, expected_BLV = hidden_BLH.to(head.weight.device), own_BLV.float().to(head.weight.device)
            with torch.autocast(head.weight.device.type, enabled=False), whole_head(model) as head:
                actual_BLV = _logits(hidden_BLH, head)
    finally:
        model.train(was_training)
    if not (expected_BLV.amax(-1) > expected_BLV.amin(-1)).any():
        raise ValueError(
            f"The {role} ({type(model).__name__}) gives all {rows} tokens the same logit, whatever it reads: its head "
            "is zeroed, or its logits are not numbers; load it again."
        )
    if expected_BLV.shape != actual_BLV.shape:
        gap = f"shapes {tuple(expected_BLV.shape)} and {tuple(actual_BLV.shape)}"
    else:
        largest = expected_BLV.abs().max()
        difference = (expected_BLV - actual_BLV).abs().max()
        # Half precision rounds the logits themselves; single precision only reorders sums.
        tolerance = 2e-2 if {head.weight.dtype, own_BLV.dtype} & {torch.bfloat16, torch.float16} else 1e-4
        if difference <= tolerance * largest:
            return
        gap = f"a difference of {difference:.3g} where the largest logit is {largest:.3g}"
    raise ValueError(
        f"The {role} ({type(model).__name__}) does not compute its logits as `softcap * tanh(scale * (hidden @ "
        f"weight.T + bias) / softcap)` with scale={head.scale} and softcap={head.softcap}: {gap}. The loss would "
        "optimise another objective than the model's own. Use an architecture whose head is of this form, "
        "or report the one that is missing."
    )


def _read_both(run: Run, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """The last hidden state and the model's own logits."""
    return run(hidden_states, ids_BL, torch.ones_like(ids_BL)), run(_own_logits, ids_BL)


def _own_logits(model: CausalLM, input_ids_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(input_ids=input_ids_BL, use_cache=False).logits
    return logits_BLV


def _logits(hidden_BLH: Tensor, head: OutputHead) -> Tensor:
    logits_BLV = nn.functional.linear(hidden_BLH.to(head.weight.dtype), head.weight, head.bias).float() * head.scale
    return logits_BLV if head.softcap is None else head.softcap * torch.tanh(logits_BLV / head.softcap)
