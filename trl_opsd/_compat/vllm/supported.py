"""What vLLM supports: adapters and heads of an architecture, and sampling options; its refusals in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.sampling_params import StructuredOutputsParams
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondLogitsProcessor

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Config names of the number of experts of a layer."""
HEAD = "lm_head.weight"
"""The checkpoint name of the output head, which vLLM rejects for models that always use their embeddings instead."""
LORA_RANKS: tuple[int, ...] = get_args(MaxLoRARanks)
"""Maximum LoRA ranks an engine can be built with; adapters of smaller ranks fit."""


# ---- Architectures ---------------------------------------------------------------------------------------------------


def why_no_adapter(config: Any, model_impl: str, layers: Iterable[str]) -> str | None:
    """Why vLLM's model of an architecture cannot take an adapter on these layers, or `None` if none is known."""
    if not HAS_TRITON and any(getattr(config.get_text_config(), name, None) for name in _EXPERTS):
        return "with an adapter, vLLM runs a mixture of experts with Triton, which is not available"
    model = None if model_impl == "transformers" else _model_class(config)
    if model is None:
        return None
    if not supports_lora(model):
        return f"vLLM's {config.architectures[0]} does not support LoRA"
    for name in layers:
        last = name.rpartition(".")[2]
        # vLLM gives a fused layer the adapters of its parts (q, k, v); of a checkpoint that is fused there is only one.
        parts = getattr(model, "packed_modules_mapping", {}).get(last, [last])
        if parts != [last]:
            return f"vLLM expects the adapter of {name} split into {' and '.join(parts)}"
    return None


def may_have_head(config: Any) -> bool:
    """Whether vLLM's model of an architecture may have an output head besides its embeddings."""
    # Searches the source of the model class, as a server's model cannot be inspected.
    model = _model_class(config)
    if model is None:
        return True
    made_of = [kind for kind in inspect.getmro(model) if issubclass(kind, nn.Module) and kind is not nn.Module]
    return any(".lm_head" in inspect.getsource(kind) for kind in made_of)


def has_head(model: Any) -> bool:
    """Whether a model, or the language model inside a multimodal one, has an output head besides its embeddings."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def _model_class(config: Any) -> Any:
    """vLLM's own model of an architecture; `None` if it has none."""
    names = [name for name in config.architectures or () if name in ModelRegistry.models]
    return ModelRegistry.models[names[0]].load_model_cls() if names else None


# ---- Sampling --------------------------------------------------------------------------------------------------------


def request_options() -> list[str]:
    """Names of the sampling options that a request to a server may contain; the server ignores others."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # takes seconds to import

    known = inspect.signature(SamplingParams).parameters
    return [name for name in CompletionRequest.model_fields if name in known]


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """Checks options for `vllm.SamplingParams`, and converts them to the types it expects."""
    if isinstance(given.get("structured_outputs"), dict):
        given = {**given, "structured_outputs": StructuredOutputsParams(**given["structured_outputs"])}
    if given.get("stop"):  # strings are matched against text
        given = {**given, "detokenize": True}
    try:
        SamplingParams(**given)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ValueError(f"vLLM rejects a generation option: {error}") from error
    return given


def vocabulary_mask(vocabulary: int, placeholders: Collection[int] = ()) -> type[Any]:
    """A logits processor that gives ids from `vocabulary` on, and `placeholders`, probability 0, for a whole batch."""
    never = torch.tensor([*placeholders], dtype=torch.long)

    # Both of vLLM's model runners take it: the second passes other arguments and requires its own base class.
    class VocabularyMask(LogitsProcessor, SecondLogitsProcessor):
        def __init__(self, vllm_config: Any, *_: Any) -> None:
            """Needs nothing from the engine."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Does nothing: the mask is the same for every request."""

        def apply(self, logits: Tensor, *_: Any) -> Tensor:
            nonlocal never
            never = never.to(logits.device)  # once: a copy waits for the device
            logits[:, vocabulary:].fill_(-torch.inf)
            return logits.index_fill_(1, never, -torch.inf)

    return VocabularyMask
