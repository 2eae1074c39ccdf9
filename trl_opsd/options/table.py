"""Options as data: values, when each is read, what it needs to have an effect, whether a resume compares it.

To add an option, add a field with an [`Option`] and a description to `OPSDConfig`, or to the options of a method.
Conflicts between options are in `rules.py`. Options of transformers without a line here are checked by transformers
alone.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_type_hints

from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations import get_available_reporting_integrations

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.http.urls import some_urls

# ---- Values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Values:
    """The values that fit; `above(0) | None` may be `None` as well."""

    expected: str
    """What follows "expected" in an error."""
    fits: Callable[[Any], bool]
    names: tuple[Any, ...] = ()
    """All of them, for "did you mean", where they are few."""

    def __or__(self, other: None) -> Values:
        return replace(self, fits=lambda value: value is None or self.fits(value))

    def check(self, option: str, value: Any) -> None:
        """Raises `ValueError` if the value of an option does not fit."""
        if not self.fits(value):
            close = difflib.get_close_matches(str(value), [str(name) for name in self.names], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"`{option}={value!r}`: expected {self.expected}.{hint}")


def is_number(value: Any) -> bool:
    """Whether a value is a number that counts something: neither a boolean nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def one_of(*names: Any) -> Values:
    return Values(f"one of {', '.join(map(repr, names))}", lambda value: value in names, names)


def _number(expected: str, fits: Callable[[Any], bool]) -> Values:
    return Values(expected, lambda value: is_number(value) and fits(value))


def at_least(bound: float) -> Values:
    return _number(f"a finite number of at least {bound:g}", lambda value: bound <= value < math.inf)


def above(bound: float) -> Values:
    return _number(f"a finite number above {bound:g}", lambda value: bound < value < math.inf)


def below(bound: float) -> Values:
    return _number(f"a finite number below {bound:g}", lambda value: -math.inf < value < bound)


def between(low: float, high: float) -> Values:
    return _number(f"a number in ({low:g}, {high:g})", lambda value: low < value < high)


def from_to(low: float, high: float) -> Values:
    return _number(f"a number in [{low:g}, {high:g}]", lambda value: low <= value <= high)


def share() -> Values:
    return _number("a number in (0, 1]", lambda value: 0 < value <= 1)


def integer(low: int, expected: str = "", high: float = math.inf) -> Values:
    return _number(
        expected or f"an integer of at least {low}", lambda value: isinstance(value, int) and low <= value <= high
    )


LARGEST_WEIGHT = 1e20
"""Of a token in the loss: sums of weighted nats are float32, whose maximum is 3e38."""
SET = Values("not None", lambda value: value is not None)
NAME = Values("the name of a teacher", lambda value: isinstance(value, str) and bool(value))
TRACKERS = Values(
    "'none', or trackers that are installed (`pip install` them)",
    lambda value: {None, "none", "all", "flyte", *get_available_reporting_integrations()}.issuperset(
        value if isinstance(value, list) else [value]
    ),
)
FOLDER = Values("the path of a folder", lambda value: isinstance(value, str) and bool(value))
NAMES = Values("a list of names", lambda value: isinstance(value, list))


def shown(name: str, value: Any) -> str:
    """An option and its value, as in `OPSDConfig(...)`; an enum by its value."""
    return f"`{name}={getattr(value, 'value', value)!r}`"


