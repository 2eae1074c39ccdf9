"""Every option once: the values it may have, when it is read, what it needs to have an effect, what a resume compares.

To add an option: a field and its description in `OPSDConfig`, a line here, and the place that uses it. What two options
may not be together stands in `rules.py`. Options of transformers without a line are read and checked by transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.data.teacher_prompts import check_template
from trl_opsd.http.urls import is_origin, server_urls
from trl_opsd.losses import DIVERGENCES, Divergence
from trl_opsd.losses.token_selection import EARLY, LATE
from trl_opsd.monitor.course import STEPS
from trl_opsd.options.values import Values, above, at_least, between, from_to, integer, one_of, share


class Read(Enum):
    """When an option is read; a later change is refused, as it would have no effect."""

    BUILD = "when the trainer is built"
    START = "when a training begins"
    LIVE = "whenever it is needed"


BUILD, START, LIVE = Read


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The options, and what of the trainer's arguments decides whether they have an effect."""

    args: Any
    own_rollout: bool = False
    """Whether a rollout was passed, which may read any option of an engine."""
    teachers: Sequence[Any] = ()
    """As they were passed; `None` is the student itself."""
    optimizers: tuple[Any, Any] = (None, None)
    """Optimizer and scheduler that were passed."""
    tools: Any = None
    divergence: Any = None
    """The one that was passed, which overrides that of the options."""
    rewards: int = 0
    """Number of reward functions."""
    train_dataset: Any = None
    eval_dataset: Any = None
    teacher_prompt_fn: Any = None
    has_context: bool = True
    """Whether a dataset may have a column `privileged_context`."""

    @property
    def chosen(self) -> Any:
        """The divergence, as it was given."""
        return self.args.divergence if self.divergence is None else self.divergence

    @property
    def chosen_in_words(self) -> str:
        return "an object" if isinstance(self.chosen, Divergence) else repr(self.chosen)


@dataclass(frozen=True, slots=True)
class Need:
    """A condition without which an option has no effect."""

    lacking: str
    """Why the option has none; a format of the situation."""
    met: Callable[[Situation], Any]


def _divergences(*names: str) -> tuple[Need]:
    return (Need("`divergence` is {0.chosen_in_words}", lambda one: one.chosen in names),)


def _steps(strategy: str) -> tuple[Need]:
    return (Need(f"`{strategy}` is not 'steps'", lambda one: getattr(one.args, strategy) == "steps"),)


def _of_engine(lacking: str, met: Callable[[Any], Any]) -> Need:
    """A need of an option that a rollout of the user's own may read."""
    return Need(lacking, lambda one: one.own_rollout or met(one.args))


