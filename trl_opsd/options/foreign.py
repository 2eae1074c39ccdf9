"""Options and arguments of other trainers: what they are called here, or why there is nothing like them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.options.names import did_you_mean

DEFAULTS = {
    "gkd": "learning_rate=2e-05, temperature=0.9, lmbda=0.5, beta=0.5, disable_dropout=True, "
    "max_completion_length=128, student_temperature=1.0, teacher_temperature=1.0",
    "gold": "learning_rate=1e-07, temperature=0.9, top_p=0.95, lmbda=0.5, beta=0.5, max_completion_length=128, "
    "disable_dropout=True, vllm_gpu_memory_utilization=0.9",
    "sdft": "learning_rate=5e-05, disable_dropout=True, num_generations=8, max_completion_length=256, "
    r"teacher_model_kind='base', beta=0.5, teacher_prompt_template='{prompt}\n\n{privileged_context}'",
    "sdpo": "learning_rate=5e-05, disable_dropout=True, num_generations=8, max_completion_length=256, "
    "teacher_model_kind='ema'",
}
"""What a config of `trl.experimental` has by default, where that is another value here, in the names of here."""
_AS_THERE = "other defaults there, to be set for the same training:"
_ONE_TOKENIZER = "teacher and student share one tokenizer; `trl.experimental.gold` compares two"
_OTHER_DEFAULTS = {
    "max_new_tokens": f"it is called `max_completion_length`. If this was a `GKDConfig`, {_AS_THERE} {DEFAULTS['gkd']}",
    "distillation_alpha": "it is called `beta`: 0 forward KL, 1 reverse KL; or set `divergence`. If this was an "
    f"`SDFTConfig`, {_AS_THERE} {DEFAULTS['sdft']}; an `SDPOConfig`, whose `beta` weighs a reference: "
    f"{DEFAULTS['sdpo']}",
    "use_uld_loss": f"{_ONE_TOKENIZER}. With one tokenizer, its loss is that of here divided by "
    f"`gradient_accumulation_steps`; {_AS_THERE} {DEFAULTS['gold']}",
}
"""Options that tell which config this was."""
_NO_IW_OPD = "the objective of `iw_opd` is not here; 'sampled_reverse_kl' compares sampled tokens without its weights"
_AS_DAPO = "`loss_type` of TRL's GRPO is not chosen here: each token of a completion counts alike, as in its 'dapo'"
_REWARDS = "rewards are passed to `OPSDTrainer`, as `reward_funcs`; `reward_weight` says what they count in training"
_PEFT = "pass `peft_config=LoraConfig(...)` to `OPSDTrainer`"
_WHOLE = "the loss compares the whole vocabulary; with `top_k_teacher` the teacher's likeliest, and all others as one"
_WEIGHT_1 = "the divergence has the weight 1, and rewards `reward_weight` beside it"
_REPROMPTED = (
    "SDPO's prompts from successful completions and feedback are not here; `teacher_prompt_fn`, an argument of "
    "`OPSDTrainer`, takes a row and the text of its completion and returns what the teacher reads"
)
_NO_RATIO = "a completion is learned once, by the student that wrote it, so there is no ratio of policies to bound"


def _each(advice: Mapping[str, str]) -> dict[str, str]:
    """The same by single names."""
    return {name: said for names, said in advice.items() for name in names.split()}


OPTIONS = _OTHER_DEFAULTS | _each(
    {
        # distillation
        "generate_from_teacher": "it is called `seq_kd`, with `lmbda` below 1",
        "teacher_tokenizer_name_or_path use_extended_uld": _ONE_TOKENIZER,
        "distillation_objective": f"it is called `divergence`; {_NO_IW_OPD}",
        "loss_type": f"`divergence` says what is compared; {_AS_DAPO}",
        "kl_type f_divergence_type kl_loss_type kl_estimator loss_mode": "it is called `divergence`",
        "jsd_beta kl_beta gkd_beta": "it is called `beta`",
        "jsd_token_clip token_clip loss_clip": "it is called `kl_clip`",
        "skew_alpha skl_alpha": "it is called `skew`",
        "f_alpha_divergence_coef": "it is called `alpha`, with `divergence='alpha_divergence'`",
        "distillation_mode distillation_topk distillation_add_tail loss_top_k loss_add_tail add_tail_bucket": _WHOLE,
        "teacher_top_k reverse_kl_top_1_mode": _WHOLE,
        "distillation_weight kd_alpha kl_coef router_aux_loss_coef label_smoothing": _WEIGHT_1,
        "distillation_is_clip vllm_importance_sampling_cap": "it is called `vllm_importance_sampling_clip_max`",
        "kd_temperature distillation_temperature": "set `temperature`, or `teacher_` and `student_temperature`",
        "sft_alpha sft_coef rpo_alpha": "it is called `sft_weight`, with `lmbda` below 1",
        "top_entropy_quantile": "set `token_selection='student_entropy'` and `token_fraction`",
        "num_loss_tokens_to_skip mask_truncated_completions": "override `weigh`, see docs/extending.md",
        "teacher_model": "pass it to `OPSDTrainer`, or set `teacher_model_name_or_path`",
        "teacher_models": "pass a dict to `OPSDTrainer` as `teacher_model`, and a column 'teacher'",
        "teacher_model_server_url teacher_server_urls use_teacher_server": "it is called `teacher_server_url`",
        "ema_decay teacher_ema_decay": "with `teacher_model_kind='ema'`, `teacher_update_rate` is 1 - decay",
        "ref_model_mixup_alpha ema_rate": "it is called `teacher_update_rate`, with `teacher_model_kind='ema'`",
        "ref_model_sync_steps": "it is called `teacher_sync_steps`, with `teacher_model_kind='ema'`",
        "sync_ref_model self_distillation": "`teacher_model_kind='ema'` is a teacher that follows the student",
        "privileged_context": "it is a column of the dataset, see docs/teachers.md",
        "reprompt_template solution_template feedback_template success_reward_threshold": _REPROMPTED,
        "use_successful_as_teacher dont_reprompt_on_self_success include_environment_feedback": _REPROMPTED,
        "environment_feedback_only_without_solution remove_thinking_from_demonstration": _REPROMPTED,
        # reinforcement learning
        "num_iterations steps_per_generation": "a completion is used for one optimizer step; `num_generations` is the "
        "completions of a prompt",
        "epsilon epsilon_high delta importance_sampling_level off_policy_mask_threshold": _NO_RATIO,
        "rollout_n num_return_sequences": "it is called `num_generations`",
        "generation_batch_size train_batch_size global_batch_size": "it is `per_device_train_batch_size` x processes x "
        "`gradient_accumulation_steps`, in completions",
        "reward_coef": "it is called `reward_weight`",
        "use_bias_correction_kl": "the divergence is computed over the whole vocabulary, and needs no correction",
        "entropy_coef entropy_target use_adaptive_entropy": "the loss has no term for entropy; "
        "`divergence='forward_kl'` keeps the student's entropy up",
        "max_staleness max_inflight_tasks queue_maxsize": "`overlap='ahead'` writes the rows of the next step "
        "meanwhile, one step old; see docs/overlap.md",
        "diagnostics_warning_interval diagnostics_flat_tolerance": "`collapse_guard` watches a run",
        "vllm_sync_frequency weight_sync_steps": "weights are sent to vLLM whenever they have changed",
        "request_timeout weight_sync_timeout heartbeat_stale_after_s": "a request to a server has nine tenths of "
        "`ddp_timeout`, see docs/rollouts.md",
        "use_transformers_paged use_transformers_continuous_batching": "rows leave the batch as they end; "
        "`use_vllm=True` hands them to vLLM, which batches continuously",
        "vllm_enforce_eager vllm_engine_kwargs": "give it to `vllm serve`, with `vllm_mode='server'`",
        # rows, prompts and tokens
        "max_prompt_length max_reprompt_len truncation_mode": "prompts are never cut; `overlong_prompts='drop'` drops "
        "those that are too long",
        "max_length": "`max_completion_length` limits completions; prompts are never cut, see `overlong_prompts`",
        "max_tokens": "it is called `max_completion_length`",
        "packing packing_strategy eval_packing": "`padding_free=True` reads the rows of a micro-batch as one",
        "token_budget": "it is called `max_tokens_per_microbatch`",
        "completion_only_loss assistant_only_loss": "the loss is on the tokens of completions, and on no others",
        "dataset_text_field": "the column is called 'prompt'",
        "dataset_num_proc": "datasets are read in one process",
        "eos_token pad_token chat_template_path": "set it in the tokenizer that you pass as `processing_class`",
        "eos_token_id stop_strings": "`generation_kwargs={'eos_token_id': ...}` says which tokens end a completion",
        "do_sample num_beams": "put it into `generation_kwargs`",
        "enable_thinking": "put it into `chat_template_kwargs`, or `teacher_chat_template_kwargs`",
        # loading
        "dtype torch_dtype attn_implementation device_map model_revision": "it says how to load a model: put it into "
        "`model_init_kwargs` or `teacher_model_init_kwargs`",
        "load_in_4bit load_in_8bit": "pass `quantization_config` to `OPSDTrainer`",
        "student_model_name_or_path model_name_or_path": "pass it to `OPSDTrainer` as `model`",
        "use_peft": _PEFT,
        # the training loop, and earlier versions of transformers
        "evaluation_strategy": "it is called `eval_strategy`",
        "no_cuda": "it is called `use_cpu`",
        "warmup_ratio": "it is called `warmup_steps`, where a value below 1 is a share of all steps",
        "lr": "it is called `learning_rate`",
        "epochs num_epochs": "it is called `num_train_epochs`",
        "batch_size per_gpu_train_batch_size": "it is called `per_device_train_batch_size`",
        "wandb_log_unique_prompts": "it is called `log_unique_prompts`",
        "log_completions_steps": "`log_completions=True` logs every `logging_steps`",
        "group_by_length": "the length of a completion is not known before it is generated",
        "overwrite_output_dir": "a run writes into its folder; `resume_from_checkpoint` continues the one in it",
        "logging_dir": "set the environment variable `TENSORBOARD_LOGGING_DIR`",
        "activation_offloading": f"`{CHECKPOINTING}`, which is on by default, saves that memory",
        "mixed_precision precision": "set `bf16` or `fp16`",
        "num_processes": "the launch decides: `accelerate launch`, see docs/sharding.md",
    }
)
"""Options that configs of other trainers have, and what to do here."""

FAMILIES = {
    "student_": "it says how to load the student: put it, without 'student_', into `model_init_kwargs`",
    "teacher_": "it says how to load the teacher: put it, without 'teacher_', into `teacher_model_init_kwargs`",
    "lora_": _PEFT,
    "dataset_": "pass the dataset itself to `OPSDTrainer`, as `train_dataset` or `eval_dataset`",
    "reward_": _REWARDS,
    "sapo_": _AS_DAPO,
    "vespo_": _AS_DAPO,
    "uld_": _ONE_TOKENIZER,
    "vllm_importance_sampling_": "weights of single tokens are bounded by `vllm_importance_sampling_clip_max`",
    "iw_opd_": _NO_IW_OPD,
}
"""What to do instead of options that begin so."""

ARGUMENTS = _each(
    {
        "tokenizer": "it is called `processing_class`",
        "teacher_tokenizer": "it is called `teacher_processing_class`",
        "student student_model": "it is called `model`",
        "teacher": "it is called `teacher_model`",
        "ref_model": "it is called `teacher_model`; `teacher_model_kind` makes the student its own teacher",
        "config training_args": "it is called `args`",
        "dataset": "it is called `train_dataset`",
        "optimizer lr_scheduler": "pass `optimizers=(optimizer, lr_scheduler)`, each of which may be None",
        "lora_config": "it is called `peft_config`",
        "reward_func reward_functions reward_model": "it is called `reward_funcs`",
        "reward_tokenizers": "it is called `reward_processing_classes`",
        "rollout_func": "it is called `rollout`, a `trl_opsd.RolloutBackend`",
        "data_collator": "rows reach the trainer as they are, and the rollout pads them: remove it",
        "formatting_func": "make a column 'prompt' with `dataset.map`",
        "compute_metrics preprocess_logits_for_metrics": "there are no labels to compare predictions with; an "
        "evaluation logs `eval_loss` and `eval_divergence/mean`",
        "compute_loss_func": "pass a `divergence`, see docs/extending.md",
        "loss": "it is called `divergence`",
        "model_init": "pass the model itself",
    }
)
"""Arguments that other trainers have, and what to do here."""

TRAINER_ARGUMENTS = (
    *("model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers"),
    *("quantization_config", "peft_config", "tools", "rollout", "reward_funcs", "reward_processing_classes"),
    *("teacher_processing_class", "teacher_prompt_fn"),
)
"""Arguments of `OPSDTrainer` that are no options as well."""


def known_elsewhere(name: str) -> str:
    """What to do instead of an option of another trainer; empty for a name that none of them is known to have."""
    return OPTIONS.get(name) or next((said for start, said in FAMILIES.items() if name.startswith(start)), "")


def without_meaning(name: str, known: Collection[str]) -> str:
    """Why a new attribute beside the known ones would change nothing; empty for one of the user's own.

    A name of one word, or one that continues a known one, is the user's: `config`, `rollouts`, `train_dataset_2`.
    """
    if name.startswith("_"):
        return ""
    if "_" in name and (elsewhere := OPTIONS.get(name) or ARGUMENTS.get(name)):
        return elsewhere
    candidates = [one for one in known if not one.startswith("_") and not name.startswith(one)]
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.9)
    return f"nothing reads it, did you mean `{close[0]}`" if close else ""


def explained_option(name: str, known: Collection[str]) -> str:
    """A sentence about an option that does not exist beside the known ones."""
    if name not in OPTIONS and name in TRAINER_ARGUMENTS:
        return f"has no option {name!r}: it is an argument of `OPSDTrainer`."
    if name not in OPTIONS and name in ARGUMENTS:
        return f"has no option {name!r}; of `OPSDTrainer`: {ARGUMENTS[name]}."
    return f"has no option {name!r}{_instead(name, OPTIONS, known)}"


def explained_argument(name: str, known: Collection[str], options: Collection[str]) -> str:
    """A sentence about an argument of the trainer that does not exist beside the known ones."""
    if name not in ARGUMENTS and name in options:
        return f"has no argument {name!r}: it is an option, `args=OPSDConfig({name}=...)`."
    if name not in ARGUMENTS and name in OPTIONS:
        return f"has no argument {name!r}; in `OPSDConfig`: {OPTIONS[name]}."
    return f"has no argument {name!r}{_instead(name, ARGUMENTS, known)}"


def _instead(name: str, elsewhere: Mapping[str, str], known: Collection[str]) -> str:
    if name in elsewhere:
        return f": {elsewhere[name]}."
    family = next((start for start in FAMILIES if name.startswith(start)), "")
    if close := did_you_mean(name, [one for one in known if one.startswith(family)]):
        return f". {close[0].upper()}{close[1:]}"
    said = known_elsewhere(name) or known_elsewhere("".join(difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.9)))
    return f": {said}." if said else ". docs/reference.md lists all."
