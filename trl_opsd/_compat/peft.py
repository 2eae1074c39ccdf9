"""Inspects a PEFT model without changing it (base weights, merged weights, factors), and loads adapters of teachers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Embedding, Linear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from trl_opsd._compat.sharding import plain_name
from trl_opsd._compat.versions import replaced

CausalLM: TypeAlias = PreTrainedModel | PeftModel
"""A causal language model of `transformers`, bare or wrapped by `peft`."""
Merge: TypeAlias = Callable[[Any, list[str], Tensor], Tensor]
"""Adds adapters, by name, to a weight of a layer."""

_IRRELEVANT_FIELDS = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "runtime_config",
    "task_type",
)
"""Fields of an adapter's config that do not affect training."""
_BASE = ("base_layer", "original_module", "token_adapter")
"""Children of PEFT's wrappers that hold a part of the base model."""
_WRAPPER_NAMES = re.compile(rf"\.({'|'.join(_BASE)})(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Weight:
    """A named checkpoint tensor, computed on demand (`materialize`)."""

    name: str
    """Its name in the checkpoint."""
    base: Tensor
    """The student's own tensor, without adapters."""
    parts: tuple[Tensor, ...]
    """Tensors that must be gathered while it is materialised."""
    merge: Callable[[Tensor], Tensor] = Tensor.detach
    """Adds adapters to it."""
    quantize: Callable[[Tensor], Tensor] = Tensor.detach
    """What the student computes with in place of its own tensor."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Weight:
        """A tensor sent unchanged."""
        return cls(name, tensor, (tensor,))

    def materialize(self) -> Tensor:
        """Returns the tensor, which is read-only: it may share memory with the student's."""
        return self.merge(self.quantize(self.base))


def is_peft(model: CausalLM) -> bool:
    """Whether the model is wrapped by PEFT."""
    return isinstance(model, PeftModel)


def reads_prompts(config: Any) -> bool:
    """Whether an adapter adds to prompts or depends on their tokens, so that the layers alone do not compute it."""
    return bool(config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None))


def without_peft(model: CausalLM) -> Any:
    """The model inside the PEFT wrapper, or the model itself."""
    return model.get_base_model() if is_peft(model) else model


def has_foreign_adapter(model: CausalLM) -> bool:
    """Whether the model's layers have an adapter of a `PeftModel` elsewhere that wraps this model."""
    # An adapter that transformers loaded or added with `add_adapter` is the model's own.
    if is_peft(model) or getattr(model, "_hf_peft_config_loaded", False):
        return False
    return any(isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) for module in model.modules())


def base_parameters(model: CausalLM) -> dict[str, Tensor]:
    """The parameters of the base model, without those of adapters, by their names before PEFT wrapped it."""
    added = inside_adapters(model) if is_peft(model) else ()
    named = model.named_parameters(remove_duplicate=False)
    return {base_name(name): parameter for name, parameter in named if id(parameter) not in added}


def inside_adapters(model: CausalLM) -> set[int]:
    """Ids of the modules and tensors that adapters have put into a model, copies of its modules among them."""
    wrappers = (one for one in model.modules() if isinstance(one, BaseTunerLayer | AuxiliaryTrainingWrapper))
    children = (child for one in wrappers for name, child in one.named_children() if name not in _BASE)
    return {id(one) for child in children for one in (*child.modules(), *child.parameters(), *child.buffers())}


def base_name(name: str) -> str:
    """The name that a weight or a layer has in a checkpoint of the base model."""
    return _WRAPPER_NAMES.sub("", plain_name(name)).removeprefix("base_model.model.")


def describe_adapters(model: CausalLM) -> dict[str, Any] | None:
    """The configs of the adapters as JSON-serialisable values; `None` without PEFT."""
    if not is_peft(model):
        return None
    several = len(model.peft_config) > 1
    return {
        f"{adapter}.{name}" if several else name: sorted(value) if isinstance(value, set) else value
        for adapter, config in model.peft_config.items()
        for name, value in config.to_dict().items()
        if name not in _IRRELEVANT_FIELDS
    }


