"""Looks at models that a user passes: by their config before they are loaded, and at a student once it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_fsdp_enabled
from transformers.utils import CONFIG_NAME, cached_file

from trl_opsd._compat.peft import is_peft, without_peft
from trl_opsd.run.precision import check_trained_dtypes

PLACE = ("revision", "token", "cache_dir", "subfolder")
"""Options for loading a model that say where it is."""


def language_config(model: Any, called: str, loading: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a causal language model, as far as it says something; empty for what is no model.

    Args:
        model (`Any`):
            A path, a model id or a model; anything else is left to others.
        called (`str`):
            The argument it was passed as, for the message.
        loading (`Mapping[str, Any]`):
            Options for loading it.

    Raises:
        ValueError: It cannot be found, or does not write text token by token.
    """
    if isinstance(model, str):
        place = {name: loading[name] for name in PLACE if loading.get(name) is not None}
        found, why = None, "There is none."
        try:
            found = cached_file(model, CONFIG_NAME, **place)
        except OSError as error:
            why = str(error).splitlines()[0]
        if found is None:
            raise ValueError(
                f"`{called}={model!r}` is neither a folder with a `{CONFIG_NAME}` nor a model that the Hub hands out: "
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
            f"`{called}` is a {kind}, which does not continue a text token by token: pass a causal language model, for "
            "instance one loaded with `AutoModelForCausalLM`."
        )
    return {**config, **(config.get("text_config") or {})}


def check_own_loss(config: Mapping[str, Any]) -> None:
    """Refuses a student that adds to the loss in its own forward, which is not called.

    Args:
        config (`Mapping[str, Any]`):
            Of the student, with what `model_init_kwargs` changes.

    Raises:
        ValueError: Its routers, or its normalisers, have a loss of their own.
    """
    weight_of_routers = config.get("router_aux_loss_coef", config.get("aux_loss_coef", 1.0))
    if config.get("output_router_logits") and weight_of_routers != 0:
        option, loss, off = "output_router_logits", "a loss that balances its experts", "False"
    elif config.get("z_loss_coefficient"):
        option, loss, off = "z_loss_coefficient", "a loss of its log-normalisers", "0.0"
    else:
        return
    raise ValueError(
        f"`{option}={config[option]}` asks the student to add {loss} in its own forward, which distillation does not "
        f"call: it would have no effect. Set `{option}` to {off} in the student's config, or in `model_init_kwargs`."
    )


def check_student(student: nn.Module, args: TrainingArguments) -> None:
    """Refuses a student that is loaded and could not be trained.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student.
        args ([`~transformers.TrainingArguments`]):
            Say whether DeepSpeed takes the steps.

    Raises:
        ValueError: A part of it is not in memory, its weights pass no gradient, or AdamW could not step in their dtype.
    """
    check_in_memory(student)
    _check_quantization(student)
    if not args.deepspeed_plugin:  # which keeps weights of its own to step with
        check_trained_dtypes(student)


def check_in_memory(student: Any) -> None:
    """Refuses a student of which a part is on disk or nowhere: what it learns there would be lost.

    Args:
        student (`Any`):
            A model; a path is not loaded yet.

    Raises:
        ValueError: A weight has no values in memory, because of its device map or because none were loaded.
    """
    if not isinstance(student, nn.Module) or is_fsdp_enabled():  # there only the main process may have read it
        return
    for name, parameter in student.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name!r} of the student is not in memory (its device is 'meta'), so it could not learn: load the "
                "student with `from_pretrained` and without parts on disk or in host memory (`device_map`)."
            )


def _check_quantization(student: nn.Module) -> None:
    """On a CPU with AVX512-BF16, the first forward of bitsandbytes' 4 bits in eval mode stores the weights in an order
    that gradients do not pass.
    """
    on_cpu = next(student.parameters()).device.type == "cpu"
    if on_cpu and any(getattr(layer, "support_avx512bf16_for_cpu", False) for layer in student.modules()):
        raise ValueError(
            "The student is quantised to 4 bits by bitsandbytes and is on a CPU, where it is packed for inference as "
            "soon as it writes, and no gradient passes it afterwards: train it on a GPU, or load it without "
            "`quantization_config`."
        )
