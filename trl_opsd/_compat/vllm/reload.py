"""What vLLM needs besides new weights to compute with them."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info
from vllm.platforms import current_platform

HEAD = "lm_head.weight"
"""A checkpoint's name of the output head, which vLLM refuses for models that always use their embeddings."""


def has_head(model: Any) -> bool:
    """Whether a model has a head that is no other name of its embeddings; of one that also sees, its text has it."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def expert_kernels(model: Any) -> dict[Any, Any]:
    """Kernels of a mixture of experts that have to be made anew with its weights, by what holds them.

    On the CPU: vLLM packs experts where it makes their kernel, and leaves weights that come later as they are.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()] if current_platform.is_cpu() else []
    return {method: kernel for method in methods if (kernel := getattr(method, "moe_kernel", None)) is not None}


def end_reload(runner: Any) -> None:
    """Ends a reload that broke off; vLLM would count what it has seen of a layer as a part of the next one.

    Layers that were not complete get their tensors back, in the shape that vLLM computes with.
    """
    model = runner.get_model()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()
    finalize_layerwise_reload(model, runner.model_config)
