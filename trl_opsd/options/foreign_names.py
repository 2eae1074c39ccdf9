"""Unknown names of options and arguments: what TRL's other trainers mean by them, or the closest name here.

Plain renamings of an option stand with it (`Option.also`); docs/migration.md compares whole trainers.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, Self

from trl_opsd.options.table import table

_MIGRATION = "docs/migration.md compares the options of that trainer with these"
_WHOLE = (
    "the loss uses the full vocabulary, or with `top_k_teacher` the teacher's top k tokens and one bucket for the rest"
)
_ROWS = "it is `per_device_train_batch_size` x processes x `gradient_accumulation_steps`"
_NUMBER = "each completion is used for one optimizer step; `num_generations` sets the completions per prompt"
_PROMPTS = "prompts are never cut; `overlong_prompts='drop'` drops those that are too long"
_BYTES = "set `cross_tokenizer='bytes'`, which compares models with different tokenizers; see docs/tokenizers.md"
_ONCE = "it has no counterpart: completions are trained on once, so there is no ratio to clip or to weigh"
_ENGINE = (
    "the weights of 'sampled_reverse_kl', the only ones, are bounded by `vllm_importance_sampling_clip_max` as in the "
    "mode 'token_truncate', and 0 below `vllm_importance_sampling_clip_min` as in 'token_mask'"
)
_ENTROPY = "it has no counterpart: the loss has no entropy term; the log has `entropy/student`"
_WEIGHED = "the divergence has the weight 1; beside it set `reward_weight`, or `sft_weight` for cross-entropy"
_TEMPERATURES = "set `student_temperature` and `teacher_temperature`; `temperature` is that of sampling as well"
_FEEDBACK = "feedback is the column 'privileged_context', read where no completion succeeds; or use `teacher_prompt_fn`"
_QUANTISED = "pass `quantization_config=BitsAndBytesConfig(...)` to `OPSDTrainer`"
_LORA = "pass `peft_config=LoraConfig(...)` to `OPSDTrainer`"
_MODEL = "it is the argument `model` of `OPSDTrainer`"
_SCORED = (
    "pass `reward_funcs`, and an `eval_dataset`: an evaluation scores completions and logs `eval_rewards/<name>/mean`"
)
_ALWAYS = "it is always so: remove it"
_NONE = "it has no counterpart: remove it"


def _all(names: str, what: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), what)


_ADVICE = {
    # options of distillation; the first two tell which config this was
    "max_new_tokens": f"it is called `max_completion_length`; {_MIGRATION}",
    "distillation_alpha": f"it is called `beta`: 0 forward KL, 1 reverse KL; or set `divergence`; {_MIGRATION}",
    "use_extended_uld": _BYTES,
    **_all("teacher_tokenizer_name_or_path teacher_tokenizer", "pass `teacher_processing_class` to `OPSDTrainer`"),
    **_all("distillation_objective loss_mode kd_loss_fn kd_algorithm", "it is called `divergence`"),
    "use_policy_gradient": "set `divergence='sampled_reverse_kl'`",
    "loss_type": "`divergence` sets the objective, and `loss_aggregation` whether tokens or rows count alike",
    **_all("distillation_mode distillation_topk loss_top_k teacher_top_k reverse_kl_top_1_mode", _WHOLE),
    **_all("distillation_add_tail loss_add_tail add_tail_bucket", _WHOLE),
    **_all("distillation_weight distillation_loss_coef teacher_kl_coef kd_ratio rlhf_type", _WEIGHED),
    **_all("kd_temperature kd_temp uld_student_temperature uld_teacher_temperature", _TEMPERATURES),
    **_all("loss_max_clamp log_prob_min_clamp", "`kl_clip` bounds what each entry of the vocabulary adds"),
    "top_entropy_quantile": "set `token_selection='student_entropy'` and `token_fraction`",
    **_all("mask_truncated_completions num_loss_tokens_to_skip", "override `weigh`, see docs/extending.md"),
    **_all(
        "position_discount position_weights completion_length_start completion_length_steps anchor_divergence",
        "examples/small_methods.py has a method for it, to pass as `methods=[...]`",
    ),
    "teacher_model": "pass it to `OPSDTrainer`, or set `teacher_model_name_or_path`",
    # self-distillation
    "privileged_context": "it is a column of the dataset, see docs/teachers.md",
    "use_successful_as_teacher": "set `teacher_context='group_success'`",
    **_all("dont_reprompt_on_self_success remove_thinking_from_demonstration", _ALWAYS),
    **_all("include_environment_feedback environment_feedback_only_without_solution", _FEEDBACK),
    **_all("reprompt_template solution_template", "it is called `teacher_prompt_template`"),
    **_all("sync_ref_model use_ema_teacher", "set `teacher_model_kind='ema'`"),
    "teacher_ema_decay": "it is 1 - `teacher_update_rate`",
    # options of reinforcement learning, and of rows
    **_all("num_iterations steps_per_generation", _NUMBER),
    **_all("n n_samples_per_prompt", "it is called `num_generations`"),
    **_all("epsilon epsilon_high delta importance_sampling_level off_policy_mask_threshold", _ONCE),
    **_all("vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is_threshold", _ENGINE),
    **_all("vllm_importance_sampling_cap", _ENGINE),
    "use_adaptive_entropy": _ENTROPY,
    "use_bias_correction_kl": "`anchor_weight` is that of an exact KL, without an estimator: remove it",
    "use_task_rewards": "pass `reward_funcs` to `OPSDTrainer`, and set `reward_weight`",
    "normalize_advantages": "set `scale_rewards='batch'`",
    **_all("reward_clip_range missing_eos_penalty", "apply it in a reward function, see docs/data.md"),
    "micro_train_batch_size": "it is called `per_device_train_batch_size`",
    **_all("generation_batch_size train_batch_size rollout_batch_size ppo_mini_batch_size", _ROWS),
    **_all("max_prompt_length max_length max_len max_reprompt_len truncation_mode truncation_strategy", _PROMPTS),
    "filter_overlong_prompts": _PROMPTS,
    **_all("packing packing_strategy eval_packing", "`padding_free=True` concatenates the rows of a micro-batch"),
    **_all("use_dynamic_bsz use_dynamic_batch ppo_max_token_len_per_gpu", "set `max_tokens_per_microbatch`"),
    **_all("completion_only_loss assistant_only_loss", "the loss is on the tokens of completions only"),
    "label_smoothing": "there are no labels: remove it",
    **_all("eos_token pad_token chat_template_path", "set it in the tokenizer that you pass as `processing_class`"),
    **_all("do_sample num_beams", "put it into `generation_kwargs`"),
    "enable_thinking": "put it into `chat_template_kwargs`",
    **_all("input_key system", "messages are in the column 'prompt', see docs/data.md"),
    **_all("teacher_tag_key teacher_key", "the column 'teacher' names the teacher of each row"),
    # generation, servers, logs
    **_all("vllm_sync_frequency weight_sync_steps", "weights are synced whenever they have changed: remove it"),
    **_all("max_staleness max_inflight_tasks queue_maxsize", "`overlap='ahead'` generates one step ahead, no more"),
    **_all("request_timeout weight_sync_timeout heartbeat_stale_after_s", "`phase_timeout` bounds a phase of a step"),
    **_all("teacher_tp_size teacher_ep_size teacher_pp_size teacher_dp_size", "serve it: `teacher_server_url`"),
    "tensor_model_parallel_size": "it is called `vllm_tensor_parallel_size`",
    **_all("use_transformers_paged use_transformers_continuous_batching", "rows that have ended leave the batch"),
    **_all("log_completions_steps log_completions_hub_repo", "`log_completions` saves to `output_dir` with each log"),
    **_all(
        "log_multimodal fork_threshold_tokens transformers_continuous_batching_config diagnostics_warning_interval",
        _NONE,
    ),
    **_all("router_aux_loss_coef cast_lm_head_to_fp32 use_liger_loss diagnostics_flat_tolerance", _NONE),
    # options of loading and training
    **_all("dtype torch_dtype attn_implementation attn_impl model_revision", "put it into `model_init_kwargs`"),
    **_all("load_in_4bit load_in_8bit use_bnb_nested_quant quantization quant_method quant_bits", _QUANTISED),
    **_all("offload_teacher_model teacher_enable_sleep", "set `teacher_offload='cpu'`"),
    "teacher_deepspeed": "set `teacher_offload='zero3'`",
    "ring_attn_size": "`sp_size` in the accelerate file divides rows, see docs/distributed.md",
    **_all("student_model_name_or_path student_name_or_path model_name_or_path student", _MODEL),
    **_all("use_peft use_rslora use_dora tuner_type train_type target_modules", _LORA),
    "evaluation_strategy": "it is called `eval_strategy`",
    **_all("warmup_ratio lr_warmup_ratio", "it is called `warmup_steps`; a value below 1 is a share of all steps"),
    "activation_offloading": "set `gradient_checkpointing=True`",
    # arguments
    **_all("tokenizer processor", "it is the argument `processing_class` of `OPSDTrainer`"),
    **_all("teacher ref_model", "it is the argument `teacher_model` of `OPSDTrainer`"),
    "dataset": "it is the argument `train_dataset` of `OPSDTrainer`",
    "optimizer": "pass `optimizers=(optimizer, lr_scheduler)` to `OPSDTrainer`; each may be None",
    **_all("reward_func reward_model", "it is the argument `reward_funcs` of `OPSDTrainer`"),
    "rollout_func": "it is the argument `rollout` of `OPSDTrainer`, a `trl_opsd.RolloutBackend`",
    "data_collator": "rows reach the trainer as they are, and the rollout pads them: remove it",
    "formatting_func": "make a column 'prompt' with `dataset.map`",
    **_all("compute_metrics preprocess_logits_for_metrics", _SCORED),
    "compute_loss_func": "pass a `divergence`, see docs/extending.md",
}
"""Names of TRL's other trainers that are no plain renaming, and what to do here."""

