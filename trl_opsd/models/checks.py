"""Checks of models as a user passes them: that they can be loaded, fit the device and the launch, and are trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, TrainingArguments
from transformers.integrations import is_fsdp_enabled
from transformers.utils import CONFIG_NAME, cached_file

from trl_opsd._compat.peft import CausalLM, is_merged, is_peft, without_peft
from trl_opsd._compat.sharding import class_of, whole_numel
from trl_opsd.data.readers import PromptLimits
from trl_opsd.models.backbone import context_of, model_shape
from trl_opsd.parallel.precision import check_trained_dtypes

logger = get_logger(__name__)


PLACE_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
"""Loading options that locate a model."""
_NAMED = 8
"""Maximum weights that a message names."""


# ---- Before a model is loaded ---------------------------------------------------------------------------------------


_ADAPTER_CONFIG = "adapter_config.json"
"""File in which PEFT describes an adapter."""


def language_config(
    model: Any, called: str, loading: Mapping[str, Any], trust: str = "trust_remote_code"
) -> Mapping[str, Any]:
    """The config of a causal language model with its `text_config` merged in; empty for what is neither model nor path.

    Refuses a path that cannot be found, another kind of model, and Python code that the option `trust` does not allow.
    """
    if isinstance(model, str):
        found, why = _config_file(model, loading)
        if found is None:
            raise ValueError(
                f"`{called}={model!r}` is neither a folder with a `{CONFIG_NAME}` nor an accessible model on the Hub: "
                f"correct it, or log in. {why}"
            )
        config = json.loads(Path(found).read_text(encoding="utf-8"))
        if "auto_map" in config:
            with naming_trust(f"`{called}={model!r}`", trust, loading):
                trusted = loading.get("trust_remote_code", False)
                AutoConfig.from_pretrained(model, trust_remote_code=trusted, **place_of(loading))
        causal, kind = not config.get("is_encoder_decoder", False), (config.get("architectures") or ["model"])[0]
    elif isinstance(model, PreTrainedModel) or (isinstance(model, nn.Module) and is_peft(model)):
        inner = without_peft(model)
        causal, kind = inner.can_generate() and not inner.config.is_encoder_decoder, type(inner).__name__
        config = inner.config.to_dict()
    else:
        return {}
    if not causal:
        raise ValueError(
            f"`{called}` is a {kind}, which does not generate text token by token: pass a causal language model, for "
            "instance one loaded with `AutoModelForCausalLM`."
        )
    return {**config, **(config.get("text_config") or {})}


def place_of(loading: Mapping[str, Any]) -> dict[str, Any]:
    return {name: loading[name] for name in PLACE_OPTIONS if loading.get(name) is not None}


def _config_file(path: str, loading: Mapping[str, Any]) -> tuple[str | None, str]:
    """The path of a model's config, or `None` and the reason."""
    why = "There is none."
    if (Path(path) / _ADAPTER_CONFIG).is_file():
        why = (
            "It contains only an adapter: load its base model and pass `PeftModel.from_pretrained(base, path, "
            "is_trainable=True)`. If only a path can be passed, save both as one model, "
            "`AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload().save_pretrained(folder)` with its "
            "tokenizer, and pass that folder."
        )
    try:
        return cached_file(path, CONFIG_NAME, **place_of(loading)), why
    except OSError as error:
        return None, str(error).splitlines()[0]


def check_own_loss(config: Mapping[str, Any]) -> None:
    """Refuses a student that adds an auxiliary loss (load balancing, z-loss) in its forward, which is never called."""
    weight_of_routers = config.get("router_aux_loss_coef", config.get("aux_loss_coef", 1.0))
    if config.get("output_router_logits") and weight_of_routers != 0:
        option, loss, off = "output_router_logits", "a load-balancing loss of its experts", "False"
    elif config.get("z_loss_coefficient"):
        option, loss, off = "z_loss_coefficient", "a z-loss of its log-normalisers", "0.0"
    else:
        return
    raise ValueError(
        f"`{option}={config[option]}` makes the student's own forward add {loss}, but distillation does not use it, so "
        f"it would have no effect. Set `{option}` to {off} in the student's config, or in `model_init_kwargs`."
    )


def student_limits(student: CausalLM, args: Any) -> PromptLimits:
    """Limits of the student's prompts and completions."""
    context = context_of(student)
    if args.has_engine and args.vllm_max_model_length is not None:
        context = min(args.vllm_max_model_length, context or args.vllm_max_model_length)
    limits = PromptLimits(vocabulary=model_shape(student)[0], context=context, completion=args.max_completion_length)
    limits.check_room()
    return limits


