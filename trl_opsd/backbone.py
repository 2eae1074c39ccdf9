"""Runs a causal language model up to its last hidden state; what the head makes of it is somebody else's business.

B rows · P prompt tokens · C completion tokens · L = P + C · V vocabulary · H hidden width
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trl_opsd.padding import PADDED, Reading, prove_reading
from trl_opsd.precision import dtypes_of, least_precise
from trl_opsd.rng import preserved_rng
from trl_opsd.types import OutputHead, Rollout

WholeHead: TypeAlias = Callable[[Any], AbstractContextManager[OutputHead]]
Run: TypeAlias = Callable[..., Any]
"""`run(function, *args)` equals `function(model, *args)`, wherever the model is."""


CANNOT_RUN = (AttributeError, TypeError, LookupError, AssertionError, NotImplementedError, RuntimeError)


def call(model: Any, function: Run, *args: Any) -> Any:
    """`function(model, *args)`: a [`Run`] once the model is bound."""
    return function(model, *args)


def completion_hidden(model: Any, rollout: Rollout, reading: Reading = PADDED) -> Tensor:
    """The last hidden state at the position that predicts each completion token.

    Equals `model(...).hidden_states[-1][:, P - 1 : -1]` with every token at the position it would have without padding.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A causal language model, not wrapped for distributed training.
        rollout ([`~types.Rollout`]):
            The rows to read.
        reading ([`~padding.Reading`], *optional*, defaults to `PADDED`):
            Which of them share a forward pass, as [`prove_padding`] found it.

    Returns:
        `torch.Tensor`: `[B, C, H]`. What stands at padding means nothing.
    """
    if reading == PADDED:
        hidden_BLH = _hidden(model, rollout.input_ids, rollout.attention_mask)
        return hidden_BLH[:, rollout.prompt_ids.size(1) - 1 : -1]
    lengths = rollout.attention_mask.sum(-1).tolist()
    groups = reading.groups(lengths, is_sharded(model) or isinstance(model, FSDPModule))
    read = [_completion_hidden_unpadded if _are_one(lengths, rows) else completion_hidden for rows in groups]
    parts = [one(model, rollout.select(rows)) for one, rows in zip(read, groups, strict=True)]
    order = torch.tensor([row for rows in groups for row in rows], device=parts[0].device)
    return torch.cat(parts)[order.argsort()]


def _are_one(lengths: list[int], rows: list[int]) -> bool:
    return len({lengths[row] for row in rows}) == 1


def _completion_hidden_unpadded(model: Any, rollout: Rollout) -> Tensor:
    """[n, C, H], of rows with as many tokens each, prompt and completion."""
    mask_nL = rollout.attention_mask
    ids_nL = rollout.input_ids[mask_nL != 0].view(len(mask_nL), -1)
    hidden_nLH = _hidden(model, ids_nL, torch.ones_like(ids_nL))
    before_n1 = rollout.prompt_mask.sum(-1, keepdim=True) - 1
    places_nC = before_n1 + torch.arange(rollout.completion_ids.size(1), device=ids_nL.device)
    places_nC = places_nC.clamp(max=ids_nL.size(1) - 1).to(hidden_nLH.device)
    return hidden_nLH.gather(1, places_nC[..., None].expand(-1, -1, hidden_nLH.size(-1)))


def context_of(model: Any) -> int | None:
    """Tokens the model can look at, or `None` where its config states no limit."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def is_sharded(model: nn.Module) -> bool:
    """Whether ZeRO-3 has already split the parameters, so that none can be used outside the engine's own forward."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _as_it_is(model: Any) -> AbstractContextManager[OutputHead]:
    return nullcontext(OutputHead.of(model))


def prove_head(model: Any, role: str, whole_head: WholeHead = _as_it_is, run: Run | None = None) -> None:
    """Checks by computing both that `model(x).logits` is what [`~types.OutputHead`] makes of the last hidden state,
    and that the head has as many rows as the config says.

    The loss never calls the model's own head, so an architecture that post-processes its logits in a way
    [`~types.OutputHead.of`] cannot read would be trained on a wrong objective without any sign of it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model to probe, on eight tokens.
        role (`str`):
            `"student"` or `"teacher"`, for the message.
        whole_head (`Callable`, *optional*):
            Gives the head of a model, whole for as long as the context lasts.
        run (`Callable`, *optional*):
            `run(function, *args)` equals `function(model, *args)`, for a model that cannot be called as it is.

    Raises:
        ValueError: Two of them differ by more than rounding; the message gives both. Or all logits are the same, or
            the model cannot be run, because its weights have dtypes that do not go together.
    """
    head = OutputHead.of(model)
    rows, said = head.shape[0], model.config.get_text_config().vocab_size
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
        with torch.no_grad(), _readable(model, role):
            hidden_BLH, own_BLV = _most_exactly(model, role, lambda: _read_both(run, ids_BL))
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


def prove_padding(model: Any, role: str, run: Run | None = None) -> Reading:
    """Finds out by computing which rows this model can read in one batch.

    Padding changes what some families compute, in `transformers` itself: learned positions that count it, convolutions
    and recurrences that read it, rotary frequencies that depend on the longest row. Two small forward passes for a
    family that it does not change, and nothing of the random state.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model to probe.
        role (`str`):
            `"student"` or `"teacher"`, for the message.
        run (`Callable`, *optional*):
            `run(function, *args)` equals `function(model, *args)`, for a model that cannot be called as it is.

    Raises:
        ValueError: No way of reading gives each row the states that it has alone; the message says by how much.
    """
    run = run or partial(call, model)
    head = OutputHead.of(model)
    rounded = least_precise(model)
    takes_positions = "position_ids" in inspect.signature(_backbone(model).forward).parameters
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), preserved_rng(head.weight.device):
            reading: Reading = _most_exactly(
                model,
                role,
                lambda: prove_reading(
                    lambda *inputs: run(_hidden, *inputs).to(rounded),
                    vocabulary=head.shape[0],
                    device=head.weight.device,
                    borders=_borders(model) if takes_positions else set(),
                    called=f"{role} ({type(model).__name__})",
                ),
            )
            return reading
    finally:
        model.train(was_training)


def _borders(model: Any) -> set[int]:
    """Positions within the context at which rotary frequencies may change."""
    config, name = model.config.get_text_config(), "original_max_position_embeddings"
    rope = getattr(config, "rope_parameters", None) or {}
    stated = [getattr(config, name, None)]
    stated += [one.get(name) for one in (rope, *rope.values()) if isinstance(one, dict)]
    return {border for border in stated if border and border < (context_of(model) or 0)}


@contextmanager
def _readable(model: Any, role: str) -> Iterator[None]:
    """Says in our words that a model cannot be run at all, which is noticed where it is run first."""
    try:
        yield
    except CANNOT_RUN as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"The {role} ({type(model).__name__}) cannot read eight tokens, {type(error).__name__}: {error}. Its "
            "forward has to take `input_ids` and `attention_mask` alone, also with the adapter it was given: take "
            "another model, or give `target_modules` by name."
        ) from error


def _backbone(model: Any) -> Any:
    causal_lm = model.base_model.model if is_peft_model(model) else model
    backbone = causal_lm.base_model
    # Parts of a larger model name it as that does, and then `base_model` does not find it (Llama 4, Mllama).
    return getattr(causal_lm, "model", causal_lm) if backbone is causal_lm else backbone


def _hidden(
    model: Any, input_ids_BL: Tensor, attention_mask_BL: Tensor, position_ids_BL: Tensor | None = None
) -> Tensor:
    backbone = _backbone(model)
    inputs = {"input_ids": input_ids_BL, "attention_mask": attention_mask_BL, "use_cache": False}
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        # As `generate` numbers them. Left alone, a model counts the padding too, and learned positions then shift.
        counted_BL = (attention_mask_BL.long().cumsum(-1) - 1).clamp(min=0)
        inputs["position_ids"] = counted_BL if position_ids_BL is None else position_ids_BL
    output = backbone(**inputs)
    if getattr(output, "last_hidden_state", None) is None:
        raise ValueError(
            f"The {type(backbone).__name__} inside of the {type(model).__name__} returns a {type(output).__name__} "
            "without `last_hidden_state`, which the loss reads: take a causal language model that returns it, or "
            "report the family that is missing."
        )
    hidden_BLH: Tensor = output.last_hidden_state
    return hidden_BLH


def _read_both(run: Run, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """The last hidden state and the model's own logits."""
    return run(_hidden, ids_BL, torch.ones_like(ids_BL)), run(_own_logits, ids_BL)