SELECTION = Need("`token_selection` is not set", lambda one: one.args.token_selection is not None)
FRACTION = Need("`token_fraction` is 1", lambda one: one.args.token_fraction != 1)
REWARDS = Need("there are no `reward_funcs`", lambda one: one.rewards)
REWARD_WEIGHT = Need("`reward_weight` is 0", lambda one: one.args.reward_weight)
OTHERS_WRITE = Need("`lmbda` is 1, so that the student writes all completions", lambda one: one.args.lmbda < 1)
EMA = Need("`teacher_model_kind` is not 'ema'", lambda one: one.args.teacher_model_kind == "ema")
OTHER_TEACHER = Need("the student is its own teacher", lambda one: one.args.teacher_model_kind is None)
LOADED = Need("no teacher is loaded from a path", lambda one: any(isinstance(path, str) for path in one.teachers))
TEACHER_SERVER = Need("`teacher_server_url` is not set", lambda one: one.args.teacher_server_url is not None)
NO_PROMPT_FN = Need("`teacher_prompt_fn` writes the teacher's prompts", lambda one: one.teacher_prompt_fn is None)
CONTEXT = Need("no dataset has a column 'privileged_context'", lambda one: one.has_context)
VLLM = _of_engine("`use_vllm` is False", lambda args: args.use_vllm)
ENGINE = _of_engine("`use_vllm` is False", lambda args: args.has_engine)
NO_ENGINE = _of_engine("an engine writes the completions", lambda args: not args.has_engine)
SERVER = _of_engine("`vllm_mode='colocate'` needs no server", lambda args: args.vllm_mode == "server")
COLOCATED = _of_engine(
    "`vllm_mode='server'`: the server is started with options of its own", lambda args: args.vllm_mode == "colocate"
)
NO_BASE_URL = _of_engine(
    "`vllm_server_base_url` says where the server is", lambda args: args.vllm_server_base_url is None
)
SGLANG = _of_engine("`sglang_server_url` is not set", lambda args: args.sglang_server_url is not None)
SKIPS = Need("`nonfinite` is 'raise'", lambda one: one.args.nonfinite == "skip" or one.args.mixed_precision == "fp16")
LONG = Need(
    f"`max_steps` is below {2 * STEPS}, and the first {2 * STEPS} steps are compared with nothing",
    lambda one: one.args.collapse_guard != "stop" or not 0 < one.args.max_steps < 2 * STEPS,
)
OVERLAP_STEP = Need("`overlap` is not 'step'", lambda one: one.args.overlap == "step")
OVERLAP_AHEAD = Need("`overlap` is not 'ahead'", lambda one: one.args.overlap == "ahead")
OPTIMIZER = Need("an optimizer was passed", lambda one: one.optimizers[0] is None)
SCHEDULER = Need("a scheduler was passed", lambda one: one.optimizers[1] is None)
EVALUATES = Need("`eval_strategy` is 'no'", lambda one: one.args.eval_strategy != "no")
SAVES = Need("`save_strategy` is 'no'", lambda one: one.args.save_strategy != "no" or one.args.enable_jit_checkpoint)
LOGS = Need("`log_completions` is False", lambda one: one.args.log_completions)
TOOLS = Need("there are no tools", lambda one: one.tools)


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its type, its default and its description, which `OPSDConfig` has."""

    read: Read
    takes: Values | Callable[[str, Any], Any] | None = None
    """Its values, or a function of name and value that raises `ValueError`; `None` where any of its type will do."""
    needs: tuple[Need, ...] = ()
    resumed: bool | Need = False
    """Whether a run resumes only with the same value: it determines the completions, the teacher's prompts, the rows of
    each step, or what is learned of them."""
    may_differ: bool = False
    """Whether processes may have different values: what one logs, and what is nearer to it."""
    instead: str = ""
    """What to do instead of changing it after it was read, if not the usual."""
    words: str = ""
    """What it does to the loss, for the banner and the model card; a format of its value."""

    def lacks(self, now: Situation) -> str | None:
        """Why it has no effect; `None` if it has one."""
        return next((need.lacking.format(now) for need in self.needs if not need.met(now)), None)


def is_set(args: DistillationConfig, name: str) -> bool:
    """Whether an option is not at its default."""
    return bool(getattr(args, name) != getattr(type(args), name))


def a_divergence(option: str, value: Any) -> None:
    """Raises `ValueError` unless a value is a divergence, the name of one, or `None`."""
    if isinstance(value, type) and issubclass(value, Divergence):
        raise ValueError(f"`{option}={value.__name__}` is a class: pass an object, `{value.__name__}()`.")
    if isinstance(value, Divergence):
        return
    if callable(value) or callable(getattr(value, "value", None)):
        raise ValueError(
            f"`{option}` is a {type(value).__name__}: expected an object of a class derived from "
            "`trl_opsd.losses.Divergence`, whose method `value` computes it from two log-probabilities, one number for "
            f"each token (docs/extending.md); or a name, one of {', '.join(map(repr, DIVERGENCES))}."
        )
    one_of(None, *DIVERGENCES).check(option, value)


def _a_template(option: str, value: Any) -> None:
    check_template(value)


def _are_weights(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, int | float) and math.isfinite(one) for one in value)


_WEIGHTS = Values("a list of finite numbers, one for each function", _are_weights)
_NAMES = Values("a list of names", lambda value: isinstance(value, list))
_TOKENS = integer(1, "an integer of at least 1, as the room for a completion has to be known before training")
_SEED = integer(0, "an integer from 0 to 4294967295, which is what NumPy takes", high=2**32 - 1)
_STEPS = integer(-1, "the number of optimizer steps, or -1, where `num_train_epochs` decides")
_MULTIPLE = Values("an integer of at least 1", lambda value: isinstance(value, str) or integer(1).fits(value))
"""TRL turns text into a number, and "auto" into what the device needs."""
_PORT = from_to(1, 65535)
_ORIGIN = Values("a scheme, a host and a port, as 'http://127.0.0.1:30000'", is_origin)
_ASSIGN = "assign `trainer.divergence`"

OURS: Mapping[str, Option] = MappingProxyType(
    {
        # the objective
        "divergence": Option(BUILD, a_divergence, instead=_ASSIGN),
        "skew": Option(BUILD, between(0, 1), _divergences("skewed_forward_kl", "skewed_reverse_kl")),
        "alpha": Option(BUILD, between(0, 1), _divergences("alpha_divergence")),
        "vllm_importance_sampling_clip_max": Option(BUILD, above(0) | None, _divergences("sampled_reverse_kl")),
        "top_k_teacher": Option(BUILD, integer(1) | None),
        "kl_clip": Option(BUILD, above(0) | None, resumed=True, words="each entry clipped at {:g} nats"),
        "student_temperature": Option(BUILD, above(0) | None, resumed=True),
        "teacher_temperature": Option(BUILD, above(0) | None, resumed=True),
        "position_discount": Option(
            BUILD, share(), resumed=True, words="each token counted {:g} times the one before it"
        ),
        "token_selection": Option(BUILD, one_of(None, *EARLY, *LATE), (FRACTION,), resumed=True),
        "token_fraction": Option(BUILD, share(), (SELECTION,), resumed=True),
        # who writes completions, and how many
        "num_generations": Option(BUILD, integer(1), resumed=True),
        "num_generations_eval": Option(BUILD, integer(1) | None),
        "eval_temperature": Option(LIVE, at_least(0) | None),
        "lmbda": Option(BUILD, from_to(0, 1), resumed=True),
        "seq_kd": Option(BUILD, resumed=True),
        "sft_weight": Option(
            BUILD,
            at_least(0),
            (OTHERS_WRITE,),
            resumed=True,
            words="plus {:g} times -log p of the dataset's completions",
        ),
        # rewards
        "reward_weight": Option(
            BUILD, at_least(0), resumed=True, words="plus {:g} times the policy gradient of rewards"
        ),
        "reward_weights": Option(BUILD, _WEIGHTS | None, (REWARDS,), resumed=REWARD_WEIGHT),
        "scale_rewards": Option(BUILD, one_of("group", "batch", "none"), (REWARD_WEIGHT,), resumed=REWARD_WEIGHT),
        "multi_objective_aggregation": Option(
            BUILD, one_of("sum_then_normalize", "normalize_then_sum"), (REWARD_WEIGHT,), resumed=REWARD_WEIGHT
        ),
        # rows and memory
        "overlong_prompts": Option(BUILD, one_of("error", "drop")),
        "loss_chunk_tokens": Option(LIVE, integer(1) | None),
        "max_tokens_per_microbatch": Option(LIVE, integer(1) | None),
        "padding_free": Option(BUILD),
        "overlap": Option(BUILD, one_of(None, "step", "ahead")),
        "overlap_max_divergence": Option(BUILD, above(0), (OVERLAP_AHEAD,)),
        "deterministic": Option(BUILD, needs=(OVERLAP_STEP,)),
        # the teacher
        "teacher_model_kind": Option(BUILD, one_of(None, "base", "ema", "live"), resumed=True),
        "teacher_update_rate": Option(BUILD, share(), (EMA,), resumed=EMA),
        "teacher_sync_steps": Option(BUILD, integer(1), (EMA,), resumed=EMA),
        "teacher_trust_remote_code": Option(BUILD, needs=(LOADED,)),
        "teacher_prompt_template": Option(
            BUILD, lambda _, template: check_template(template), (NO_PROMPT_FN, CONTEXT), resumed=True
        ),
        "teacher_chat_template_kwargs": Option(BUILD, resumed=True),
        "teacher_offload": Option(BUILD, one_of("none", "cpu", "stream", "zero3")),
        "teacher_cache_device": Option(BUILD, one_of("auto", "cpu", "accelerator")),
        "teacher_server_url": Option(BUILD, server_urls, may_differ=True),
        "teacher_server_timeout": Option(BUILD, at_least(0), (TEACHER_SERVER,)),
        # how a run goes wrong, and is watched
        "nonfinite": Option(LIVE, one_of("raise", "skip")),
        "nonfinite_skip_limit": Option(LIVE, integer(1), (SKIPS,)),
        "collapse_guard": Option(BUILD, one_of(None, "warn", "stop"), (LONG,)),
        "phase_timeout": Option(BUILD, above(0) | None),
        "report": Option(BUILD),
        "resume_with_changes": Option(LIVE, _NAMES | None),
        # engines
        "vllm_weight_sync": Option(BUILD, one_of("auto", "adapter", "full"), (VLLM,)),
        "vllm_sync_check": Option(LIVE, one_of("every", "first", "never"), (ENGINE,)),
        "sglang_server_url": Option(BUILD, _ORIGIN | None),
        "sglang_server_timeout": Option(BUILD, at_least(0), (SGLANG,)),
    }
)
"""Options that TRL's `DistillationConfig` does not have."""

