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

CausalLM: TypeAlias = PreTrainedModel | PeftModel
"""A causal language model of `transformers`, bare or wrapped by `peft`."""

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
_WRAPPER_NAMES = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")
"""Parts that PEFT inserts into the names of the base model's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFactors:
    """The adapter of one linear layer: its output gains `scaling * B A x`."""

    name: str
    """The layer's name in a checkpoint of the base model."""
    a: Tensor
    """[r, in]."""
    b: Tensor
    """[out, r]."""
    scaling: float
    rank: int


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
    wrappers = _modules_of(model, (BaseTunerLayer, AuxiliaryTrainingWrapper)) if is_peft(model) else {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(name)
        # Adapter parameters are inside a wrapper, but not below its original layer.
        inside = _inside(name, wrappers)
        part = name.removeprefix(f"{inside}.").partition(".")[0]
        if inside is None or part in ("base_layer", "original_module"):
            found[_plain(_WRAPPER_NAMES.sub("", name))] = parameter
    return found


def adapters_inside(model: CausalLM) -> set[int]:
    """Ids of the modules that adapters have put into the layers of a model."""
    found = set[int]()
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            children = (child for name, child in layer.named_children() if name != "base_layer")
            found |= {id(one) for child in children for one in child.modules()}
    return found


def plain_layer(name: str) -> str:
    """The name of a layer in a checkpoint of the base model."""
    return _plain(_WRAPPER_NAMES.sub("", f"{plain_name(name)}.").removesuffix("."))


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
    tuned, saved = _tuned_layers(model), _saved_modules(model)
    # Merged lazily, one at a time: all merged copies at once would take a second model's memory.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if layer_name := _inside(name, tuned):
            kind = name.removeprefix(f"{layer_name}.base_layer.")
            if kind != name:  # otherwise a weight of the adapter
                outer, layer = _holder(layer_name, kind, tuned)
                yield _merged(_plain(f"{outer}.{kind}"), tensor, layer, kind)
        elif module_name := _inside(name, saved):
            active = f"{module_name}.modules_to_save.{saved[module_name].active_adapter}."
            if name.startswith(active):
                yield Weight.of(_plain(f"{module_name}.{name.removeprefix(active)}"), tensor)
        else:
            yield Weight.of(_plain(name), tensor)


def lora_factors(model: CausalLM) -> list[LoraFactors]:
    """The factors of the active adapter, layer by layer. Valid only if [`why_not_plain_lora`] returns `None`."""
    (adapter,) = model.active_adapters
    return [
        LoraFactors(
            name=_plain(name),
            a=layer.lora_A[adapter].weight,
            b=layer.lora_B[adapter].weight,
            scaling=layer.scaling[adapter],
            rank=layer.r[adapter],
        )
        for name, layer in _tuned_layers(model).items()
        if adapter in layer.lora_A
    ]


def why_not_plain_lora(model: CausalLM) -> str | None:
    """Why the active adapter is not plain LoRA (one pair of factors for each linear layer), or `None` if it is."""
    adapters, tuned = model.active_adapters, _tuned_layers(model)
    if len(adapters) != 1:
        return f"{len(adapters)} adapters are active"
    if _saved_modules(model):
        return "`modules_to_save` trains whole modules besides the adapter"
    for name, layer in tuned.items():
        if not isinstance(layer, Linear) or name.endswith(".lm_head"):
            return f"the adapter reaches {_plain(name)}, which is not a linear layer inside the model"
        if adapters[0] in layer.lora_variant:
            return "the adapter is a variant of LoRA such as DoRA"
        if layer.lora_bias.get(adapters[0]):
            return "`lora_bias` gives the adapter biases"
        if layer.merged:
            return f"the adapter is already merged into {_plain(name)}"
    return None


def _tuned_layers(model: CausalLM) -> dict[str, Any]:
    tuned = _modules_of(model, BaseTunerLayer)
    for name, layer in tuned.items():
        if not isinstance(layer, Linear | Embedding | ParamWrapper):
            raise ValueError(
                f"The adapter of {_plain(name)} is a {type(layer).__name__}; vLLM supports only LoRA on linear layers "
                "and embeddings: use a `LoraConfig`, or set `use_vllm=False`."
            )
    return tuned


def _saved_modules(model: CausalLM) -> dict[str, Any]:
    saved = _modules_of(model, AuxiliaryTrainingWrapper)
    for name, module in saved.items():
        if not isinstance(module, ModulesToSaveWrapper):
            raise ValueError(
                f"{_plain(name)} is wrapped in a {type(module).__name__}: with vLLM, besides LoRA, only "
                "`modules_to_save` is supported; use that, or set `use_vllm=False`."
            )
    return saved


def _modules_of(model: CausalLM, kind: type | tuple[type, ...]) -> dict[str, Any]:
    return {plain_name(name): module for name, module in model.named_modules() if isinstance(module, kind)}


def _inside(name: str, modules: dict[str, Any]) -> str | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in modules), None)


def _holder(name: str, kind: str, tuned: dict[str, Any]) -> tuple[str, Any]:
    """The layer's name and the wrapper of one of its weights: experts have nested wrappers, one per weight."""
    while isinstance(tuned[name], ParamWrapper) and tuned[name].parameter_name != kind:
        outer = name.removesuffix(".base_layer")
        if outer == name or outer not in tuned:
            break
        name = outer
    layer = tuned[name]
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name, layer


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _merged(name: str, base: Tensor, layer: Any, kind: str) -> Weight:
    adapters = [] if layer.merged or layer.disable_adapters else layer.active_adapters
    adapters = [adapter for adapter in adapters if adapter in layer.scaling]
    parts, merge = tuple(layer.parameters()), None
    if isinstance(layer, ParamWrapper):
        parts = (base, *layer.lora_A.parameters(), *layer.lora_B.parameters())
        merge = _merged_weight if kind == layer.parameter_name else None
    elif kind == "weight":
        merge = _merged_weight
    elif kind == "bias" and any(layer.lora_bias.get(adapter) for adapter in adapters):
        merge = _merged_bias
    if merge is None or not adapters:
        return Weight.of(name, base)
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
        if layer.lora_bias.get(adapter):
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
        raise ValueError(f"it has other values, or another shape, of weights of the base: {wrong[0]}")
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

    distillation_trainer.get_peft_model = seen
    try:
        yield
    finally:
        distillation_trainer.get_peft_model = wrap
