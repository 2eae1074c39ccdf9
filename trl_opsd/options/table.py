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
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations import get_available_reporting_integrations

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.http.urls import some_urls
from trl_opsd.losses import DIVERGENCES, Divergence
from trl_opsd.losses.registry import named_with

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


NUMBERS = Values(
    "a list of finite numbers, one for each function",
    lambda value: isinstance(value, list | tuple) and all(is_number(one) and math.isfinite(one) for one in value),
)
NUMBER = _number("a finite number", math.isfinite)
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


class Read(Enum):
    """When an option is read; a later change would have no effect, and is refused."""

    BUILD = "when the trainer is built"
    START = "when a training begins"
    LIVE = "whenever it is needed"


BUILD, START, LIVE = Read
_WHEN = {
    BUILD: ("the trainer was built", "build a trainer with that value"),
    START: ("the training began", "change it between two trainings"),
}
"""When an option was read, and what to do instead of changing it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What rules and needs read: the options, each an attribute, and the trainer's arguments."""

    args: Any
    own_rollout: bool = False
    """Whether a rollout was passed, which may read any option of an engine."""
    teachers: Sequence[Any] = ()
    """As passed; `None` is the student itself."""
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
    reward_sources: Sequence[Any] = ()
    """These, with what gives the rewards."""
    train_dataset: Any = None
    eval_dataset: Any = None
    teacher_prompt_fn: Any = None
    prompt_weight_fn: Any = None
    row_columns: Collection[str] = ()
    """Columns that are read."""
    needs_context: bool = False
    """Whether a row counts only where the teacher reads something that the student does not."""
    has_context: bool = True
    """Whether a dataset may have a column `privileged_context`."""
    rollout: Any = None
    """What generates, once it is chosen."""

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "args"), name)

    @property
    def chosen(self) -> Any:
        """The divergence, as it was given."""
        return self.args.divergence if self.objective is None else self.objective

    @property
    def chosen_in_words(self) -> str:
        return "an object" if isinstance(self.chosen, Divergence) else repr(self.chosen)


@dataclass(frozen=True, slots=True)
class Need:
    """A condition without which an option has no effect."""

    lacking: str
    """Why the option has none; a format of the situation."""
    met: Callable[[Situation], Any]


def of_divergences(setting: str) -> tuple[Need]:
    def met(now: Situation) -> bool:
        return now.chosen in names

    names = named_with(setting)
    return (Need("`divergence` is {0.chosen_in_words}", met),)


def _steps(strategy: str) -> tuple[Need]:
    return (Need(f"`{strategy}` is not 'steps'", lambda now: getattr(now, strategy) == "steps"),)


def _of_engine(lacking: str, met: Callable[[Any], Any]) -> Need:
    """A need of an option that a rollout of the user's own may read."""
    return Need(lacking, lambda now: now.own_rollout or met(now))


