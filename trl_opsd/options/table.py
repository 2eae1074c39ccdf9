"""Types and bounds of options, which pydantic checks, and which of them a resume and the processes of a run compare.

To add an option, add a field with an annotated type and a description to `OPSDConfig`. Options of transformers without
a line here are checked by transformers alone; what cannot go together is in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Ge, Le

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.values import Natural, NotNegative, Positive, Share, Unit, fitting
from trl_opsd._compat.versions import CHECKPOINTING

RESUMED = "resumed"
"""Marks an option of which a resumed run needs the same value: it determines rows, completions or the loss."""
LOCAL = "local"
"""Marks an option that may differ between processes: paths, addresses and logs."""

LARGEST_WEIGHT = 1e20
"""Of a token in the loss: sums of weighted nats are float32, whose maximum is 3e38."""

_Seed = Annotated[int, Ge(0), Le(2**32 - 1)]  # NumPy's limit
_Port = Annotated[int, Ge(1), Le(65535)]

TRLS: Mapping[str, Any] = {
    **dict.fromkeys(
        ("model_init_kwargs", "trust_remote_code", "teacher_model_revision", "teacher_model_init_kwargs"), Any
    ),
    "teacher_model_name_or_path": Annotated[Any, LOCAL],
    "disable_dropout": bool,
    "learning_rate": NotNegative,
    "beta": Unit,
    "temperature": Annotated[Positive, RESUMED],
    "top_p": Annotated[Share | None, RESUMED],
    "top_k": Annotated[int | None, Ge(0), RESUMED],
    "min_p": Annotated[Unit | None, RESUMED],
    "repetition_penalty": Annotated[Positive | None, RESUMED],
    "max_completion_length": Annotated[Natural, RESUMED],
    "generation_kwargs": Annotated[Any, RESUMED],
    "cache_implementation": str | None,
    "chat_template_kwargs": Annotated[Any, RESUMED],
    "max_tool_calling_iterations": Annotated[int | None, Ge(0), RESUMED],
    "shuffle_dataset": Annotated[bool, RESUMED],
    "remove_unused_columns": bool,
    "pad_to_multiple_of": Natural | Literal["auto"] | None,
    "log_completions": Annotated[bool, LOCAL],
    "num_completions_to_print": Annotated[int | None, Ge(0)],
    "log_unique_prompts": bool,
    "ds3_gather_for_generation": bool,
    "use_vllm": bool,
    "vllm_mode": Literal["colocate", "server"],
    "vllm_enable_sleep_mode": bool,
    "vllm_structured_outputs_regex": Annotated[str | None, RESUMED],
    "vllm_max_model_length": Natural | None,
    "vllm_model_impl": str,
    "vllm_gpu_memory_utilization": Share,
    "vllm_tensor_parallel_size": Natural,
    "vllm_server_base_url": str | None,
    "vllm_server_host": Annotated[str, LOCAL],
    "vllm_server_port": Annotated[_Port, LOCAL],
    "vllm_server_timeout": NotNegative,
    "vllm_group_port": _Port,
}
"""Types of options of TRL's `DistillationConfig`, with their bounds."""

TRANSFORMERS: Mapping[str, Any] = {
    "report_to": Annotated[Any, LOCAL],
    **dict.fromkeys(("use_cpu", "fp16", "full_determinism", "torch_compile", "enable_jit_checkpoint"), bool),
    "bf16": bool | None,
    "neftune_noise_alpha": float | None,
    **dict.fromkeys(("accelerator_config", "deepspeed", "fsdp", "fsdp_config"), Any),
    "ddp_timeout": Annotated[Natural, LOCAL],
    # rows and steps
    "per_device_train_batch_size": Annotated[Natural, RESUMED],
    "per_device_eval_batch_size": Annotated[Natural, LOCAL],
    "gradient_accumulation_steps": Annotated[Natural, RESUMED],
    "eval_accumulation_steps": Annotated[Natural | None, LOCAL],
    "dataloader_num_workers": Annotated[int, Ge(0), LOCAL],
    CHECKPOINTING: bool | None,
    "max_steps": Annotated[int, Ge(-1)],
    "num_train_epochs": NotNegative,
    "seed": Annotated[_Seed, RESUMED],
    # the optimizer
    **dict.fromkeys(("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs"), Any),
    "weight_decay": NotNegative,
    "adam_beta1": Unit,
    "adam_beta2": Unit,
    "adam_epsilon": NotNegative,
    "max_grad_norm": Annotated[NotNegative, LOCAL],
    "warmup_steps": NotNegative,
    # logs, evaluations, checkpoints
    "logging_steps": Positive,
    "eval_steps": NotNegative | None,
    "save_steps": Positive,
    "eval_delay": Annotated[NotNegative, LOCAL],
    "save_total_limit": Annotated[int | None, Ge(0), LOCAL],
}
"""Those of transformers on which something depends here."""