# ---- Options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What rules and needs read: the options, each an attribute, and the trainer's arguments."""

    args: Any
    teacher_names: Collection[str] = ()
    """Of several teachers."""
    optimizers: tuple[Any, Any] = (None, None)
    """The optimizer and the scheduler that were passed."""
    tools: Any = None
    environments: Any = None
    objective: Any = None
    """The divergence that was passed, which overrides that of the options."""
    rewards: Sequence[str] = ()
    """Names of the reward functions."""
    train_dataset: Any = None
    eval_dataset: Any = None
    teacher_prompt_fn: Any = None
    row_columns: Collection[str] = ()
    """Columns that are read."""
    rollout: Any = None
    """What generates, once it is chosen."""

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "args"), name)


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its type, its default and its description, which `OPSDConfig` has."""

    takes: Values | Callable[[str, Any], Any] | None = None
    """Its values, or a function of name and value that raises `ValueError`; `None` where its type alone is checked."""
    resumed: bool = False
    """Whether a run resumes only with the same value, as it determines the rows, the completions or the loss."""
    may_differ: bool = False
    """Whether processes may have different values: local paths, addresses and logs."""
    words: str = ""
    """What it does to the loss, for the banner and the model card; a format of its value."""


def is_set(args: DistillationConfig, name: str) -> bool:
    """Whether an option is not at its default."""
    return bool(getattr(args, name) != getattr(type(args), name))


_TOKENS = integer(1, "an integer of at least 1, as the room for a completion has to be known before training")
_SEED = integer(0, "an integer from 0 to 4294967295, NumPy's limit", high=2**32 - 1)
_STEPS = integer(-1, "the number of optimizer steps, or -1, where `num_train_epochs` decides")
# TRL turns text into a number, and "auto" into what the device needs.
_MULTIPLE = Values("an integer of at least 1", lambda value: isinstance(value, str) or integer(1).fits(value))
_PORT = from_to(1, 65535)

TRLS: Mapping[str, Option] = {
    **dict.fromkeys(("model_init_kwargs", "trust_remote_code", "disable_dropout", "use_vllm"), Option()),
    "teacher_model_name_or_path": Option(may_differ=True),
    "teacher_model_revision": Option(),
    "teacher_model_init_kwargs": Option(),
    "learning_rate": Option(at_least(0)),
    "beta": Option(from_to(0, 1)),
    "temperature": Option(above(0), resumed=True),
    "top_p": Option(share() | None, resumed=True),
    "top_k": Option(integer(0, "an integer of at least 0; 0 keeps every token") | None, resumed=True),
    "min_p": Option(from_to(0, 1) | None, resumed=True),
    "repetition_penalty": Option(above(0) | None, resumed=True),
    "max_completion_length": Option(_TOKENS, resumed=True),
    "generation_kwargs": Option(resumed=True),
    "cache_implementation": Option(one_of(*ALL_CACHE_IMPLEMENTATIONS) | None),
    "chat_template_kwargs": Option(resumed=True),
    "max_tool_calling_iterations": Option(at_least(0) | None, resumed=True),
    "shuffle_dataset": Option(resumed=True),
    "remove_unused_columns": Option(),
    "pad_to_multiple_of": Option(_MULTIPLE | None),
    "log_completions": Option(may_differ=True),
    "num_completions_to_print": Option(at_least(0) | None),
    "log_unique_prompts": Option(),
    "ds3_gather_for_generation": Option(),
    "vllm_mode": Option(one_of("colocate", "server")),
    "vllm_enable_sleep_mode": Option(),
    "vllm_structured_outputs_regex": Option(resumed=True),
    "vllm_max_model_length": Option(integer(1) | None),
    "vllm_model_impl": Option(),
    "vllm_gpu_memory_utilization": Option(share()),
    "vllm_tensor_parallel_size": Option(integer(1)),
    "vllm_server_base_url": Option(some_urls),
    "vllm_server_host": Option(may_differ=True),
    "vllm_server_port": Option(_PORT, may_differ=True),
    "vllm_server_timeout": Option(at_least(0)),
    "vllm_group_port": Option(_PORT),
}
"""Options of TRL's `DistillationConfig`."""

