"""What reloading weights in vLLM needs besides the weights."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info
from vllm.platforms import current_platform

HEAD = "lm_head.weight"
"""The checkpoint name of the output head, which vLLM rejects for models that always use their embeddings instead."""


def has_head(model: Any) -> bool:
    """Whether a model, or the language model inside a multimodal one, has an output head besides its embeddings."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def expert_kernels(model: Any) -> dict[Any, Any]:
    """Kernels of mixtures of experts that must be rebuilt after new weights, by the method object that holds them."""
    # Only on the CPU does vLLM pack the experts' weights when it builds the kernel, and never repack them.
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()] if current_platform.is_cpu() else []
    return {method: kernel for method in methods if (kernel := getattr(method, "moe_kernel", None)) is not None}


def end_reload(runner: Any) -> None:
    """Ends an aborted reload; otherwise vLLM would count partially loaded layers toward the next one."""
    # Incomplete layers get their previous tensors back, in the layout that vLLM computes with.
    model = runner.get_model()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        # vLLM counts loaded elements to know when a layer is complete.
        info.load_numel = 0
        info.loaded_weights.clear()
    finalize_layerwise_reload(model, runner.model_config)