_types: Any = cache(partial(get_type_hints, include_extras=True))


def table(config: Any) -> Mapping[str, Any]:
    """The types of options by name, first those of ours, then those of TRL and transformers."""
    theirs = {one.name for one in fields(DistillationConfig)}
    own = {one.name: _types(config)[one.name] for one in fields(config) if one.name not in theirs}
    return {**own, **TRLS, **TRANSFORMERS}


def resumed(config: Any) -> list[str]:
    """The options that a resume compares; `world_size` is of the launch, and multiplies the rows of a step as well."""
    return [*_marked(config, RESUMED), "world_size"]


def _marked(config: Any, mark: str) -> list[str]:
    return [name for name, hint in table(config).items() if mark in getattr(hint, "__metadata__", ())]


# ---- Values ---------------------------------------------------------------------------------------------------------


def check_values(args: Any) -> None:
    """Converts options in place to their types, text too: `"1e-5"` to a number, `"False"` to a boolean.

    Raises:
        ValueError: A value does not fit.
    """
    known = table(type(args))
    for name, hint in _types(type(args)).items():
        # Of other types transformers makes its own.
        plain = {*(get_args(hint) or (hint,))} - {type(None)} in ({bool}, {int}, {float})
        if name in known or plain:
            setattr(args, name, checked(name, known.get(name, hint), getattr(args, name)))
    # YAML 1.1, which PyYAML reads, takes `no` for False.
    for name in ("logging_strategy", "eval_strategy", "save_strategy"):
        if getattr(args, name) is False:
            setattr(args, name, "no")


def checked(name: str, hint: Any, value: Any) -> Any:
    """The value of an option as its type has it; raises `ValueError` if it does not fit."""
    try:
        return fitting(hint, value)
    except ValueError as error:
        raise ValueError(f"`{name}={value!r}`: expected {error}") from None


def option_values(args: Any) -> dict[str, Any]:
    """The options as they are now; dicts and lists are copied, so that a change in them shows."""
    values = {one.name: getattr(args, one.name) for one in fields(args)}
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in values.items()}


# ---- Several processes ----------------------------------------------------------------------------------------------


def shared_options(args: Any) -> dict[str, Any]:
    """The options that decide how one student is trained, as far as they can be compared between processes."""
    plain, local = (str, int, float, dict, list, type(None)), _marked(type(args), LOCAL)
    return {
        name: value
        for name in sorted(table(type(args)))
        if name not in local and isinstance(value := getattr(args, name), plain)
    }


def check_same_options(each: Sequence[dict[str, Any]]) -> None:
    """Raises `ValueError` for an option, or rows, that differ between processes: students would, or shards of rows."""
    for process, options in enumerate(each):
        for name, value in options.items():
            if value != each[0].get(name):
                raise ValueError(
                    f"`{name}` is {value!r} in process {process} and {each[0].get(name)!r} in process 0, but all "
                    "processes train one student: pass the same value, or the same rows in the same order, in all. "
                    "With the same dataset and `seed`, each still reads its own rows and draws its own samples."
                )


# ---- The objective in words, for the banner and the model card ------------------------------------------------------


def temperatures_in_words(student: float, teacher: float) -> str:
    """The temperatures of the loss."""
    if student == teacher:
        return f"temperature {student:g}"
    return f"temperature {student:g} (student) and {teacher:g} (teacher)"


def shape_in_words(args: Any) -> str:
    """What is done to the divergence of tokens, with a comma before each."""
    return "" if args.kl_clip is None else f", each entry clipped at {args.kl_clip:g} nats"