REWARDS = Need("there are no `reward_funcs`", lambda now: now.rewards)
OFF_POLICY = Need("`lmbda` is 1, so the student generates all completions", lambda now: now.lmbda < 1)
EMA = Need("`teacher_model_kind` is not 'ema'", lambda now: now.teacher_model_kind == "ema")
BYTES = Need("`cross_tokenizer` is not set", lambda now: now.cross_tokenizer is not None)
STATIC = Need(
    "the teacher changes with each step",
    lambda now: now.teacher_model_kind not in ("ema", "live") or now.reads_origin,
)
OTHER_TEACHER = Need("the student is its own teacher", lambda now: now.teacher_model_kind is None)
LOADED = Need("no teacher is loaded from a path", lambda now: any(isinstance(path, str) for path in now.teachers))
TEACHER_SERVER = Need("`teacher_server_url` is not set", lambda now: now.teacher_server_url is not None)
NO_PROMPT_FN = Need("`teacher_prompt_fn` makes the teacher's prompts", lambda now: now.teacher_prompt_fn is None)
CONTEXT = Need("no dataset has a column 'privileged_context'", lambda now: now.has_context or now.teacher_context)
VLLM = _of_engine("`use_vllm` is False", lambda now: now.use_vllm)
ENGINE = _of_engine("`use_vllm` is False", lambda now: now.has_engine)
NO_ENGINE = _of_engine("an engine generates the completions", lambda now: not now.has_engine)
SERVER = _of_engine("`vllm_mode='colocate'` needs no server", lambda now: now.vllm_mode == "server")
COLOCATED = _of_engine(
    "`vllm_mode='server'`: the server is started with its own options", lambda now: now.vllm_mode == "colocate"
)
NO_BASE_URL = _of_engine(
    "`vllm_server_base_url` sets the server's address", lambda now: now.vllm_server_base_url is None
)
SGLANG = _of_engine("`sglang_server_url` is not set", lambda now: now.sglang_server_url is not None)
SKIPS = Need("`nonfinite` is 'raise'", lambda now: now.nonfinite == "skip" or now.mixed_precision == "fp16")
OVERLAP_STEP = Need("`overlap` is not 'step'", lambda now: now.overlap == "step")
OVERLAP_AHEAD = Need("`overlap` is not 'ahead'", lambda now: now.overlap == "ahead")
OPTIMIZER = Need("an optimizer was passed", lambda now: now.optimizers[0] is None)
SCHEDULER = Need("a scheduler was passed", lambda now: now.optimizers[1] is None)
EVALUATES = Need("`eval_strategy` is 'no'", lambda now: now.eval_strategy != "no")
SAVES = Need("`save_strategy` is 'no'", lambda now: now.save_strategy != "no" or now.enable_jit_checkpoint)
LOGS = Need("`log_completions` is False", lambda now: now.log_completions)
TOOLS = Need("there are no tools", lambda now: now.tools)
ENVIRONMENTS = Need("there is no `environment_factory`", lambda now: now.environments is not None)


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its type, its default and its description, which `OPSDConfig` has."""

    takes: Values | Callable[[str, Any], Any] | None = None
    """Its values, or a function of name and value that raises `ValueError`; `None` where its type alone is checked."""
    needs: tuple[Need, ...] = ()
    read: Read = BUILD
    resumed: bool | Need = False
    """Whether a run resumes only with the same value, as it determines the rows, the completions or the loss."""
    may_differ: bool = False
    """Whether processes may have different values: local paths, addresses and logs."""
    also: str = ""
    """Names of it in other trainers."""
    instead: str = ""
    """What to do instead of changing it after it was read, if not the usual."""
    words: str = ""
    """What it does to the loss, for the banner and the model card; a format of its value."""
    goes: str = ""
    """The version without it, if it is deprecated; until then a value of its own gets a `FutureWarning`."""
    became: str = ""
    """Its new name, if it has one, which takes the value."""

    def lacks(self, now: Situation) -> str | None:
        """Why it has no effect; `None` if it has one."""
        return next((need.lacking.format(now) for need in self.needs if not need.met(now)), None)


def is_set(args: DistillationConfig, name: str) -> bool:
    """Whether an option is not at its default."""
    return bool(getattr(args, name) != getattr(type(args), name))


def a_divergence(option: str, value: Any) -> None:
    """Raises `ValueError` unless a value is a divergence, the name of one, or `None`."""
    if isinstance(value, type) and issubclass(value, Divergence):
        raise ValueError(f"`{option}={value.__name__}` is a class: pass an instance, `{value.__name__}()`.")
    if not isinstance(value, Divergence | str | None):
        raise ValueError(
            f"`{option}` is a {type(value).__name__}: expected an instance of a subclass of "
            "`trl_opsd.losses.Divergence` with a method `value` (docs/extending.md), or one of "
            f"{', '.join(map(repr, DIVERGENCES))}."
        )
    if not isinstance(value, Divergence):
        one_of(None, *DIVERGENCES).check(option, value)


_TOKENS = integer(1, "an integer of at least 1, as the room for a completion has to be known before training")
_SEED = integer(0, "an integer from 0 to 4294967295, NumPy's limit", high=2**32 - 1)
_STEPS = integer(-1, "the number of optimizer steps, or -1, where `num_train_epochs` decides")
# TRL turns text into a number, and "auto" into what the device needs.
_MULTIPLE = Values("an integer of at least 1", lambda value: isinstance(value, str) or integer(1).fits(value))
_PORT = from_to(1, 65535)
ASSIGN = "assign `trainer.divergence`"

TRLS: Mapping[str, Option] = {
    **dict.fromkeys(("model_init_kwargs", "trust_remote_code", "disable_dropout", "use_vllm"), Option()),
    "teacher_model_name_or_path": Option(may_differ=True, also="teacher_name_or_path"),
    "teacher_model_revision": Option(needs=(LOADED,)),
    "teacher_model_init_kwargs": Option(needs=(OTHER_TEACHER,)),
    "learning_rate": Option(at_least(0), (OPTIMIZER,), also="lr", read=START),
    "beta": Option(from_to(0, 1), instead=ASSIGN, also="jsd_beta kl_beta gkd_beta"),
    "temperature": Option(above(0), resumed=True),
    "top_p": Option(share() | None, resumed=True),
    "top_k": Option(integer(0, "an integer of at least 0; 0 keeps every token") | None, resumed=True),
    "min_p": Option(from_to(0, 1) | None, resumed=True),
    "repetition_penalty": Option(above(0) | None, resumed=True),
    "max_completion_length": Option(_TOKENS, resumed=True, also="max_tokens generate_max_len max_response_length"),
    "generation_kwargs": Option(resumed=True),
    "cache_implementation": Option(one_of(*ALL_CACHE_IMPLEMENTATIONS) | None, (NO_ENGINE,)),
    "chat_template_kwargs": Option(resumed=True),
    "max_tool_calling_iterations": Option(at_least(0) | None, (TOOLS,), resumed=True),
    "shuffle_dataset": Option(resumed=True),
    "remove_unused_columns": Option(read=LIVE),
    "pad_to_multiple_of": Option(_MULTIPLE | None),
    "log_completions": Option(may_differ=True),
    "num_completions_to_print": Option(at_least(0) | None, (LOGS,)),
    "log_unique_prompts": Option(needs=(LOGS,), also="wandb_log_unique_prompts"),
    "ds3_gather_for_generation": Option(read=LIVE),
    "vllm_mode": Option(one_of("colocate", "server"), (VLLM,)),
    "vllm_enable_sleep_mode": Option(needs=(VLLM,), also="sleep_level free_cache_engine rollout_enable_sleep"),
    "vllm_structured_outputs_regex": Option(needs=(VLLM,), resumed=True),
    "vllm_max_model_length": Option(integer(1) | None, (ENGINE,)),
    "vllm_model_impl": Option(needs=(VLLM, COLOCATED)),
    "vllm_gpu_memory_utilization": Option(share(), (VLLM, COLOCATED)),
    "vllm_tensor_parallel_size": Option(integer(1), (VLLM, COLOCATED)),
    "vllm_server_base_url": Option(some_urls, (VLLM, SERVER)),
    "vllm_server_host": Option(needs=(VLLM, SERVER, NO_BASE_URL), may_differ=True),
    "vllm_server_port": Option(_PORT, (VLLM, SERVER, NO_BASE_URL), may_differ=True),
    "vllm_server_timeout": Option(at_least(0), (VLLM, SERVER)),
    "vllm_group_port": Option(_PORT, (VLLM, SERVER)),
}
"""Options of TRL's `DistillationConfig`."""

