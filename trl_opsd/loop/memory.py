"""Adds to an out-of-memory error its phase, what that phase holds by its shapes, and the options that reduce it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from trl_opsd._compat.sharding import whole_numel
from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.loop.trainer_host import TrainerHost
from trl_opsd.losses.streamed import memory_of, tile_bytes
from trl_opsd.models.backbone import shape_of
from trl_opsd.models.weights import cached_per_token

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


def explain(error: Exception, phase: str, parts: Callable[[], Mapping[str, int]]) -> None:
    """Notes `phase`, a key of [`ADVICE`], in an out-of-memory error; of nested phases the innermost, which ends first.

    `parts` is called for such an error only.
    """
    noted = any(line.startswith(_NOTE_PREFIX) for line in getattr(error, "__notes__", ()))
    if is_out_of_memory(error) and not noted:
        held: Mapping[str, int] = {}
        with suppress(Exception):  # a note must not replace its error
            held = parts()
        known = [f"  {_shown(size):>9}  {name}" for name, size in held.items() if size]
        lines = [f"{_NOTE_PREFIX}{phase!r}, which needs at least (computed from shapes):", *known, *_measured()]
        error.add_note("\n".join([*lines, f"Options that reduce it: {ADVICE[phase]}."]))


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


# ---- What a phase holds ---------------------------------------------------------------------------------------------

_LOGITS = 2 * 4
"""Bytes per logit: both models, float32."""
_MOMENTS = 2
"""Of Adam, each as large as its parameter."""


def footprint(host: TrainerHost, phase: str) -> dict[str, int]:
    """A lower bound on the memory of a phase, a key of [`ADVICE`]: bytes by description, without activations, which
    vary.
    """
    args, trained = host.args, [one for one in host.model.parameters() if one.requires_grad]
    teachers = host.teaching.teachers
    written = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows, tokens = written if host.model.training else args.per_device_eval_batch_size, args.max_completion_length
    held = {"the student's weights": _bytes(host.model.parameters())}
    for name, teacher in teachers.items():
        model = getattr(teacher, "model", None)
        if model is not None and model is not host.model:  # in self-distillation counted as the student's
            held[f"weights of teacher {name!r}"] = _bytes(model.parameters())
    if phase == "complete" and (of_token := cached_per_token(host.model.config)):
        cache = f"the key-value cache of {rows} x {tokens} completion tokens, without prompts"
        held[cache] = rows * tokens * of_token * host.model.dtype.itemsize
    if phase in ("compare", "step"):
        held |= {"gradients": _bytes(trained), "optimizer states of Adam": _MOMENTS * _bytes(trained)}
    if phase in ("teach", "compare"):
        widest = max(shape_of(head)[1] * head.weight.element_size() for head in teachers.heads)
        held[f"the teacher's hidden states of {rows} x {tokens} tokens, at most"] = rows * tokens * widest
    if phase == "compare":
        chunk, device = args.loss_chunk_tokens, host.accelerator.device
        size = tile_bytes(memory_of(device)) if chunk is None else chunk * host.limits.vocabulary * _LOGITS
        held["tiles of logits, at most"] = size
    return held


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the full tensors, even where a process holds only a shard."""
    return sum(whole_numel(one) * one.element_size() for one in tensors)
