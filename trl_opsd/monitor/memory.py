"""Adds to an out-of-memory error the phase it occurred in, what that phase holds, and the options that reduce it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from trl_opsd._compat.versions import CHECKPOINTING

_MESSAGES = (
    "DefaultCPUAllocator",
    "can't allocate memory",
    "not enough memory",
    "No available memory for the cache blocks",
    "Free memory on device",
)
"""Out-of-memory messages of torch on a CPU and of vLLM at its start, which have no error class of their own."""
_NOTE_PREFIX = "Out of memory in phase "

ADVICE = {
    "start": "`vllm_gpu_memory_utilization` (vLLM's share of the device: more if its cache has no room, less if the "
    "student has none), `vllm_max_model_length`, `vllm_enable_sleep_mode=True`, `teacher_offload`",
    "complete": "`per_device_train_batch_size` x `gradient_accumulation_steps` (rows written together), "
    "`max_completion_length`, `teacher_offload`, `use_vllm=True`",
    "sync": "`vllm_weight_sync='adapter'` with LoRA, `vllm_gpu_memory_utilization`, `vllm_enable_sleep_mode=True`",
    "reward": "a smaller reward model, or one that is passed in bfloat16, `per_device_train_batch_size` x "
    "`gradient_accumulation_steps` and `per_device_eval_batch_size` (completions scored), `max_completion_length`",
    "teach": "`teacher_offload='cpu'` or 'stream', `teacher_cache_device='cpu'`, `per_device_train_batch_size` x "
    "`gradient_accumulation_steps` (rows read), `max_completion_length`",
    "compare": "`per_device_train_batch_size` (raise `gradient_accumulation_steps` instead), "
    f"`{CHECKPOINTING}=True`, `loss_chunk_tokens`, `teacher_offload`, `teacher_cache_device='cpu'`, LoRA",
    "step": "LoRA, `optim` with smaller states, `teacher_offload`, ZeRO or FSDP2",
    "save": "`save_only_model=True`, ZeRO or FSDP2 with sharded checkpoints",
}
"""Options that reduce the memory of a phase, the cheapest first."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | ValueError) and any(words in str(error) for words in _MESSAGES)


def explain(error: Exception, phase: str, parts: Callable[[], Mapping[str, int]]) -> None:
    """Notes `phase`, a key of [`ADVICE`], in an out-of-memory error; of nested phases the innermost, which ends first.

    `parts` is called for such an error only.
    """
    noted = any(line.startswith(_NOTE_PREFIX) for line in getattr(error, "__notes__", ()))
    if is_out_of_memory(error) and not noted:
        error.add_note(_note(phase, _held(parts)))


def _held(parts: Callable[[], Mapping[str, int]]) -> Mapping[str, int]:
    """What a phase holds; empty if that cannot be computed, since a note must not replace its error."""
    try:
        return parts()
    except Exception:
        return {}


def _note(phase: str, parts: Mapping[str, int]) -> str:
    known = [f"  {_shown(size):>9}  {name}" for name, size in parts.items() if size]
    held = "\n".join([f"{_NOTE_PREFIX}{phase!r}, which by its shapes holds at least:", *known, *_measured()])
    return f"{held}\nOptions that reduce it: {ADVICE[phase]}."


def _measured() -> list[str]:
    accelerator = torch.accelerator
    with suppress(RuntimeError):  # there is none, or it does not count
        tensors, cached = accelerator.memory_allocated(), accelerator.memory_reserved()
        free, total = accelerator.get_memory_info()
        held = f"{_shown(tensors)} in tensors, {_shown(cached)} held by torch"
        return [f"Measured: {held}, {_shown(free)} of {_shown(total)} free."]
    return []


def _shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3f} MB"