_FAMILIES = {
    "student_": "it sets how to load the student: put it, without 'student_', into `model_init_kwargs`",
    "teacher_": "it sets how to load the teacher: put it, without 'teacher_', into `teacher_model_init_kwargs`",
    "lora_": _LORA,
    **dict.fromkeys(("uld_", "use_uld"), _BYTES),
    **dict.fromkeys(("vespo_", "sapo_", "iw_opd_"), _ONCE),
    "entropy_": _ENTROPY,
    "bnb_": _QUANTISED,
    "dataset_": "pass the dataset itself to `OPSDTrainer`, as `train_dataset` or `eval_dataset`",
    "reward_": "rewards are passed to `OPSDTrainer`, as `reward_funcs`; `reward_weight` is their weight in training",
}
"""What to do instead of options with these prefixes."""

TRAINER_ARGUMENTS = (
    *("model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers"),
    *("quantization_config", "peft_config", "tools", "rollout", "reward_funcs", "reward_processing_classes"),
    *("teacher_processing_class", "teacher_prompt_fn", "prompt_weight_fn", "environment_factory", "methods"),
)
"""Arguments of `OPSDTrainer` that are no options as well."""


COPIED = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_completion_length", "vllm_mode"),
    "use_vllm",
)
"""Attributes of TRL's trainer with options that are read at construction only."""
PASSED = ("tools", "processing_class", "eos_token_ids")
"""Attributes that are read at construction, and again in each step: with others the parts of a run would differ."""


