"""Probes of a model, each made by running it: its output head, its gradients, and which rows may share a pass.

B rows · L tokens · V vocabulary size · H hidden size
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainingArguments

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.sharding import is_split, whole_head
from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.models.backbone import (
    Run,
    backbone_of,
    call,
    completion_hidden,
    context_of,
    hidden_states,
    logits_of,
    preserved_mode,
    seen,
    shape_of,
    together,
)
from trl_opsd.models.padding import PADDED, BatchPolicy, Read, agree, distances, gap_of_packing, prove_batch_policy
from trl_opsd.parallel.precision import autocast, least_precise
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.types import OutputHead, Rollout
from trl_opsd.types.rollout import PromptIds

CANNOT_RUN = (AttributeError, TypeError, LookupError, AssertionError, NotImplementedError, RuntimeError)
"""Errors raised by a forward that expects other inputs."""


@contextmanager
def explaining(
    subject: Any, cannot: str, remedy: str, errors: tuple[type[Exception], ...] = CANNOT_RUN
) -> Iterator[None]:
    """Names in an error of the body what the subject cannot do, and what to do then."""
    try:
        yield
    except torch.OutOfMemoryError:  # the trainer explains this one; it is not the subject's fault
        raise
    except errors as error:
        raise ValueError(f"{subject} cannot {cannot}, {type(error).__name__}: {error}. {remedy}") from error


class Probed:
    """A model, how to run it, and what its probes have found."""

    def __init__(self, model: CausalLM, role: str, run: Run | None = None) -> None:
        self.model, self.run = model, run or partial(call, model)
        self.called = f"{role} ({type(model).__name__})"
        self.batching: BatchPolicy = PADDED
        """Which rows may share a pass, once [`find_batching`] has run."""
        self.unreached: list[str] = []
        """Parameters without a gradient, once [`check_gradients`] has run."""
        self.seen: Sequence[PromptIds] = ()
        """Prompts for [`check_images`]: with one image, with another, and with two."""

    def __str__(self) -> str:
        return f"The {self.called}"

    def prove(self, *probes: Callable[[Probed], None]) -> Probed:
        """Raises the first failure, a `ValueError`."""
        for probe in probes:
            probe(self)
        return self

    def reads(self, prompts: Sequence[PromptIds], policy: BatchPolicy) -> Probed:
        """Raises if the model does not read images as its own forward pass does; `prompts` are those of [`seen`]."""
        self.seen, self.batching = prompts, policy
        return self.prove(check_images)

    def evaluate(self, read: Callable[[], Any]) -> Any:
        """`read()` in evaluation mode without gradients; mode and random state are restored.

        Under autocast only where mixed dtypes require it, because autocast rounds the values to compare.
        """
        device = OutputHead.of(self.model).weight.device
        with preserved_mode(self.model), torch.no_grad(), preserved_rng(device):
            self.model.eval()
            try:
                with torch.autocast(device.type, enabled=False):
                    return read()
            except RuntimeError as error:
                if not (torch.is_autocast_enabled(device.type) and ("dtype" in str(error) or "scalar" in str(error))):
                    raise
            return read()


def prove_student(
    student: CausalLM, run: Run, args: TrainingArguments, accelerator: Accelerator, padding_free: bool = False,
    more: Sequence[Callable[[Probed], None]] = (),
) -> BatchPolicy:  # fmt: skip
    """Probes a student in the launch's precision, and returns which of its rows may share a pass."""
    # Padding after gradients: a layer that caches states must not keep any with an autograd graph.
    probes = [check_head, check_gradients, find_batching, *([check_packing] if padding_free else []), *more]
    with autocast(accelerator):
        probed = Probed(student, "student", run).prove(*probes)
    # Parameters outside the graph, such as a vision tower's, would make DDP wait for their gradients, and hang.
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if probed.unreached and args.ddp_find_unused_parameters is None and not reentrant:
        args.ddp_find_unused_parameters = accelerator.ddp_handler.find_unused_parameters = True
    return probed.batching


# ---- The head: logits are those of [`~types.OutputHead`] applied to the last hidden state ----------------------------


_OTHER_MODEL = (
    "Its forward must accept `input_ids` and `attention_mask` without other arguments, also with its adapter: use "
    "another model, or list `target_modules` by name."
)


