"""Adds to an error of lacking memory which phase it came in, what that phase holds, and which options make it less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

_SAYS = (
    "DefaultCPUAllocator",
    "can't allocate memory",
    "not enough memory",
    "No available memory for the cache blocks",
    "Free memory on device",
)
"""What torch says on a CPU, and vLLM when it starts; neither has a class of its own for it."""
_BEGINNING = "Out of memory in phase "

ADVICE = {
    "start": "`vllm_gpu_memory_utilization` (vLLM's share of the device: more if its cache has no room, less if the "
    "student has none), `vllm_max_model_length`, `vllm_enable_sleep_mode=True`, `teacher_offload`",
    "complete": "`per_device_train_batch_size` x `gradient_accumulation_steps` (rows written together), "
    "`max_completion_length`, `teacher_offload`, `use_vllm=True`",
    "sync": "`vllm_weight_sync='adapter'` with LoRA, `vllm_gpu_memory_utilization`, `vllm_enable_sleep_mode=True`",
    "teach": "`teacher_offload='cpu'` or 'stream', `teacher_cache_device='cpu'`, `per_device_train_batch_size` x "
    "`gradient_accumulation_steps` (rows read), `max_completion_length`",
    "compare": "`per_device_train_batch_size` (raise `gradient_accumulation_steps` instead), "
    "`gradient_checkpointing=True`, `loss_chunk_tokens`, `teacher_offload`, `teacher_cache_device='cpu'`, LoRA",
    "step": "LoRA, `optim` with smaller states, `teacher_offload`, ZeRO or FSDP2",
    "save": "`save_only_model=True`, ZeRO or FSDP2 with sharded checkpoints",
}
"""Options that reduce what a phase takes, the ones that cost least first."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | ValueError) and any(words in str(error) for words in _SAYS)


@contextmanager
def explained(phase: str, parts: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Adds a note to an error of lacking memory that comes out of what runs inside; of nested phases, the inner one.

    Args:
        phase (`str`):
            A key of [`ADVICE`].
        parts (`Callable`):
            What the phase holds, in bytes by name; asked for only then.
    """
    try:
        yield
    except Exception as error:
        if ran_out(error) and not any(line.startswith(_BEGINNING) for line in getattr(error, "__notes__", ())):
            error.add_note(_note(phase, parts()))
        raise


def _note(phase: str, parts: Mapping[str, int]) -> str:
    known = [f"  {_shown(size):>9}  {name}" for name, size in parts.items() if size]
    held = "\n".join([f"{_BEGINNING}{phase!r}, which by its shapes holds at least:", *known, *_measured()])
    return f"{held}\nWhat makes it less: {ADVICE[phase]}."


def _measured() -> list[str]:
    if not torch.cuda.is_available():
        return []
    free, total = torch.cuda.mem_get_info()
    tensors, cached = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    held = f"{_shown(tensors)} in tensors, {_shown(cached)} held by torch"
    return [f"Measured: {held}, {_shown(free)} of {_shown(total)} free."]


def _shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3f} MB"