TRLS: Mapping[str, Option] = MappingProxyType(
    {
        "model_init_kwargs": Option(BUILD),
        "trust_remote_code": Option(BUILD),
        "disable_dropout": Option(BUILD),
        "teacher_model_name_or_path": Option(BUILD, may_differ=True),
        "teacher_model_revision": Option(BUILD, needs=(LOADED,)),
        "teacher_model_init_kwargs": Option(BUILD, needs=(OTHER_TEACHER,)),
        "learning_rate": Option(START, at_least(0), (OPTIMIZER,)),
        "beta": Option(BUILD, from_to(0, 1), instead=_ASSIGN),
        "temperature": Option(BUILD, above(0), resumed=True),
        "top_p": Option(BUILD, share() | None, resumed=True),
        "top_k": Option(BUILD, integer(0, "an integer of at least 0; 0 keeps every token") | None, resumed=True),
        "min_p": Option(BUILD, from_to(0, 1) | None, resumed=True),
        "repetition_penalty": Option(BUILD, above(0) | None, resumed=True),
        "max_completion_length": Option(BUILD, _TOKENS, resumed=True),
        "generation_kwargs": Option(BUILD, resumed=True),
        "cache_implementation": Option(BUILD, one_of(*ALL_CACHE_IMPLEMENTATIONS) | None, (NO_ENGINE,)),
        "chat_template_kwargs": Option(BUILD, resumed=True),
        "max_tool_calling_iterations": Option(BUILD, at_least(0) | None, (TOOLS,), resumed=True),
        "shuffle_dataset": Option(BUILD, resumed=True),
        "remove_unused_columns": Option(LIVE),
        "pad_to_multiple_of": Option(BUILD, _MULTIPLE | None),
        "log_completions": Option(BUILD, may_differ=True),
        "num_completions_to_print": Option(BUILD, at_least(0) | None, (LOGS,)),
        "log_unique_prompts": Option(BUILD, needs=(LOGS,)),
        "ds3_gather_for_generation": Option(LIVE),
        "use_vllm": Option(BUILD),
        "vllm_mode": Option(BUILD, one_of("colocate", "server"), (VLLM,)),
        "vllm_enable_sleep_mode": Option(BUILD, needs=(VLLM,)),
        "vllm_structured_outputs_regex": Option(BUILD, needs=(VLLM,), resumed=True),
        "vllm_max_model_length": Option(BUILD, integer(1) | None, (ENGINE,)),
        "vllm_model_impl": Option(BUILD, needs=(VLLM, COLOCATED)),
        "vllm_gpu_memory_utilization": Option(BUILD, share(), (VLLM, COLOCATED)),
        "vllm_tensor_parallel_size": Option(BUILD, integer(1), (VLLM, COLOCATED)),
        "vllm_server_base_url": Option(BUILD, needs=(VLLM, SERVER)),
        "vllm_server_host": Option(BUILD, None, (VLLM, SERVER, NO_BASE_URL), may_differ=True),
        "vllm_server_port": Option(BUILD, _PORT, (VLLM, SERVER, NO_BASE_URL), may_differ=True),
        "vllm_server_timeout": Option(BUILD, at_least(0), (VLLM, SERVER)),
        "vllm_group_port": Option(BUILD, _PORT, (VLLM, SERVER)),
    }
)
"""Options of TRL's `DistillationConfig`."""