@cache
def advice(config: type) -> Mapping[str, str]:
    """What to do instead of every name of other trainers."""
    also = {other: f"it is called `{name}`" for name, one in table(config).items() for other in one.also.split()}
    return {**also, **_ADVICE}


def instead(name: str, known: Iterable[str], config: type) -> str:
    """What to do instead of an unknown option or argument; empty if nothing is near."""
    prefix = next((start for start in _FAMILIES if name.startswith(start)), "")
    close = did_you_mean(name, [one for one in known if one.startswith(prefix)])
    return advice(config).get(name) or close or _FAMILIES.get(prefix, "")


def _explained(what: str, name: str, known: Collection[str], config: Any) -> str:
    """A sentence about an option or an argument, as `what` says, that does not exist."""
    if what == "option" and name in TRAINER_ARGUMENTS:
        return f"has no option {name!r}: it is an argument of `OPSDTrainer`."
    if what == "argument" and name in {one.name for one in fields(config)}:
        return f"has no argument {name!r}: it is an option, `args=OPSDConfig({name}=...)`."
    found = (
        instead(name, known, config) or "see docs/reference.md for all, docs/migration.md for those of other trainers."
    )
    return f"has no {what} {name!r}: {found}"


def check_attribute(of: Any, args: Any, name: str, value: Any) -> None:
    """Refuses an attribute of a trainer or of its options that is called like an option, or nearly: it is never read.

    A name of one word, or one that continues an option, is the user's: `config`, `rollouts`, `learning_rate_2`.
    """
    is_there = name in vars(of) or hasattr(type(of), name)
    if name.startswith("_") or (is_there and (of is args or name not in (*COPIED, *PASSED))):
        return
    if of is not args and name in PASSED:
        raise AttributeError(
            f"`trainer.{name}` was read when the trainer was built: build another trainer with that value.",
            name=name,
            obj=of,
        )
    config: Any = type(args)
    options = {one.name for one in fields(args)}
    close = [one for one in options if not name.startswith(one)]
    if name in options:
        why = f"it is an option: assign to `args.{name}`, or build a trainer with that value"
        if value == getattr(args, name):
            return  # a copy
    elif "_" in name and name in advice(config):
        why = advice(config)[name]
    elif found := difflib.get_close_matches(name, close, n=1, cutoff=0.9):
        why = f"it is unknown; did you mean `{found[0]}`"
    else:
        return
    shown = f"{'args' if of is args else 'trainer'}.{name} = {value!r}"
    raise AttributeError(
        f"`{shown}` would have no effect: {why}. Use another name for your own attribute.", name=name, obj=of
    )


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known name that this one may be a slip of, or at most three that have all of its parts.

    Example:

    ```python
    >>> nearest("vllm_host", ["vllm_server_host", "hub_token"]), nearest("eos_token", ["vllm_server_host", "hub_token"])
    (['vllm_server_host'], [])
    ```
    """
    # None where none is near: a wrong hint costs more than no hint.
    known = sorted(known, key=lambda one: (len(one), one))  # often a set, whose order differs from process to process
    longer = [one for one in known if set(name.split("_")) <= set(one.split("_"))]
    slip, similar = (difflib.get_close_matches(name, known, n=1, cutoff=cutoff) for cutoff in (0.9, 0.8))
    return slip or longer[:3] or similar


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest names; empty if there are none."""
    close = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


class StrictNames:
    """A class whose constructor refuses unknown names, each with what to do.

    A subclass that takes `**kwargs` may know more names than its signature tells, so it is left to Python.
    """

    _config_class: ClassVar[type | None] = None
    """The config of a class that takes arguments; `None` for a config itself, which takes options."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Checks the names; `__init__` takes the values.

        Raises:
            TypeError: A name is unknown.
        """
        known = inspect.signature(cls.__init__).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            unknown = [name for name in given if name not in known]
            if unknown:
                what, names = "argument" if cls._config_class else "option", list(known)[1:]
                told = (_explained(what, name, names, cls._config_class or cls) for name in unknown)
                raise TypeError("\n".join(f"`{cls.__name__}` {one}" for one in told))
        return super().__new__(cls)
