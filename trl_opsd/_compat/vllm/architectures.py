"""What vLLM's implementation of an architecture supports, and its refusals in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import nn
from vllm.config.lora import MaxLoRARanks
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.triton_utils import HAS_TRITON

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Config names of the number of experts of a layer."""
HEAD = "lm_head.weight"
"""The checkpoint name of the output head, which vLLM rejects for models that always use their embeddings instead."""
_REASON = 400
"""Maximum length of vLLM's own text in an error, in characters; it may list hundreds of architectures."""
LORA_RANKS: tuple[int, ...] = get_args(MaxLoRARanks)
"""Maximum LoRA ranks an engine can be built with; adapters of smaller ranks fit."""


def why_no_adapter(config: Any, model_impl: str, layers: Iterable[str]) -> str | None:
    """Why vLLM's model of an architecture cannot take an adapter on these layers, or `None` if none is known."""
    if not HAS_TRITON and any(getattr(config.get_text_config(), name, None) for name in _EXPERTS):
        return "with an adapter, vLLM runs a mixture of experts with Triton, which is not available"
    known = [ModelRegistry.models[name] for name in config.architectures or () if name in ModelRegistry.models]
    if model_impl == "transformers" or not known:
        return None
    with starting(config.name_or_path):
        model = known[0].load_model_cls()
    if not supports_lora(model):
        return f"vLLM's {config.architectures[0]} takes no adapters"
    for name in layers:
        last = name.rpartition(".")[2]
        # vLLM gives a fused layer the adapters of its parts (q, k, v); of a checkpoint that is fused there is only one.
        parts = getattr(model, "packed_modules_mapping", {}).get(last, [last])
        if parts != [last]:
            return f"vLLM expects the adapter of {name} in parts, as {' and '.join(parts)}"
    return None


def may_have_head(config: Any) -> bool:
    """Whether vLLM's model of an architecture may have an output head besides its embeddings."""
    # Searches the source of the model class, as a server's model cannot be inspected.
    names = [name for name in config.architectures or () if name in ModelRegistry.models]
    if not names:
        return True
    with starting(config.name_or_path):
        model = ModelRegistry.models[names[0]].load_model_cls()
    made_of = [kind for kind in inspect.getmro(model) if issubclass(kind, nn.Module) and kind is not nn.Module]
    return any(".lm_head" in inspect.getsource(kind) for kind in made_of)


def has_head(model: Any) -> bool:
    """Whether a model, or the language model inside a multimodal one, has an output head besides its embeddings."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


@contextmanager
def starting(model: str) -> Iterator[None]:
    """Re-raises errors at an engine's start as a `ValueError` about the checkpoint, except out-of-memory errors."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise refused(f"does not start an engine for the student's checkpoint {model!r}", error) from error


def refused(what: str, error: Exception) -> ValueError:
    """An error that says what vLLM does not do, with the beginning of vLLM's own message."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON]
    return ValueError(f"vLLM {what}, {reason}. Where it does not know the architecture, set `use_vllm=False`.")