def _most_exactly(model: Any, role: str, read: Callable[[], Any]) -> Any:
    """`read()`, in autocast only where a mixture of dtypes needs it: it rounds what is to be compared."""
    device = OutputHead.of(model).weight.device.type
    try:
        with torch.autocast(device, enabled=False):
            return read()
    except RuntimeError as error:
        if not ("dtype" in str(error) or "scalar type" in str(error)):
            raise
        if not torch.is_autocast_enabled(device):
            raise ValueError(
                f"The {role} ({type(model).__name__}) has weights of dtypes that cannot be multiplied with each other: "
                f"{dtypes_of(model)}. Load it in one, for instance with `dtype='bfloat16'`, or cast it, `model.to("
                f"torch.bfloat16)`; or set `bf16=True`, which rounds factors where they meet. Said torch: {error}"
            ) from error
    return read()


def _own_logits(model: Any, input_ids_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(input_ids=input_ids_BL, use_cache=False).logits
    return logits_BLV


def _logits(hidden_BLH: Tensor, head: OutputHead) -> Tensor:
    logits_BLV = nn.functional.linear(hidden_BLH.to(head.weight.dtype), head.weight, head.bias).float() * head.scale
    return logits_BLV if head.softcap is None else head.softcap * torch.tanh(logits_BLV / head.softcap)