# ---- While it is loaded ---------------------------------------------------------------------------------------------


@contextmanager
def naming_trust(what: str, option: str, loading: Mapping[str, Any]) -> Iterator[None]:
    """Replaces transformers' refusal of a repository's Python code by one that names the option of this trainer."""
    try:
        yield
    except (ValueError, OSError) as error:
        if loading.get("trust_remote_code") or "trust_remote_code" not in str(error):
            raise
        of_student = option == "trust_remote_code"
        raise ValueError(
            f"{what} comes with its own Python code, which runs only if you allow it: read that code, then set "
            f"`{option}=True` in `OPSDConfig`, which applies only to {'the student' if of_student else 'teachers'}."
        ) from error


@contextmanager
def whole_checkpoint(called: str) -> Iterator[None]:
    """Refuses a checkpoint that lacks weights of the model loaded in the body: transformers draws them at random."""
    # Patched because TRL's call to load a model drops the loading info.
    load: Any = vars(PreTrainedModel)["from_pretrained"]

    def loaded(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # so that both are refused below
        try:
            model, found = load.__func__(cls, path, *args, **{**kwargs, **wanted})
        except SafetensorError as error:
            raise ValueError(
                f"`{called}={path!r}`: a file of its weights is damaged ({error}): download or save it again."
            ) from error
        # Buffers, tied weights and what the architecture computes itself are not lacking.
        weights = dict(model.named_parameters())
        resized = sorted(found["mismatched_keys"])
        lacking = sorted(found["missing_keys"] & weights.keys())
        lacking += [f"{name} {list(theirs)} instead of {list(ours)}" for name, theirs, ours in resized]
        if lacking:
            more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
            raise ValueError(
                f"`{called}={path!r}`: the checkpoint lacks weights of {type(model).__name__}, or has them in another "
                f"shape: {', '.join(lacking[:_NAMED])}{more}. They would be initialised randomly: save or download the "
                "complete checkpoint again, or correct its `config.json`."
            )
        return model

    PreTrainedModel.from_pretrained = classmethod(loaded)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = load


def whole_on(device: torch.device) -> dict[str, Any]:
    """Loading options for one device, because without a launcher TRL would spread a model over all accelerators."""
    return {} if device.type in ("cpu", "mps") else {"device_map": {"": device}}


# ---- Once it is loaded ----------------------------------------------------------------------------------------------


def check_student(student: nn.Module, args: TrainingArguments) -> None:
    """Refuses a loaded student that is not in memory, or that quantisation or AdamW's precision keeps from learning."""
    check_in_memory(student, args.device)
    _check_quantization(student)
    if not args.deepspeed_plugin:  # DeepSpeed steps on master weights of its own
        check_trained_dtypes(student)


def check_in_memory(student: Any, device: torch.device) -> None:
    """Refuses a loaded student that is not whole on this process's device."""
    if isinstance(student, nn.Module) and not is_fsdp_enabled():  # under FSDP only the main process may have loaded it
        instead = "shard it over several processes with ZeRO-3 or FSDP2 (`docs/distributed.md`)"
        check_on_device(student, device, "student", instead)


def check_on_device(model: Any, device: torch.device, who: str, instead: str) -> None:
    """Refuses a model with parts on other devices or not in memory; `instead` is what to do if it does not fit."""

    def is_elsewhere(place: Any) -> bool:
        kind, _, index = (f"{device.type}:{place}" if isinstance(place, int) else str(place)).partition(":")
        return kind != device.type or int(index or 0) != (device.index or 0)

    if (missing := next((name for name, one in model.named_parameters() if one.is_meta), None)) is not None:
        raise ValueError(
            f"{missing!r} of the {who} ({type(model).__name__}) is not in memory (its device is 'meta'): load it with "
            "`from_pretrained`, without offloading to disk or host memory (`device_map`). If it does not fit, "
            f"{instead}."
        )
    # The loss needs both heads on one device, and offloaded parts would be copied for every token.
    places = list((getattr(model, "hf_device_map", None) or {}).values())
    if any(map(is_elsewhere, places)):
        raise ValueError(
            f"The {who} ({type(model).__name__}) was loaded with a `device_map` onto "
            f"{', '.join(sorted(set(map(str, places))))}, but this process computes on {device}: load it without "
            f"`device_map`. If it does not fit there, {instead}."
        )


def _check_quantization(student: nn.Module) -> None:
    """Refuses 4-bit weights on a CPU with AVX512-BF16, where bitsandbytes' layout has no backward pass."""
    # The first forward in eval mode, in a rollout, makes bitsandbytes repack the weights for inference.
    on_cpu = next(student.parameters()).device.type == "cpu"
    if on_cpu and any(getattr(layer, "support_avx512bf16_for_cpu", False) for layer in student.modules()):
        raise ValueError(
            "The student is quantised to 4 bits by bitsandbytes on a CPU, where the first rollout repacks its weights "
            "for inference, so no gradient passes through them afterwards: train it on a GPU, or load it without "
            "`quantization_config`."
        )


# ---- Before it is trained -------------------------------------------------------------------------------------------


def check_trainable(student: nn.Module, optimizers: tuple[Any, Any]) -> None:
    """Refuses a student without weights to step: merged, or unknown to the optimizer that was passed."""
    check_can_learn(student)
    optimizer, scheduler = optimizers
    wrapped = getattr(optimizer, "optimizer", None)  # accelerate wraps it in a training
    if scheduler is not None and getattr(scheduler, "optimizer", None) not in (None, optimizer, wrapped):
        raise ValueError(
            "The scheduler belongs to another optimizer, so it would not change this one's learning rate: pass "
            "`(optimizer, scheduler)` with the optimizer it was created for."
        )
    check_optimizer(student, optimizer)


def check_can_learn(student: nn.Module) -> None:
    """Refuses a student that cannot learn: frozen, with a merged adapter, or without gradients."""
    if not torch.is_grad_enabled():
        raise ValueError("Gradients are switched off by `torch.no_grad` or `inference_mode`: train outside of it.")
    if is_peft(student) and is_merged(student):
        raise ValueError(
            "The student's adapter is merged into its base, so nothing would be learned: call `unmerge_adapter()` on "
            "the model."
        )
    if any(one.requires_grad for one in student.parameters()):
        return
    remedy = (
        "load the adapter with `PeftModel.from_pretrained(..., is_trainable=True)`, remove `inference_mode=True` from "
        "its config, or enable it again"
        if is_peft(student)
        else "call `model.requires_grad_(True)`, on a `copy.deepcopy` if it is another trainer's teacher, or pass a "
        "`peft_config`"
    )
    raise ValueError(
        "The student is frozen: none of its parameters has `requires_grad=True`, so nothing would be learned: "
        f"{remedy}; to evaluate only, do not pass `train_dataset`."
    )


def check_optimizer(student: nn.Module, optimizer: Any) -> None:
    """Refuses an optimizer that has none of the student's trained weights, and warns of those it lacks."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:  # none was passed, or the launcher makes it
        return
    # By identity, as the optimizer has no names.
    trained = {id(one): name for name, one in student.named_parameters() if one.requires_grad}
    held = {id(one) for group in groups for one in group["params"]}
    left_out = [name for place, name in trained.items() if place not in held]
    if len(left_out) == len(trained):
        raise ValueError(
            "The optimizer has no trainable parameter of the student: it was created for another model, or before the "
            "adapter was added. Create it from `model.parameters()` of the student that you pass, including its "
            "adapter, or set `optim` in `OPSDConfig`."
        )
    if left_out:
        logger.warning(
            f"The optimizer updates {len(trained) - len(left_out)} of the student's {len(trained)} trainable "
            f"parameters; the first one it leaves out is {left_out[0]!r}. If this is intended, freeze those "
            "(`requires_grad_(False)`), or their gradients are computed in vain."
        )


# ---- In words -------------------------------------------------------------------------------------------------------


def described(model: CausalLM) -> str:
    """The class of a model, the path or id it was loaded from, and the size of its weights in each dtype."""
    from trl_opsd._compat.trl import get_config_model_id

    inner = without_peft(model)
    path = get_config_model_id(inner.config)
    adapter = " with an adapter" if is_peft(model) else ""
    kind = f"{class_of(inner).__name__}{f' {path!r}' if path else ''}{_quantised(inner)}{adapter}"
    return f"{kind}, {sizes(model.parameters())}"


def _quantised(model: CausalLM) -> str:
    given = getattr(model.config, "quantization_config", None) if getattr(model, "is_quantized", False) else None
    if given is None:
        return ""
    method = (given if isinstance(given, dict) else given.to_dict()).get("quant_method")
    return f" quantised with {getattr(method, 'value', method)}"


def sizes(parameters: Iterable[Tensor]) -> str:
    """The size of the full, unsharded weights in each dtype: `"1.98 GB in float32"`."""
    found: Counter[str] = Counter()
    for one in parameters:
        found[str(one.dtype).removeprefix("torch.")] += whole_numel(one) * one.element_size()
    return " and ".join(f"{_size(size)} in {dtype}" for dtype, size in found.most_common()) or "no weights"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
