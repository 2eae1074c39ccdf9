"""Models and adapters as a user passes them: whether they can be loaded, fit the device, are trained, or can teach."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_fsdp_enabled
from transformers.utils import CONFIG_NAME, cached_file

from trl_opsd._compat.peft import (
    CausalLM,
    is_peft,
    read_config,
    reads_prompts,
    rewrites_base,
    with_adapter,
    without_peft,
)
from trl_opsd._compat.sharding import class_of, whole_numel
from trl_opsd.data.readers import PromptLimits
from trl_opsd.models.backbone import context_of, model_shape
from trl_opsd.options.rules import refuse
from trl_opsd.parallel.precision import check_trained_dtypes

PLACE_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
"""Loading options that locate a model."""
_NAMED = 8
"""Maximum weights that a message names."""


# ---- Before a model is loaded ---------------------------------------------------------------------------------------


def language_config(model: Any, called: str, loading: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a causal language model with its `text_config` merged in; empty for what is neither model nor path.

    Refuses a path that cannot be found, and another kind of model.
    """
    if isinstance(model, str):
        found, why = None, "An adapter alone is no student: load it with `PeftModel.from_pretrained`."
        try:
            found = cached_file(model, CONFIG_NAME, **place_of(loading))
        except OSError as error:
            why = str(error).splitlines()[0]
        if found is None:
            raise ValueError(
                f"`{called}={model!r}` is neither a folder with a `{CONFIG_NAME}` nor an accessible model on the Hub: "
                f"correct it, or log in. {why}"
            )
        config = json.loads(Path(found).read_text(encoding="utf-8"))
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


def file_at(path: str, name: str, place: Mapping[str, Any]) -> str | None:
    """The file of this name at a path or model id; `None` if there is none, or if it is neither of them."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        found: str | None = cached_file(path, name, **place, **quiet)
    except (OSError, ValueError):  # neither a folder nor the form of a model id
        return None
    return found


def student_limits(student: CausalLM, args: Any) -> PromptLimits:
    """Limits of the student's prompts and completions."""
    context = context_of(student)
    if args.has_engine and args.vllm_max_model_length is not None:
        context = min(args.vllm_max_model_length, context or args.vllm_max_model_length)
    return PromptLimits(vocabulary=model_shape(student)[0], context=context, completion=args.max_completion_length)


# ---- While it is loaded ---------------------------------------------------------------------------------------------


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
    """Refuses a loaded student that is not in memory, or that AdamW's precision keeps from learning."""
    check_in_memory(student, args.device)
    if not args.deepspeed_plugin:  # DeepSpeed steps on master weights of its own
        check_trained_dtypes(student)


def check_in_memory(student: Any, device: torch.device) -> None:
    """Refuses a loaded student that is not whole on this process's device."""
    if isinstance(student, nn.Module) and not is_fsdp_enabled():  # under FSDP only the main process may have loaded it
        instead = "shard it over several processes with ZeRO-3 or FSDP2 (`docs/distributed.md`)"
        check_on_device(student, device, "student", instead)


def check_on_device(model: Any, device: torch.device, who: str, instead: str) -> None:
    """Refuses a model with parts on other devices or not in memory; `instead` is what to do if it does not fit."""
    # The loss needs both heads on one device, and offloaded parts would be copied for every token.
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    places |= {"meta" for one in model.parameters() if one.is_meta}
    number = device.index or 0
    if places - {f"{device.type}:{number}", str(number), device.type if number == 0 else ""}:
        raise ValueError(
            f"The {who} ({type(model).__name__}) is not in memory of {device}, where this process computes, but was "
            f"loaded with a `device_map` onto {', '.join(sorted(places))}: load it with `from_pretrained`, without "
            f"`device_map`. If it does not fit there, {instead}."
        )


# ---- Before it is trained -------------------------------------------------------------------------------------------


def check_can_learn(student: nn.Module) -> None:
    """Refuses a student that is frozen, or whose adapter is merged: its gradients would be none."""
    merged = is_peft(student) and any(getattr(one, "merged", False) for one in student.modules())
    frozen = not any(one.requires_grad for one in student.parameters())
    ways = "load an adapter with `PeftModel.from_pretrained(..., is_trainable=True)`, or call `requires_grad_(True)`"
    nothing = "so nothing would be learned"
    refuse(
        [
            (frozen, f"The student is frozen: none of its parameters has `requires_grad=True`, {nothing}", ways),
            (merged, f"The student's adapter is merged into its base, {nothing}", "call `unmerge_adapter()`"),
        ]
    )