def check_head(one: Probed) -> None:
    """Refuses a head whose logits the loss would not rebuild."""
    # The loss never calls the model's own head, so an architecture that post-processes its logits in a way that
    # `OutputHead.of` cannot read would silently be trained on a wrong objective.
    with explaining(one, "run on eight tokens", _OTHER_MODEL):
        head, expected = OutputHead.of(one.model), one.model.config.get_text_config().vocab_size
        rows, device = shape_of(head)[0], head.weight.device
        if rows != expected:
            raise ValueError(
                f"The head of the {one.called} has {rows} rows, but its config says vocab_size={expected}: resize both "
                "with `model.resize_token_embeddings(n)`, or correct the config."
            )
        ids_BL = torch.arange(8, device=device).mul(rows // 8)[None]  # spread over the vocabulary
        # The whole model first: compressed-tensors unpacks weights in a hook of its first forward.
        own_BLV, hidden_BLH = one.evaluate(
            lambda: (
                one.run(lambda model, ids: model(input_ids=ids, use_cache=False).logits, ids_BL),
                one.run(hidden_states, ids_BL, torch.ones_like(ids_BL)),
            )
        )
        with torch.no_grad(), torch.autocast(device.type, enabled=False), whole_head(one.model) as whole:
            expected_BLV, actual_BLV = own_BLV.to(device).float(), logits_of(hidden_BLH.to(device), whole)
    if not (expected_BLV.amax(-1) > expected_BLV.amin(-1)).any():
        raise ValueError(
            f"{one} gives all {expected_BLV.size(-1)} tokens the same logit for any input: its head is zeroed, or its "
            "logits are NaN; reload it."
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
        f"{one} does not compute its logits as `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)` with "
        f"scale={head.scale} and softcap={head.softcap}: {gap}. The loss would use logits that differ from the model's "
        "own. Use an architecture whose head has this form, or report the unsupported one."
    )


# ---- Gradients: a student runs in training mode, in which some families differ, and they reach its layers ------------


def check_gradients(one: Probed) -> None:
    """Refuses a student without gradients, or that cannot run in training mode; finds parameters without one."""
    head = OutputHead.of(one.model)
    device, step = head.weight.device, shape_of(head)[0] // 8
    row = Rollout.of([[0, step, 2 * step]], [[step * place for place in range(3, 8)]], device)
    # Of a sharded student no gradient is probed: a graph without a backward pass disturbs hooks of shards.
    whole = not any(map(is_split, one.model.parameters()))
    remedy = "It can in eval mode: use another model as the student, or this one as a teacher."
    # Dropout advances the random state.
    with (
        explaining(one, "run on eight tokens in training mode", remedy, (ValueError, *CANNOT_RUN)),
        preserved_mode(one.model),
        preserved_rng(device),
        torch.set_grad_enabled(whole),
        catch_warnings(),
    ):
        if not whole:  # without gradients, as is meant here
            filterwarnings("ignore", "None of the inputs have requires_grad=True")
        one.model.train()
        hidden_BCH: Tensor = one.run(completion_hidden, row)
    if not whole:
        return
    of_head = {id(parameter) for parameter in one.model.get_output_embeddings().parameters()}
    weights = one.model.named_parameters()
    trainable = {name: id(weight) for name, weight in weights if weight.requires_grad and id(weight) not in of_head}
    if trainable and not hidden_BCH.requires_grad:
        raise ValueError(
            f"No gradient passes through the {one.called}, although parameters below its head require one and would "
            "never be updated: load it without inference-only quantisation, without `torch.no_grad` in its forward, "
            f"and with `{CHECKPOINTING}_kwargs={{'use_reentrant': False}}`."
        )
    reached = _reached(hidden_BCH)
    one.unreached = [name for name, number in trainable.items() if number not in reached]


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


# ---- Padding and packing: which rows a model computes in one pass as it would compute each alone ---------------------


def find_batching(one: Probed) -> None:
    """Finds out which rows may share a pass."""
    # In `transformers`, padding changes the output of some families: learned positions that count it, convolutions and
    # recurrences that read it, rotary frequencies that depend on the longest row. An unaffected family costs two small
    # passes. Borders are tested by position ids beyond them, which a model that takes none cannot be given.
    takes_positions = "position_ids" in inspect.signature(backbone_of(one.model).forward).parameters
    borders = _borders(one.model) if takes_positions else set()
    one.batching = _read_with(one, partial(prove_batch_policy, borders=borders, called=one.called))
    # Without a mask some look at the ids in each pass, for which the host would wait, and warn of padding.
    forward = inspect.unwrap(type(backbone_of(one.model)).forward)
    looks = "warn_if_padding_and_no_attention_mask" in forward.__code__.co_names
    one.batching = replace(one.batching, needs_mask=one.batching.needs_mask or looks)


def _read_with(one: Probed, probe: Callable[[Read, int, torch.device], Any]) -> Any:
    """Calls a probe with a function that reads rows, the size of the vocabulary and a device."""
    head = OutputHead.of(one.model)
    rounded = least_precise(one.model)  # sets the tolerance: a bfloat16 layer in a float32 model rounds all states

    def read(*inputs: Tensor | None) -> Tensor:
        hidden_BLH: Tensor = one.run(hidden_states, *inputs)
        return hidden_BLH.to(rounded)

    return one.evaluate(lambda: probe(read, shape_of(head)[0], head.weight.device))


def _borders(model: CausalLM) -> set[int]:
    """Positions within the context at which rotary frequencies may change (RoPE scaling)."""
    config, name = model.config.get_text_config(), "original_max_position_embeddings"
    rope = getattr(config, "rope_parameters", None) or {}
    stated = [getattr(config, name, None)]
    stated += [one.get(name) for one in (rope, *rope.values()) if isinstance(one, dict)]
    return {border for border in stated if border and border < (context_of(model) or 0)}


def check_packing(one: Probed) -> None:
    """Refuses `padding_free` for a model whose concatenated rows change each other."""
    reason = _beyond_probe(one.model)
    if one.batching.padded_up_to != math.inf:
        reason = f"cannot process concatenated rows (batching: {one.batching})"
    if reason:
        raise ValueError(f"`padding_free=True`: the {one.called} {reason}: remove the option.")
    # It depends on architecture and kernels: convolutions and recurrences continue from row to row, and attention needs
    # restarting positions to separate rows.
    cannot = "run without an attention mask, as `padding_free=True` requires"
    with explaining(one, cannot, "Remove the option."):
        gap = _read_with(one, gap_of_packing)
    if gap is not None:
        raise ValueError(
            f"`padding_free=True`: in the {one.called}, concatenated rows change each other: the hidden state of a "
            f"token is off by {gap:.2g} of its norm. Remove the option."
        )


def _beyond_probe(model: CausalLM) -> str | None:
    """Why packed rows would change each other or exceed a limit in this family, where only long rows show it."""
    config = model.config.get_text_config()
    for name in ("attention_chunk_size", "attn_temperature_tuning"):
        if getattr(config, name, None):
            return f"counts positions across concatenated rows for `{name}={getattr(config, name)!r}` (Llama 4)"
    if any(buffer.dim() == 4 for buffer in backbone_of(model).buffers()):
        return "has a mask of the size of its context, which concatenated rows may exceed (GPT-Neo)"
    return None


# ---- Images: read in a batch as the model itself reads them with what its processor returns --------------------------


def check_images(one: Probed) -> None:
    """Refuses a model that reads images otherwise than its own forward pass does, or than each row alone."""
    head = OutputHead.of(one.model)
    device, next_id = head.weight.device, shape_of(head)[0] // 3
    text = PromptIds(next_id + number for number in range(5))

    def states(*prompts: PromptIds) -> Tensor:
        hidden_BCH: Tensor = one.run(
            completion_hidden, Rollout.of(prompts, [[next_id]] * len(prompts), device), one.batching
        )
        return hidden_BCH[:, 0].to(least_precise(one.model))

    def read() -> tuple[Tensor, ...]:
        alone_4H = torch.cat([states(prompt) for prompt in (*one.seen, text)])
        return alone_4H, states(*one.seen, text), one.run(_own_logits_of_images, one.seen[0], device)

    remedy = "Use another model and its own processor, or remove the images."
    with explaining(one, "read a prompt with images", remedy, (ValueError, *CANNOT_RUN)):
        alone_4H, together_4H, own_V = one.evaluate(read)
        with torch.no_grad(), torch.autocast(device.type, enabled=False), whole_head(one.model) as whole:
            rebuilt_V = logits_of(alone_4H[0].to(device), whole).to(own_V)
    gap = float((rebuilt_V - own_V).abs().max() / own_V.abs().max())
    if not gap <= (2e-2 if own_V.dtype != torch.float32 else 1e-4):
        raise ValueError(
            f"{one} has logits after an image that differ from its own forward pass by {gap:.2g} of the largest: "
            f"{remedy}"
        )
    if not agree(together_4H, alone_4H):
        raise ValueError(
            f"{one} changes the hidden states of rows with images by {distances(together_4H, alone_4H).max():.2g} of "
            f"their norm when they share a pass with others: {remedy}"
        )
    if torch.equal(alone_4H[0], alone_4H[1]):
        raise ValueError(f"{one} has the same hidden state after two different images: it does not see them. {remedy}")


def _own_logits_of_images(model: CausalLM, prompt: PromptIds, device: torch.device) -> Tensor:
    """[V], float32 or less precise: after a prompt with images, from the model's own forward pass."""
    ids_1L = torch.tensor([prompt], device=device)
    taken = inspect.signature(without_peft(model).forward).parameters
    given = seen(together([prompt.images], [0], len(prompt), device), taken, device)
    logits_V: Tensor = model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False, **given).logits[
        0, -1
    ]
    return logits_V