@contextmanager
def without_adapter(model: CausalLM) -> Iterator[None]:
    """Disables the adapters while the context is open, and restores `requires_grad` afterwards."""
    # PEFT would leave every adapter parameter trainable, also those that the method (MiCA) or the user keeps frozen.
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, required in trained:
            parameter.requires_grad_(required)


def rewrites_base(config: Any) -> bool:
    """Whether an adapter with this config changes the base weights at initialisation, as PiSSA does."""
    kind = getattr(config, "init_lora_weights", None)
    return isinstance(kind, str) and kind.lower().startswith(("pissa", "corda", "olora", "loftq", "lora_ga"))


def merged_weights(model: CausalLM) -> Iterator[Weight]:
    """The weights of a checkpoint of the base model with the active adapters merged, without changing the model.

    Refuses adapters of a type that cannot be merged here.
    """
    layers: dict[str, tuple[Any, Merge]] = {}
    trained: dict[str, Tensor] = {}
    for name, one in _wrapped(model):
        if isinstance(one, ModulesToSaveWrapper):
            copies = (one.modules_to_save[adapter] for adapter in one.active_adapters if adapter in one.modules_to_save)
            state = {} if (active := next(copies, None)) is None else active.state_dict(keep_vars=True)
            trained |= {f"{name}.{part}": tensor for part, tensor in state.items()}
        elif isinstance(one, ParamWrapper):
            layers[f"{name}.{one.parameter_name}"] = one, _merged_weight
        else:
            layers |= {f"{name}.weight": (one, _merged_weight), f"{name}.bias": (one, _merged_bias)}
    state = model.state_dict(keep_vars=True)
    added = inside_adapters(model)
    # Merged lazily, one at a time: all merged copies at once would take a second model's memory.
    for full, tensor in state.items():
        if id(tensor) in added:
            continue
        name = base_name(full)
        if name in layers:
            yield _merged(name, tensor, *layers[name])
        else:
            yield Weight.of(name, trained.get(name, tensor))