def check_optimizer(student: nn.Module, optimizer: Any, scheduler: Any = None) -> None:
    """Refuses an optimizer that has none of the student's trained weights, and another optimizer's scheduler."""
    steps, groups = getattr(scheduler, "optimizer", None), getattr(optimizer, "param_groups", None)
    is_other = steps is not None and steps not in (optimizer, getattr(optimizer, "optimizer", None))
    # By identity, as the optimizer has no names. There are no groups if the launcher makes it.
    held = {id(one) for group in groups or () for one in group["params"]}
    has_none = groups is not None and not any(id(one) in held for one in student.parameters() if one.requires_grad)
    why = "create it from the `parameters()` of the student that you pass, after its adapter was added"
    refuse(
        [
            (is_other, "The scheduler is another optimizer's", "create it for the one that you pass"),
            (has_none, "The optimizer has no trainable parameter of the student", why),
        ]
    )


# ---- Adapters at a path or model id ----------------------------------------------------------------------------------


ADAPTER_CONFIG = "adapter_config.json"
"""File in which PEFT describes an adapter."""
_WEIGHTS = "adapter_model.safetensors"
_QUOTED = 400
"""Characters of an error that are quoted."""
_MERGE = (
    "Merge it (`AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload().save_pretrained(folder)`), and pass "
    "that folder."
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is not loaded yet."""

    path: str
    config: Any
    """PEFT's config of it."""
    loading: Mapping[str, Any]
    """Options that say where it is."""

    @property
    def base(self) -> str:
        """The path or model id of its base."""
        return str(self.config.base_model_name_or_path)

    @property
    def loading_of_base(self) -> dict[str, Any]:
        """Options that say where its base is: its own, but for those that name a place in its repository."""
        own = {"subfolder": None, "revision": getattr(self.config, "revision", None)}
        return {name: one for name, one in {**self.loading, **own}.items() if one is not None}

    def check(self, called: str) -> None:
        """Refuses an adapter that cannot teach, or whose base cannot be found."""
        config, wrong = self.config, None
        replicates, biases = getattr(config, "layer_replication", None), getattr(config, "bias", "none") != "none"
        if reads_prompts(config):
            wrong = "it acts through prompts, which a teacher computes without: use LoRA."
        elif rewrites_base(config) or replicates or biases:
            wrong = f"it changes its base, which others share. {_MERGE}"
        if wrong is not None:
            raise ValueError(f"`{called}={self.path!r}`: {wrong}")
        language_config(self.base, f"{self.path}/{ADAPTER_CONFIG}: base_model_name_or_path", self.loading_of_base)

    def put_on(self, model: CausalLM, name: str) -> CausalLM:
        """Puts it into the layers of its base under a name, beside others, and makes it the active one."""
        try:
            # No pickle, which PEFT would take as well.
            file = cached_file(self.path, _WEIGHTS, **place_of(self.loading))
            return with_adapter(model, self.config, Path(file or ""), name)
        except (OSError, ValueError, LookupError, RuntimeError) as error:  # no file, other layers, shapes or options
            raise ValueError(
                f"The adapter {self.path!r}, on its base {self.base!r}: {' '.join(str(error).split())[:_QUOTED]}. Name "
                f"the right base in its {ADAPTER_CONFIG}, or save the adapter again. If both are right, this adapter "
                f"cannot share its base with other models. {_MERGE}"
            ) from error


def adapter_at(path: Any, loading: Mapping[str, Any]) -> Adapter | None:
    """The adapter at a path or model id; `None` if there is none, or if it is no path."""
    found = file_at(path, ADAPTER_CONFIG, place_of(loading)) if isinstance(path, str) else None
    if found is None:
        return None
    try:
        config = read_config(Path(found).parent)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{found} cannot be read ({type(error).__name__}: {error}): save the adapter again."
        ) from error
    return Adapter(path, config, dict(loading))


# ---- In words -------------------------------------------------------------------------------------------------------


def described(model: CausalLM) -> str:
    """The class of a model, the path or id it was loaded from, and the size of its weights in each dtype."""
    from trl_opsd._compat.trl import get_config_model_id

    inner = without_peft(model)
    path = get_config_model_id(inner.config)
    adapter = " with an adapter" if is_peft(model) else ""
    kind = f"{class_of(inner).__name__}{f' {path!r}' if path else ''}{adapter}"
    return f"{kind}, {sizes(model.parameters())}"


def sizes(parameters: Iterable[Tensor]) -> str:
    """The size of the full, unsharded weights in each dtype: `"1.98 GB in float32"`."""
    found: Counter[str] = Counter()
    for one in parameters:
        found[str(one.dtype).removeprefix("torch.")] += whole_numel(one) * one.element_size()
    return " and ".join(f"{_size(size)} in {dtype}" for dtype, size in found.most_common()) or "no weights"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