TRANSFORMERS: Mapping[str, Option] = {
    "report_to": Option(TRACKERS, may_differ=True),
    "use_cpu": Option(),
    **dict.fromkeys(("bf16", "fp16", "full_determinism", "torch_compile", "neftune_noise_alpha"), Option()),
    **dict.fromkeys(("accelerator_config", "deepspeed", "fsdp", "fsdp_config", "enable_jit_checkpoint"), Option()),
    "ddp_timeout": Option(integer(1), may_differ=True),
    # rows and steps
    "per_device_train_batch_size": Option(integer(1), resumed=True),
    "per_device_eval_batch_size": Option(integer(1), may_differ=True),
    "gradient_accumulation_steps": Option(integer(1), resumed=True),
    "eval_accumulation_steps": Option(integer(1) | None, may_differ=True),
    "dataloader_num_workers": Option(at_least(0), may_differ=True),
    CHECKPOINTING: Option(),
    "max_steps": Option(_STEPS),
    "num_train_epochs": Option(at_least(0)),
    "seed": Option(_SEED, resumed=True),
    # the optimizer
    "optim": Option(),
    "optim_args": Option(),
    "weight_decay": Option(at_least(0)),
    "adam_beta1": Option(from_to(0, 1)),
    "adam_beta2": Option(from_to(0, 1)),
    "adam_epsilon": Option(at_least(0)),
    "max_grad_norm": Option(at_least(0), may_differ=True),
    "lr_scheduler_type": Option(),
    "lr_scheduler_kwargs": Option(),
    "warmup_steps": Option(at_least(0)),
    # logs, evaluations, checkpoints
    "logging_steps": Option(above(0)),
    "eval_steps": Option(at_least(0) | None),
    "save_steps": Option(above(0)),
    "eval_delay": Option(at_least(0), may_differ=True),
    "save_total_limit": Option(at_least(0) | None, may_differ=True),
}
"""Options of transformers on which something depends here."""


def table(config: Any) -> Mapping[str, Option]:
    """Every option of a config's class by name: the [`Option`]s of its fields, then those of TRL and transformers."""
    return _table(config)  # a class of dataclasses is no `Hashable` to mypy


@cache
def _table(config: Any) -> Mapping[str, Option]:
    if config is DistillationConfig:
        return {**TRLS, **TRANSFORMERS}
    hints = get_type_hints(config, include_extras=True)
    declared = {name: get_args(hints[name]) for name in config.__annotations__}
    own = {name: one for name, parts in declared.items() for one in parts if isinstance(one, Option)}
    bases = [table(base) for base in config.__bases__ if is_dataclass(base)]
    inherited = {name: one for base in bases for name, one in base.items()}
    return {**own, **inherited, **own}  # in this order


def check_values(args: DistillationConfig, names: Collection[str] | None = None) -> None:
    """Raises `ValueError` for the first option, of these or of all, whose value does not fit."""
    for name, option in table(type(args)).items():
        if option.takes is not None and (names is None or name in names):
            check = option.takes.check if isinstance(option.takes, Values) else option.takes
            check(name, getattr(args, name))


def resumed(args: DistillationConfig) -> list[str]:
    """The options that a resume compares; `world_size` is of the launch, and multiplies the rows of a step as well."""
    return [*(name for name, one in table(type(args)).items() if one.resumed), "world_size"]


# ---- The objective in words, for the banner and the model card ------------------------------------------------------


def temperatures_in_words(student: float, teacher: float) -> str:
    """The temperatures of the loss."""
    if student == teacher:
        return f"temperature {student:g}"
    return f"temperature {student:g} (student) and {teacher:g} (teacher)"


def shape_in_words(args: Any) -> str:
    """What is done to the divergence of tokens, and what is added to it, with a comma before each."""
    told = {name: one for name, one in table(type(args)).items() if one.words and is_set(args, name)}
    parts = [one.words.format(getattr(args, name)) for name, one in told.items()]
    return "".join(f", {part}" for part in parts)


# ---- Options of several processes ------------------------------------------------------------------------------------


def option_values(args: DistillationConfig) -> dict[str, Any]:
    """The options as they are now; dicts and lists are copied, so that a change in them shows."""
    values = {one.name: getattr(args, one.name) for one in fields(args)}
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in values.items()}


def shared_options(args: DistillationConfig) -> dict[str, Any]:
    """The options that decide how one student is trained, as far as they can be compared between processes."""
    plain = (str, int, float, dict, list, type(None))
    return {
        name: value
        for name, one in sorted(table(type(args)).items())
        if not one.may_differ
        if isinstance(value := getattr(args, name), plain)
    }


def check_same_options(each: Sequence[dict[str, Any]]) -> None:
    """Raises `ValueError` for an option that differs between processes, whose students would become different ones."""
    for process, options in enumerate(each):
        for name, value in options.items():
            if value != each[0].get(name):
                raise ValueError(
                    f"`{name}` is {value!r} in process {process} and {each[0].get(name)!r} in process 0, but all "
                    "processes train one student: pass the same value in all. With the same `seed`, each still draws "
                    "its own samples."
                )
