"""Rows padded for the student, and the student itself with its weights gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_opsd._compat.deepspeed import forwards_apart, register_external_parameters, with_current_autocast
from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split_model
from trl_opsd._compat.trl import pad, unwrap_model_for_generation
from trl_opsd.host import TrainerHost
from trl_opsd.models.backbone import model_shape
from trl_opsd.models.tokenizers import ensure_special_tokens, known_end_tokens, placeholders
from trl_opsd.options.normalize import end_tokens
from trl_opsd.parallel.precision import autocast


def padded_prompts(host: TrainerHost, prompt_ids: Sequence[list[int]]) -> dict[str, Tensor]:
    """Left-pads prompts by their length, never by the value of a token, on the accelerator's device."""
    rows = [torch.tensor(ids) for ids in prompt_ids]
    tensors = {
        "input_ids": pad(rows, host.processing_class.pad_token_id, "left", host.pad_to_multiple_of),
        "attention_mask": pad([torch.ones_like(row) for row in rows], 0, "left", host.pad_to_multiple_of),
    }
    return {name: tensor.to(host.accelerator.device) for name, tensor in tensors.items()}


def padded_rows(
    host: TrainerHost, prompt_ids: Sequence[list[int]], completions: Sequence[list[int]]
) -> dict[str, Tensor]:
    """TRL's keys for rows, padded as TRL pads them; an empty completion is one masked token of padding."""
    prompts, pad_id = padded_prompts(host, prompt_ids), host.processing_class.pad_token_id
    rows = [torch.tensor(ids or [pad_id]) for ids in completions]
    masks = [torch.full_like(row, bool(ids)) for row, ids in zip(rows, completions, strict=True)]
    device, multiple = host.accelerator.device, host.pad_to_multiple_of
    return {
        "prompt_ids": prompts["input_ids"],
        "prompt_mask": prompts["attention_mask"],
        "completion_ids": pad(rows, pad_id, "right", multiple).to(device),
        "completion_mask": pad(masks, 0, "right", multiple).to(device),
    }


def use_special_tokens(host: TrainerHost) -> None:
    """Restricts padding, end and placeholder tokens to ids within the student's embedding."""
    rows, tokenizer = model_shape(host.model)[0], host.processing_class
    ensure_special_tokens(tokenizer, rows)
    host.placeholders = placeholders(host.model.config, rows)
    host.eos_token_ids = end_tokens(host.args, known_end_tokens(host.eos_token_ids, rows), rows)
    of_both: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": host.eos_token_ids}
    host.generation_kwargs.update(of_both)
    host.generation_config.update(**of_both)
    host.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    host.model.generation_config.pad_token_id = tokenizer.pad_token_id


def call_in_student(host: TrainerHost, redirected: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """`function(student, *args)`; inside the wrapper's forward, and collective, if the student is sharded.

    ZeRO-3 and FSDP2 gather weights only there. A student that is not sharded needs no wrapper.
    """
    student = host.model_wrapped
    if not isinstance(student, CausalLM):  # else accelerate looks at what is installed to find nothing to unwrap
        student = host.accelerator.unwrap_model(student)
    if not is_split_model(student):
        return function(student, *args)
    head = student.get_output_embeddings()  # its parameters include those of an adapter that is disabled now
    register_external_parameters(student, head.parameters())
    function = with_current_autocast(partial(function, student, *args), host.accelerator.device)
    with torch.autocast(host.accelerator.device.type, enabled=False):  # DeepSpeed would warn of it
        return redirected(host.model_wrapped, student, function)


@contextmanager
def generating_student(host: TrainerHost, distribution: Any) -> Iterator[Any]:
    """The bare student in eval mode, gathered where it is sharded and the options allow it.

    Mode, gradient checkpointing and hooks are restored on exit, also after an exception. `distribution` is TRL's.
    """
    was_training = host.model.training
    host.model.eval()
    error = None
    try:
        with (
            unwrap_model_for_generation(
                host.model_wrapped,
                host.accelerator,
                gather_deepspeed3_params=host.args.ds3_gather_for_generation,
                generation_kwargs=host.generation_kwargs,
                gradient_checkpointing_kwargs=host.args.gradient_checkpointing_kwargs,
            ) as student,
            forwards_apart(host.model_wrapped) if host.args.ds3_gather_for_generation else nullcontext(),
            torch.no_grad(),
            # One context for all tokens, so that each weight is cast once and not for each token.
            autocast(host.accelerator),
            distribution.summon_full_params(host.model_wrapped, recurse=False),
        ):
            try:
                yield student
            except BaseException as caught:
                # Kept from TRL's context, which restores nothing when an exception passes through it.
                error = caught
        if error is not None:
            raise error
    finally:
        host.model.train(was_training)
        del error  # its traceback refers to this frame and would keep tensors alive


def parallelism_in_words(accelerator: Any, distribution: Any, sharing: int | None) -> str:
    """Number of processes, parallelism of the launch, and device."""
    number = accelerator.num_processes
    if distribution.zero_stage:
        kind = f", DeepSpeed ZeRO-{distribution.zero_stage}"
    elif distribution.is_fsdp:
        kind = f", FSDP{distribution.fsdp_version}"
        sizes = accelerator.parallelism_config
        if sizes is not None and sizes.dp_replicate_enabled:
            kind += f", {sizes.dp_replicate_size} replicas of {sizes.dp_shard_size} shards"
    else:
        kind = ", data parallelism (DDP)" if number > 1 else ""
    if sharing is not None:
        kind += f", {sharing} share each row in training"
    return f"{number}{kind}, on {accelerator.device.type}"