TRANSFORMERS: Mapping[str, Option] = {
    "output_dir": Option(may_differ=True, also="save_path", read=LIVE),
    "report_to": Option(TRACKERS, may_differ=True),
    "use_cpu": Option(also="no_cuda"),
    **dict.fromkeys(("bf16", "fp16", "full_determinism", "torch_compile", "neftune_noise_alpha"), Option()),
    **dict.fromkeys(("accelerator_config", "deepspeed", "fsdp", "fsdp_config", "enable_jit_checkpoint"), Option()),
    "ddp_timeout": Option(integer(1), read=LIVE),
    # rows and steps
    "per_device_train_batch_size": Option(integer(1), resumed=True, also="batch_size per_gpu_train_batch_size"),
    "per_device_eval_batch_size": Option(integer(1), read=LIVE),
    "gradient_accumulation_steps": Option(integer(1), resumed=True, read=START),
    "eval_accumulation_steps": Option(integer(1) | None, read=LIVE),
    "dataloader_num_workers": Option(at_least(0), read=LIVE),
    CHECKPOINTING: Option(read=START),
    "max_steps": Option(_STEPS, read=START),
    "num_train_epochs": Option(at_least(0), also="epochs num_epochs total_epochs", read=START),
    "seed": Option(_SEED, resumed=True, read=START),
    # the optimizer
    "optim": Option(needs=(OPTIMIZER,), read=START),
    "optim_args": Option(needs=(OPTIMIZER,), read=START),
    "optim_target_modules": Option(needs=(OPTIMIZER,), read=LIVE),
    "weight_decay": Option(at_least(0), (OPTIMIZER,), read=START),
    "adam_beta1": Option(from_to(0, 1), (OPTIMIZER,), read=START),
    "adam_beta2": Option(from_to(0, 1), (OPTIMIZER,), read=START),
    "adam_epsilon": Option(at_least(0), (OPTIMIZER,), read=START),
    "max_grad_norm": Option(at_least(0), also="max_norm", read=LIVE),
    "lr_scheduler_type": Option(needs=(SCHEDULER,), also="lr_scheduler", read=START),
    "lr_scheduler_kwargs": Option(needs=(SCHEDULER,), read=START),
    "warmup_steps": Option(at_least(0), (SCHEDULER,), read=START),
    # logs, evaluations, checkpoints
    "logging_steps": Option(above(0), _steps("logging_strategy"), read=START),
    "eval_steps": Option(at_least(0) | None, _steps("eval_strategy"), read=START),
    "save_steps": Option(above(0), _steps("save_strategy"), read=START),
    "eval_delay": Option(at_least(0), (EVALUATES,), read=LIVE),
    "metric_for_best_model": Option(needs=(EVALUATES,), read=LIVE),
    "save_total_limit": Option(at_least(0) | None, (SAVES,), read=LIVE),
    "save_only_model": Option(needs=(SAVES,), read=LIVE),
}
"""Options of transformers on which something depends here."""