TRANSFORMERS: Mapping[str, Option] = MappingProxyType(
    {
        "output_dir": Option(LIVE, may_differ=True),
        "report_to": Option(BUILD, may_differ=True),
        "bf16": Option(BUILD),
        "fp16": Option(BUILD),
        "use_cpu": Option(BUILD),
        "full_determinism": Option(BUILD),
        "enable_jit_checkpoint": Option(BUILD),
        "neftune_noise_alpha": Option(BUILD),
        "torch_compile": Option(BUILD),
        "accelerator_config": Option(BUILD),
        "deepspeed": Option(BUILD),
        "fsdp": Option(BUILD),
        "fsdp_config": Option(BUILD),
        "ddp_timeout": Option(LIVE, integer(1)),
        # rows and steps
        "per_device_train_batch_size": Option(BUILD, integer(1), resumed=True),
        "per_device_eval_batch_size": Option(LIVE, integer(1)),
        "gradient_accumulation_steps": Option(START, integer(1), resumed=True),
        "eval_accumulation_steps": Option(LIVE, integer(1) | None),
        "dataloader_num_workers": Option(LIVE, at_least(0)),
        CHECKPOINTING: Option(START),
        "max_steps": Option(START, _STEPS),
        "num_train_epochs": Option(START, at_least(0)),
        "seed": Option(START, _SEED, resumed=True),
        # the optimizer
        "optim": Option(START, needs=(OPTIMIZER,)),
        "optim_args": Option(START, needs=(OPTIMIZER,)),
        "optim_target_modules": Option(LIVE, needs=(OPTIMIZER,)),
        "weight_decay": Option(START, at_least(0), (OPTIMIZER,)),
        "adam_beta1": Option(START, from_to(0, 1), (OPTIMIZER,)),
        "adam_beta2": Option(START, from_to(0, 1), (OPTIMIZER,)),
        "adam_epsilon": Option(START, at_least(0), (OPTIMIZER,)),
        "max_grad_norm": Option(LIVE, at_least(0)),
        "lr_scheduler_type": Option(START, needs=(SCHEDULER,)),
        "lr_scheduler_kwargs": Option(START, needs=(SCHEDULER,)),
        "warmup_steps": Option(START, at_least(0), (SCHEDULER,)),
        # logs, evaluations, checkpoints
        "logging_steps": Option(START, needs=_steps("logging_strategy")),
        "eval_steps": Option(START, needs=_steps("eval_strategy")),
        "save_steps": Option(START, needs=_steps("save_strategy")),
        "eval_delay": Option(LIVE, at_least(0), (EVALUATES,)),
        "metric_for_best_model": Option(LIVE, needs=(EVALUATES,)),
        "save_total_limit": Option(LIVE, at_least(0) | None, (SAVES,)),
        "save_only_model": Option(LIVE, needs=(SAVES,)),
    }
)
"""Options of transformers on which something depends here."""