def lora_factors(model: CausalLM) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Factors A and B of the active adapter, and the scaling, by layer; only where [`why_not_plain_lora`] is `None`."""
    (adapter,) = model.active_adapters
    return {
        name: (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter])
        for name, layer in _wrapped(model)
        if isinstance(layer, Linear) and adapter in layer.lora_A
    }


def why_not_plain_lora(model: CausalLM) -> str | None:
    """Why the active adapter is not plain LoRA (one pair of factors for each linear layer), or `None` if it is."""
    adapters = model.active_adapters
    if len(adapters) != 1:
        return f"{len(adapters)} adapters are active"
    for name, layer in _wrapped(model):
        if isinstance(layer, ModulesToSaveWrapper):
            return "`modules_to_save` trains whole modules besides the adapter"
        if not isinstance(layer, Linear) or name.endswith("lm_head"):
            return f"the adapter reaches {name}, which is not a linear layer inside the model"
        if adapters[0] in layer.lora_variant:
            return "the adapter is a variant of LoRA such as DoRA"
        if layer.lora_bias.get(adapters[0]):
            return "`lora_bias` gives the adapter biases"
        if layer.merged:
            return f"the adapter is already merged into {name}"
    return None


def _wrapped(model: CausalLM) -> list[tuple[str, Any]]:
    """PEFT's wrappers, with the names of what they wrap in a checkpoint; refuses those that cannot be merged."""
    found = []
    for name, one in model.named_modules():
        if isinstance(one, Linear | Embedding | ParamWrapper | ModulesToSaveWrapper):
            found.append((base_name(name), one))
        elif isinstance(one, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise ValueError(
                f"The adapter of {base_name(name)} is a {type(one).__name__}; vLLM supports only LoRA on linear layers "
                "and embeddings, and `modules_to_save`: use a `LoraConfig` with these, or set `use_vllm=False`."
            )
    return found


def _merged(name: str, base: Tensor, layer: Any, merge: Merge) -> Weight:
    adapters = [] if layer.merged or layer.disable_adapters else layer.active_adapters
    adapters = [adapter for adapter in adapters if adapter in layer.scaling]
    if merge is _merged_bias:
        adapters = [adapter for adapter in adapters if layer.lora_bias.get(adapter)]
    if not adapters:
        return Weight.of(name, base)
    own = (child for kind, child in layer.named_children() if kind != "base_layer")
    parts = (base, *(one for child in own for one in child.parameters()))
    return Weight(name, base, parts, partial(merge, layer, adapters))


def _merged_weight(layer: Any, adapters: list[str], base: Tensor) -> Tensor:
    """W + sBA, summed in float32, so that it is rounded only once."""
    weight = base.detach().float()
    for adapter in adapters:
        variant = layer.lora_variant.get(adapter)
        if variant is None:
            weight = weight + layer.get_delta_weight(adapter).detach().float()
        else:
            # Variants such as DoRA are not a sum.
            weight = variant.merge_safe(layer, adapter, weight).detach()
    return weight


def _merged_bias(layer: Any, adapters: list[str], base: Tensor) -> Tensor:
    bias = base.detach().float()
    for adapter in adapters:
        bias = bias + layer.lora_B[adapter].bias.detach().float() * layer.scaling[adapter]
    return bias


# ---- Adapters that are loaded ---------------------------------------------------------------------------------------


def read_config(folder: str | Path) -> PeftConfig:
    """The config of an adapter in a folder."""
    return PeftConfig.from_pretrained(str(folder))


def with_adapter(model: CausalLM, config: PeftConfig, file: Path, name: str) -> PeftModel:
    """Puts an adapter from its file into the layers of a model, under a name, beside others; active and frozen.

    Raises:
        ValueError: The file has not exactly the adapter's weights, or the output head would change.
    """
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        peft_model = model
    else:
        peft_model = get_peft_model(model, config, name)
    loaded, base = load_file(file), peft_model.state_dict()
    # With LoRA on embeddings, or after they are resized, PEFT saves those of the base too, and loads them into it.
    wrong = [key for key in loaded.keys() & base.keys() if not torch.equal(loaded[key].to(base[key]), base[key])]
    if wrong:
        raise ValueError(f"its file has {wrong[0]} of the base with other values or another shape")
    found = peft_model.load_adapter(str(file.parent), name, torch_device="cpu")
    for what, keys in (("lacks", found.missing_keys), ("has too much:", found.unexpected_keys)):
        if keys:
            raise ValueError(f"its file {what} {keys[0]} and {len(keys) - 1} more")
    activate(peft_model, name)
    head = peft_model.get_output_embeddings()
    if not isinstance(head, ModulesToSaveWrapper) and any(name in one.split(".") for one, _ in head.named_parameters()):
        raise ValueError("it changes the output head, whose weights the loss uses without it")
    return peft_model


def adapter_weights(model: PeftModel, name: str) -> dict[str, Tensor]:
    """The weights of one adapter by their names in its file; the tensors themselves."""
    found: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return found


def activate(model: PeftModel, name: str) -> None:
    """Makes an adapter the only active one, and leaves all frozen."""
    model.set_adapter(name)
    model.requires_grad_(False)


@contextmanager
def called_before_peft(look: Callable[[Any], None]) -> Iterator[None]:
    """Calls `look` with the student just before TRL wraps it with PEFT, as TRL loads and wraps it in one call."""
    from trl_opsd._compat.trl import distillation_trainer  # imports vLLM, which `trl-opsd plan` does not need

    wrap = distillation_trainer.get_peft_model

    def seen(model: Any, *args: Any, **kwargs: Any) -> Any:
        look(model)
        return wrap(model, *args, **kwargs)

    with replaced(distillation_trainer, get_peft_model=seen):
        yield