OF_THE_OPTIMIZER = tuple(
    name for name, one in {**TRLS, **TRANSFORMERS}.items() if OPTIMIZER in one.needs and one.read is START
)
"""Options that are read when an optimizer is made."""


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
    now = Situation(args=args)
    compared = {name: one.resumed for name, one in table(type(args)).items()}
    return [name for name, one in compared.items() if (one.met(now) if isinstance(one, Need) else one)] + ["world_size"]


def without_effect(now: Situation) -> dict[str, str]:
    """The options that differ from their defaults and are not read, each with the reason."""
    reasons = {name: one.lacks(now) for name, one in table(type(now.args)).items() if is_set(now.args, name)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def without_effect_in_words(args: DistillationConfig, found: Mapping[str, str]) -> str:
    """What [`without_effect`] has found, as one sentence."""
    options = "; ".join(f"{shown(name, getattr(args, name))}, because {reason}" for name, reason in found.items())
    return f"Options without effect: {options}."


# ---- The objective in words, for the banner and the model card ------------------------------------------------------


def temperatures_in_words(student: float, teacher: float) -> str:
    """The temperatures of the loss."""
    if student == teacher:
        return f"temperature {student:g}"
    return f"temperature {student:g} (student) and {teacher:g} (teacher)"


def shape_in_words(args: Any) -> str:
    """What is done to the divergence of tokens, and what is added to it, with a comma before each."""
    now = Situation(args=args)
    told = {name: one for name, one in table(type(args)).items() if one.words and is_set(args, name)}
    parts = [one.words.format(getattr(args, name)) for name, one in told.items() if one.lacks(now) is None]
    selection = args.build_selection()
    return "".join(f", {part}" for part in (*parts, selection) if part is not None)


# ---- Changes of options ---------------------------------------------------------------------------------------------


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
        if not one.may_differ and (name not in TRANSFORMERS or one.read is not LIVE)
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


class ReadOnce:
    """Options that are read once, with the values they had then."""

    def __init__(self, args: DistillationConfig, read: Read) -> None:
        self._at, now = read, option_values(args)
        self.values = {name: now[name] for name, one in table(type(args)).items() if one.read is read}

    def check(self, args: DistillationConfig) -> None:
        """Raises `ValueError` for a change, which would have no effect, or break what has begun."""
        for name, then in self.values.items():
            now = getattr(args, name)
            if now != then:
                when, instead = _WHEN[self._at]
                raise ValueError(
                    f"`args.{name}` was read as {then!r} when {when}, and its new value {now!r} has no effect: "
                    f"{table(type(args))[name].instead or instead}, or restore it."
                )
