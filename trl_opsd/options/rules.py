"""Conflicts between options, as data: each rule is a condition and its message.

A message is a format: `{0.lmbda}` is an option, `{1}` is what the condition has returned. Values of single options are
in `table.py`; rules of a method are in its file, those of the trainer's arguments in `arguments/rules.py`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate import ParallelismConfig
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.training_args import OptimizerNames

from trl_opsd._compat.deepspeed import setting_without_loss_scale
from trl_opsd._compat.sharding import launched
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import GeneralizedJSD
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.options.table import SET, Values, above, below, one_of, shown


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that is refused, or warned of."""

    broken: Callable[[Any], Any]
    """Anything true if what its stage looks at breaks the rule."""
    message: str
    warns: bool = False


def together(why: str, *, warns: bool = False, **when: Any) -> Rule:
    """A rule against options that each have a value or one of some [`Values`]; its message begins with them."""

    def broken(now: Any) -> str:
        values = {name: getattr(now, name) for name in when}
        fit = (one.fits(values[name]) if isinstance(one, Values) else values[name] == one for name, one in when.items())
        first, *others = (shown(name, value) for name, value in values.items())
        return (f"{first} with {' and '.join(others)}" if others else first) if all(fit) else ""

    return Rule(broken, f"{{1}}{why}", warns)


def each(why: str, of: Mapping[str, Any], **when: Any) -> Iterator[Rule]:
    """A rule as of `together` for each of these options."""
    return (together(why, **{name: value}, **when) for name, value in of.items())


def unless(default: Any) -> Values:
    """Any value but the default."""
    return Values(f"not {default!r}", lambda value: value != default)


def refuse(rules: Iterable[Rule], now: Any, warn: Callable[[str], object] | None = None) -> None:
    """Raises `ValueError` for the first rule that is broken; of rules that warn, passes all messages on."""
    for rule in rules:
        if found := rule.broken(now):
            message = rule.message.format(now, found)
            if not rule.warns:
                raise ValueError(message)
            (warn or partial(warnings.warn, stacklevel=4))(message)  # where the config is made


def not_by_bytes(option: str, fits: Any, why: str) -> Rule:
    """Against `cross_tokenizer`."""
    return together(f", {why}: remove one of them.", **{option: fits}, cross_tokenizer=SET)


# ---- The rows of a step ---------------------------------------------------------------------------------------------


def prompts_of_step(args: DistillationConfig) -> int:
    """Prompts of an optimizer step, over all processes."""
    return _rows_of_step(args) // int(args.num_generations)


def batch_in_words(args: DistillationConfig) -> str:
    """The same with its factors."""
    each = "" if args.num_generations == 1 else f" / {args.num_generations} completions of each"
    return f"{prompts_of_step(args)} = {_factors(args)}{each}"


def _rows_of_step(args: DistillationConfig) -> int:
    return int(args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps)


def _factors(args: DistillationConfig) -> str:
    return (
        f"{args.per_device_train_batch_size} per device x {args.world_size} processes x "
        f"{args.gradient_accumulation_steps} accumulation steps"
    )


def _uneven_groups(args: Any) -> str:
    rows = _rows_of_step(args)
    return f"{rows} = {_factors(args)}" if rows % args.num_generations else ""


# ---- The launch, before accelerate is started -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """What rules about the launch read: its parallelism, and the options."""

    args: Any
    sizes: ParallelismConfig
    processes: int
    deepspeed: bool
    fsdp: bool

    @classmethod
    def of(cls, args: Any) -> Launch:
        deepspeed, fsdp = (os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("DEEPSPEED", "FSDP"))
        return cls(args, launched(args), _processes(), deepspeed, fsdp)

    @property
    def has_replicas(self) -> bool:
        """Whether processes have rows of their own, and not parts of a row."""
        return not self.sizes.sp_enabled and self.sizes.data_parallel_size > 1


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _with_sequences(broken: Callable[[Launch], Any], message: str) -> Rule:
    return Rule(
        lambda at: at.sizes.sp_enabled and broken(at),
        f"`parallelism_config`: `sp_size={{0.sizes.sp_size}}` {message}",
    )


def _of_whole_rows(at: Launch) -> str:
    """An option that needs whole rows in a process."""
    fine: dict[str, list[Any]] = {
        "padding_free": [False],
        "pad_to_multiple_of": [None, "auto"],
        "torch_compile": [False],
        "cross_tokenizer": [None],
        "teacher_prefix_cache_gb": [0],
    }
    values = {name: getattr(at.args, name) for name in fine}
    return next((shown(name, value) for name, value in values.items() if value not in fine[name]), "")