TABLE: Mapping[str, Option] = MappingProxyType({**OURS, **TRLS, **TRANSFORMERS})

OF_THE_OPTIMIZER = tuple(name for name, one in TABLE.items() if OPTIMIZER in one.needs and one.read is START)
"""Options that are read when an optimizer is made."""


def check_values(args: DistillationConfig, names: Sequence[str] = tuple(TABLE)) -> None:
    """Raises `ValueError` for the first option whose value does not fit."""
    for name in names:
        takes = TABLE[name].takes
        if takes is not None:
            (takes.check if isinstance(takes, Values) else takes)(name, getattr(args, name))


def resumed(args: DistillationConfig) -> list[str]:
    """The options that a resume compares; `world_size` is of the launch, and counts the rows of a step as well."""
    now = Situation(args=args)
    compared = {name: one.resumed for name, one in TABLE.items()}
    return [name for name, one in compared.items() if (one.met(now) if isinstance(one, Need) else one)] + ["world_size"]


def without_effect(now: Situation) -> dict[str, str]:
    """The options that differ from their defaults and are not read, each with the reason."""
    reasons = {name: one.lacks(now) for name, one in TABLE.items() if is_set(now.args, name)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def without_effect_in_words(args: DistillationConfig, found: Mapping[str, str]) -> str:
    """What [`without_effect`] has found, as one sentence."""
    values = {name: getattr(args, name) for name in found}
    shown = {name: repr(getattr(value, "value", value)) for name, value in values.items()}  # an enum by its value
    options = "; ".join(f"`{name}={shown[name]}`, because {reason}" for name, reason in found.items())
    return f"Options without effect: {options}."
