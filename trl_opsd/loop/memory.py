"""Adds to an out-of-memory error its phase, and the options that reduce what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trl_opsd._compat.versions import CHECKPOINTING

if TYPE_CHECKING:
    pass

_MESSAGES = (
    "DefaultCPUAllocator",
    "can't allocate memory",
    "not enough memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache",
    "Free memory on device",
)
"""Out-of-memory messages of torch on a CPU and of vLLM at its start, which have no error class of their own."""
_NOTE_PREFIX = "Out of memory in phase "

ADVICE = {
    "start": "`vllm_gpu_memory_utilization` (vLLM's share of the device: raise it if the cache does not fit, lower it "
    "if the student does not), `vllm_max_model_length`, `vllm_tensor_parallel_size`, `vllm_enable_sleep_mode=True`, "
    "`teacher_offload`",
    "complete": "`per_device_train_batch_size` x `gradient_accumulation_steps` (rows generated together), "
    "`max_completion_length`, `teacher_offload`, `use_vllm=True`",
    "act": "environments with less state, `per_device_train_batch_size` x `gradient_accumulation_steps` (one per row)",
    "sync": "`vllm_weight_sync='adapter'` with LoRA, `vllm_gpu_memory_utilization`, `vllm_enable_sleep_mode=True`",
    "reward": "a smaller reward model, or one in bfloat16, `per_device_train_batch_size` x "
    "`gradient_accumulation_steps` and `per_device_eval_batch_size` (completions scored), `max_completion_length`",
    "teach": "`teacher_offload='cpu'` or 'stream', `teacher_cache_device='cpu'`, `per_device_train_batch_size` x "
    "`gradient_accumulation_steps` (rows scored), `max_completion_length`",
    "compare": "`per_device_train_batch_size` (raise `gradient_accumulation_steps` instead), "
    f"`{CHECKPOINTING}=True`, `loss_chunk_tokens`, `teacher_offload`, `teacher_cache_device='cpu'`, LoRA",
    "step": "LoRA, `optim` with smaller states, `teacher_offload`, ZeRO or FSDP2",
    "save": "`save_only_model=True`, ZeRO or FSDP2 with sharded checkpoints",
}
"""Options that reduce the memory of a phase, the cheapest first."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or vLLM says that memory does not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | ValueError) and any(words in str(error) for words in _MESSAGES)


def explain(error: Exception, phase: str) -> None:
    """Notes `phase`, a key of [`ADVICE`], in an out-of-memory error; of nested phases the innermost."""
    noted = any(line.startswith(_NOTE_PREFIX) for line in getattr(error, "__notes__", ()))
    if is_out_of_memory(error) and not noted:
        error.add_note(f"{_NOTE_PREFIX}{phase!r}. Options that reduce it: {ADVICE[phase]}.")