_INSTEAD = (
    "is not supported: set it to 1. To divide long rows use `sp_size` with DeepSpeed; to shard weights, "
    "`dp_shard_size` with FSDP2."
)

LAUNCH = (
    Rule(
        lambda at: at.sizes.tp_size > 1,
        f"`parallelism_config`: `tp_size={{0.sizes.tp_size}}`: tensor parallelism {_INSTEAD}",
    ),
    Rule(
        lambda at: at.sizes.cp_size > 1,
        f"`parallelism_config`: `cp_size={{0.sizes.cp_size}}`: context parallelism {_INSTEAD}",
    ),
    _with_sequences(
        lambda at: at.args.parallelism_config is not None,
        "as an option: TRL rejects it; put it into the accelerate file (`sp.yaml`).",
    ),
    _with_sequences(
        lambda at: not at.deepspeed,
        "in a launch without DeepSpeed, whose Ulysses divides the rows: launch with `distributed_type: DEEPSPEED` "
        "(`trl_opsd/accelerate_configs/sp.yaml`), or remove it.",
    ),
    _with_sequences(
        lambda at: (
            at.processes % at.sizes.sp_size or at.sizes.data_parallel_size not in (1, at.processes // at.sizes.sp_size)
        ),
        "on {0.processes} processes, with a data parallel size of {0.sizes.data_parallel_size}: expected a divisor of "
        "`num_processes`; remove `dp_replicate_size` and `dp_shard_size`.",
    ),
    _with_sequences(
        lambda at: not at.sizes.sp_handler.sp_seq_length_is_variable,
        "with `sp_seq_length`: completions differ in length: remove it.",
    ),
    _with_sequences(_of_whole_rows, "with {1} is not supported: remove one of them."),
    Rule(
        lambda at: at.has_replicas and at.sizes.dp_shard_size > 1 and not at.fsdp,
        "`parallelism_config`: `dp_shard_size={0.sizes.dp_shard_size}` in a launch without FSDP, where nothing would "
        "be sharded: launch with `distributed_type: FSDP` and `fsdp_version: 2` "
        "(`trl_opsd/accelerate_configs/hsdp.yaml`), or remove it; DeepSpeed shards by its `zero_stage`.",
    ),
    Rule(
        lambda at: (
            at.has_replicas and at.fsdp and (at.sizes.dp_shard_size == 1 or at.sizes.data_parallel_size != at.processes)
        ),
        "`parallelism_config`: {0.sizes.dp_replicate_size} replicas (`dp_replicate_size`) of {0.sizes.dp_shard_size} "
        "shards (`dp_shard_size`) on {0.processes} processes: expected at least 2 shards, and a product equal to "
        "`num_processes`.",
    ),
)
"""What is sharded by what, and over how many processes; conditions read a [`Launch`]."""


# ---- After transformers has read the options ------------------------------------------------------------------------


def _vanishes(args: Any) -> bool:
    found = args.build_divergence()
    return isinstance(found, GeneralizedJSD) and not 0.05 <= found.beta <= 0.95


def _accumulation_of_file(args: Any) -> Any:
    theirs = args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
    steps = theirs.get("gradient_accumulation_steps", "auto")
    return steps not in ("auto", args.gradient_accumulation_steps) and steps


def _all_alike(args: Any) -> str:
    """Why a prompt always gets the same completion; empty if it does not."""
    given = args.generation_kwargs or {}
    if given.get("top_k", args.top_k) == 1:
        return "only the likeliest token is kept (`top_k=1`)"
    if given.get("temperature") == 0 if args.has_engine else given.get("do_sample") is False:
        return "decoding is greedy"
    return "each row is sampled with this seed" if args.has_engine and given.get("seed") is not None else ""


def _several_alike(name: str) -> Rule:
    return Rule(
        lambda args: (getattr(args, name) or 1) > 1 and _all_alike(args),
        f"`{name}={{0.{name}}}` with `generation_kwargs={{0.generation_kwargs}}`: {{1}}, so all completions of a "
        "prompt would be identical: remove one of them.",
    )


_UNMOVABLE = {
    "quantization_config": "quantised weights have state tied to the device they were created on",
    "device_map": "accelerate would already move the weights",
    "tp_plan": "the weights would already be sharded",
}
"""Keys of `teacher_model_init_kwargs` with which `teacher_offload` cannot move the weights, and why."""


def _unmovable(args: Any) -> str:
    given = {} if args.teacher_offload == "none" else args.teacher_model_init_kwargs or {}
    found = (f"`{key}` in `teacher_model_init_kwargs`: {why}" for key, why in _UNMOVABLE.items() if key in given)
    return next(found, "")


def _rows_twice(name: str, value: bool, why: str, on_one: bool = False) -> Rule:
    return Rule(
        lambda args: getattr(args.accelerator_config, name) is value and (on_one or args.world_size > 1),
        f"`accelerator_config`: `{name}={value}` on {{0.world_size}} processes: {why}.",
    )


def _without_loss_scale(args: Any) -> Any:
    plugin = args.deepspeed_plugin
    return args.overlap == "step" and plugin is not None and setting_without_loss_scale(plugin.deepspeed_config)


_SAMPLED = Values("sampled", lambda one: one == "sampled_reverse_kl" or isinstance(one, SampledReverseKL))
_STEPS_IN_BACKWARD = Values(
    "an optimizer that steps in each backward pass",
    lambda optim: any(kind in str(OptimizerNames(optim).value) for kind in ("lomo", "layerwise")),
)
_CASTS = (
    " would cast the student's weights permanently in an evaluation: remove it, and set `bf16=True` to compute in "
    "bfloat16."
)

TRAINING = (
    Rule(
        _accumulation_of_file,
        "`gradient_accumulation_steps` is {1} in the accelerate or DeepSpeed file but {0.gradient_accumulation_steps} "
        "in `OPSDConfig`: remove it from the file.",
    ),
)
"""Of accumulation, which a file of the launch may set too."""

EVALUATION = (
    Rule(
        lambda args: (
            args.eval_temperature == 0
            and (several := args.num_generations_eval or args.num_generations) > 1
            and several
        ),
        "`eval_temperature=0` with {1} completions per prompt in evaluations, which would be identical: set "
        "`num_generations_eval=1`, or a temperature above 0.",
    ),
)
"""Of evaluations."""

AFTER = (
    # the loss
    together(
        ": concatenated rows are not padded; set only one of them.",
        padding_free=True,
        pad_to_multiple_of=SET,
    ),
    Rule(
        _vanishes,
        "`beta={0.beta}` is close to 0 or 1, where the generalised JSD and its gradient vanish instead of becoming a "
        "KL. For a KL, set `divergence='forward_kl'` or 'reverse_kl'.",
        warns=True,
    ),
    together(
        ", which steps in each backward pass: remove one of them.",
        max_tokens_per_microbatch=SET,
        optim=_STEPS_IN_BACKWARD,
    ),
    # the teacher
    *(
        not_by_bytes(name, value, why)
        for name, value, why in (
            ("top_k_teacher", SET, "whose buckets are tokens, where bytes have 257 outcomes"),
            ("kl_clip", SET, "which bounds the entries of a vocabulary of tokens"),
            ("divergence", _SAMPLED, "which needs the teacher's probability of each token of the student"),
            ("teacher_server_url", SET, "but a server sends states without the head and the vocabulary to sum them"),
            ("teacher_model_kind", SET, "but a student that teaches itself has the tokenizer of the student"),
            ("teacher_targets", SET, "but what is kept of a teacher are its tokens, not their bytes"),
        )
    ),
    together(
        ": this teacher is another one in each step, so nothing of it can be kept: remove one of them.",
        teacher_targets=SET,
        teacher_model_kind=one_of("ema", "live"),
    ),
    together(
        ": concatenated rows do not share a prefix; remove one of them.",
        teacher_prefix_cache_gb=unless(0),
        padding_free=True,
    ),
    Rule(
        _unmovable,
        "`teacher_offload={0.teacher_offload!r}` with {1}: remove it, or set `teacher_offload='none'`.",
    ),
    Rule(
        lambda args: args.teacher_offload == "zero3" and not is_deepspeed_zero3_enabled(),
        "`teacher_offload='zero3'`: this process was not launched with DeepSpeed ZeRO-3, so the teacher cannot be "
        "sharded: use `accelerate launch` with `zero_stage: 3`, or set `teacher_offload='stream'`.",
    ),
    # engines
    together(
        ": only one engine can generate: remove one of them.",
        sglang_server_url=SET,
        use_vllm=True,
    ),
    Rule(
        lambda args: (
            not args.ds3_gather_for_generation
            and args.has_engine
            and ("use_vllm=True" if args.use_vllm else "sglang_server_url")
        ),
        "`ds3_gather_for_generation=False` cannot be used with `{1}`: weights must be gathered before they are sent to "
        "it: remove it.",
    ),
    # what has no effect here, or another than its name says
    together(
        " would restart with another generation batch after an out-of-memory error: set `per_device_train_batch_size` "
        "and `gradient_accumulation_steps` to what fits.",
        auto_find_batch_size=True,
    ),
    together(" has no effect: there are no labels; remove it.", label_smoothing_factor=unless(0)),
    together(
        " has no effect: completion lengths are unknown before generation, and `shuffle_dataset=False` keeps the "
        "order; remove it.",
        train_sampling_strategy=unless("random"),
    ),
    together(
        " compiles a `forward` that neither generation nor the loss calls: remove it; to compile decoding, pass "
        "`rollout=HFRollout(compile=True)`.",
        torch_compile=True,
    ),
    together(_CASTS, fp16_full_eval=True),
    together(_CASTS, bf16_full_eval=True),
    together(" is ignored: `seed` determines the order.", warns=True, data_seed=SET),
    # the launch
    Rule(
        lambda args: _processes() > 1 and args.world_size == 1 and _processes(),
        "The launch has {1} processes (`WORLD_SIZE`), but accelerate sees one, so each would train its own student: on "
        "a machine without an accelerator, set `use_cpu=True`.",
    ),
    *TRAINING,
    _rows_twice(
        "split_batches",
        True,
        "it would split the rows of an optimizer step; lower `per_device_train_batch_size` instead",
    ),
    _rows_twice("dispatch_batches", True, "it sends rows as tensors, but prompts are text; remove it", on_one=True),
    _rows_twice(
        "even_batches",
        False,
        "a process could end an evaluation before the others; remove it (no row is counted twice)",
    ),
    Rule(
        # transformers before 5.15 is always in order
        lambda args: not getattr(args, "dataloader_in_order", True) and args.dataloader_num_workers,
        "`dataloader_in_order=False` would reorder batches, so rows of an optimizer step could be used twice or never: "
        "remove it.",
    ),
    Rule(
        lambda args: args.mixed_precision == "fp16" and args.device.type == "cpu" and args.deepspeed_plugin is None,
        "`fp16=True` (or `mixed_precision: fp16` in the accelerate file) on a CPU, which has no float16 loss scaler: "
        "set `bf16=True`, or neither for float32.",
    ),
    # concurrent generation and training
    together(
        ", whose engine runs in the trainer's process and sleeps during training: set `vllm_mode='server'`, or remove "
        "`overlap`.",
        overlap=SET,
        use_vllm=True,
        vllm_mode="colocate",
    ),
    together(", which steps in each backward pass: remove one of them.", overlap="step", optim=_STEPS_IN_BACKWARD),
    Rule(
        _without_loss_scale,
        "`overlap='step'` with DeepSpeed and this value of {1!r}: the number of tokens in the loss is known only at "
        "the end of a step, which only its ZeRO stage 1 to 3 optimizers support: set one of those stages, and remove "
        "`grad_accum_dtype`.",
    ),
    # who generates completions, and how many
    together(
        ", the default: the teacher would generate for no row. Set `lmbda=0.5` for half of them, as in TRL's GKD "
        "trainer, or 0 for all.",
        seq_kd=True,
        lmbda=1,
    ),
    together(
        ": generating needs a whole teacher in each process. Generate the completions beforehand, into a column "
        "'completion'.",
        seq_kd=True,
        teacher_server_url=SET,
    ),
    together(
        ": generating needs a whole teacher in each process. Set `teacher_offload='none'` or 'cpu', or generate the "
        "completions beforehand, into a column 'completion'.",
        seq_kd=True,
        teacher_offload=one_of("stream", "zero3"),
    ),
    together(" is not supported: set `lmbda=1`, or remove `overlap`.", lmbda=below(1), overlap=SET),
    together(
        ": a completion from the dataset may be trained on several times in a step. Set one of them to 1.",
        warns=True,
        lmbda=below(1),
        num_generations=above(1),
        seq_kd=False,
    ),
    Rule(
        _uneven_groups,
        "`num_generations={0.num_generations}`: a generation batch has {1} rows, which must be whole groups of "
        "completions of one prompt: set a divisor of {1}, or change the batch size.",
    ),
    _several_alike("num_generations"),
    _several_alike("num_generations_eval"),
    *EVALUATION,
)
"""Of options as they are read."""
