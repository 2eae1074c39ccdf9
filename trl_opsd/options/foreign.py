"""Options and arguments of other trainers: what they are called here, or why there is nothing like them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from trl_opsd._compat.transformers import CHECKPOINTING
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
_OF_GKD = f"it is called `max_completion_length`. If this was a `GKDConfig`, {_AS_THERE} {DEFAULTS['gkd']}"
_OF_SELF = (
    f"it is called `beta`: 0 forward KL, 1 reverse KL; or set `divergence`. If this was an `SDFTConfig`, {_AS_THERE} "
    f"{DEFAULTS['sdft']}; an `SDPOConfig`, whose `beta` weighs a reference: {DEFAULTS['sdpo']}"
)
_ONE_TOKENIZER = "teacher and student share one tokenizer; `trl.experimental.gold` compares two"
_OF_GOLD = (
    f"{_ONE_TOKENIZER}. With one tokenizer, its loss is that of here divided by `gradient_accumulation_steps`; "
    f"{_AS_THERE} {DEFAULTS['gold']}"
)
_NEVER_CUT = "prompts are never cut; `overlong_prompts='drop'` drops those that are too long"
_NO_IW_OPD = "the objective of `iw_opd` is not here; 'sampled_reverse_kl' compares sampled tokens without its weights"
_AS_DAPO = "`loss_type` of TRL's GRPO is not chosen here: each token of a completion counts alike, as in its 'dapo'"
_REWARDS = "rewards are passed to `OPSDTrainer`, as `reward_funcs`; `reward_weight` says what they count in training"
_PEFT = "pass `peft_config=LoraConfig(...)` to `OPSDTrainer`"
_NO_LABELS = (
    "there are no labels to hold predictions against; an evaluation logs `eval_loss` and `eval_divergence/mean`"
)
_WHOLE = (
    "the loss compares the whole vocabulary; with `top_k_teacher` the teacher's likeliest, and all others as one"
)
_WEIGHT_1 = "the divergence has the weight 1, and rewards `reward_weight` beside it"
_IMPORTANCE = "it is called `vllm_importance_sampling_clip_max`, with `divergence='sampled_reverse_kl'`"
_TEMPERATURES = "`temperature` applies to both models, `teacher_temperature` and `student_temperature` to one"
_TEACHER_SERVER = "it is called `teacher_server_url`, the address of a pooling server; see docs/teachers.md"
_REPROMPTED = (
    "SDPO's prompts from successful completions and feedback are not here; `teacher_prompt_fn`, an argument of "
    "`OPSDTrainer`, takes a row and the text of its completion and returns what the teacher reads"
)
_LEARNED_ONCE = "a completion is used for one optimizer step; `num_generations` is the completions of a prompt"
_NO_RATIO = "a completion is learned once, by the student that wrote it, so there is no ratio of policies to bound"
_GLOBAL_BATCH = "it is `per_device_train_batch_size` x processes x `gradient_accumulation_steps`, in completions"
_NO_ENTROPY = "the loss has no term for entropy; `divergence='forward_kl'` keeps the student's entropy up"
_AHEAD = "`overlap='ahead'` writes the rows of the next step meanwhile, one step old; see docs/overlap.md"
_DEADLINE = "a request to a server has nine tenths of `ddp_timeout`, see docs/rollouts.md"
_CONTINUOUS = "rows leave the batch as they end; `use_vllm=True` hands them to vLLM, which batches continuously"
_OF_VLLM = "give it to `vllm serve`, with `vllm_mode='server'`"
_LIMITED = "`max_completion_length` limits completions; prompts are never cut, see `overlong_prompts`"
_OF_THE_TOKENIZER = "set it in the tokenizer that you pass as `processing_class`"
_ENDS = "`generation_kwargs={'eos_token_id': ...}` says which tokens end a completion"
_LOADING = "it says how to load a model: put it into `model_init_kwargs` or `teacher_model_init_kwargs`"
_QUANTIZED = "pass `quantization_config` to `OPSDTrainer`, or put one into `teacher_model_init_kwargs`"
_OF_THE_LAUNCH = "the launch decides: `accelerate launch`, see docs/sharding.md"
_DECAY = "with `teacher_model_kind='ema'`, `teacher_update_rate` is 1 - decay"
_RATE = "it is called `teacher_update_rate`, with `teacher_model_kind='ema'`"


def _each(advice: Mapping[str, str]) -> dict[str, str]:
    """The same by single names."""
    return {name: said for names, said in advice.items() for name in names.split()}


OPTIONS = _each(
    {
        # distillation
        "generate_from_teacher": "it is called `seq_kd`, with `lmbda` below 1",
        "max_new_tokens": _OF_GKD,
        "distillation_alpha": _OF_SELF,
        "use_uld_loss": _OF_GOLD,
        "teacher_tokenizer_name_or_path use_extended_uld": _ONE_TOKENIZER,
        "distillation_objective": f"it is called `divergence`; {_NO_IW_OPD}",
        "loss_type": f"`divergence` says what is compared; {_AS_DAPO}",
        "kl_type f_divergence_type kl_loss_type kl_estimator loss_mode": "it is called `divergence`",
        "jsd_beta kl_beta gkd_beta": "it is called `beta`",
        "jsd_token_clip token_clip loss_clip loss_max_clamp": "it is called `kl_clip`",
        "skew_alpha skl_alpha": "it is called `skew`",
        "f_alpha_divergence_coef": "it is called `alpha`, with `divergence='alpha_divergence'`",
        "distillation_mode distillation_topk distillation_add_tail loss_top_k loss_add_tail add_tail_bucket": _WHOLE,
        "teacher_top_k reverse_kl_top_1_mode gkd_logits_topk topk": _WHOLE,
        "distillation_weight kd_alpha kd_coef kl_coef init_kl_coef kl_loss_coef use_kl_loss kl_penalty": _WEIGHT_1,
        "router_aux_loss_coef label_smoothing": _WEIGHT_1,
        "distillation_is_clip vllm_importance_sampling_cap": _IMPORTANCE,
        "kd_temperature distill_temperature distillation_temperature": _TEMPERATURES,
        "sft_alpha sft_coef ce_weight nll_weight rpo_alpha": "it is called `sft_weight`, with `lmbda` below 1",
        "top_entropy_quantile": "set `token_selection='student_entropy'` and `token_fraction`",
        "num_loss_tokens_to_skip mask_truncated_completions": "override `weigh`, see docs/extending.md",
        "overlong_filter loss_agg_mode loss_scale": "override `weigh`, see docs/extending.md",
        # the teacher
        "teacher_model": "pass it to `OPSDTrainer`, or set `teacher_model_name_or_path`",
        "teacher_models": "pass a dict to `OPSDTrainer` as `teacher_model`, and a column 'teacher'",
        "teacher_model_server teacher_model_server_url teacher_server_urls use_teacher_server": _TEACHER_SERVER,
        "offload_teacher_model teacher_deepspeed": "`teacher_offload` says where its weights are kept",
        "ema_decay teacher_ema teacher_ema_decay": _DECAY,
        "ref_model_mixup_alpha ema_rate ema_alpha tau": _RATE,
        "ref_model_sync_steps": "it is called `teacher_sync_steps`, with `teacher_model_kind='ema'`",
        "sync_ref_model self_distillation": "`teacher_model_kind='ema'` is a teacher that follows the student",
        "privileged_context prompt_column teacher_key": "it is a column of the dataset, see docs/teachers.md",
        "reprompt_template solution_template feedback_template success_reward_threshold": _REPROMPTED,
        "use_successful_as_teacher dont_reprompt_on_self_success include_environment_feedback": _REPROMPTED,
        "environment_feedback_only_without_solution remove_thinking_from_demonstration": _REPROMPTED,
        # reinforcement learning
        "num_iterations steps_per_generation ppo_epochs": _LEARNED_ONCE,
        "epsilon epsilon_high delta cliprange clip_ratio importance_sampling_level": _NO_RATIO,
        "off_policy_mask_threshold": _NO_RATIO,
        "n_samples_per_prompt rollout_n num_return_sequences": "it is called `num_generations`",
        "train_batch_size generation_batch_size rollout_batch_size global_batch_size": _GLOBAL_BATCH,
        "use_task_rewards custom_reward_function reward_model_path": _REWARDS,
        "reward_coef": "it is called `reward_weight`",
        "normalize_advantages whiten_rewards norm_adv_by_std_in_grpo": "it is called `scale_rewards`",
        "missing_eos_penalty": "subtract it in a function of `reward_funcs`, which sees `completion_ids`",
        "use_bias_correction_kl": "the divergence is computed over the whole vocabulary, and needs no correction",
        "entropy_coef entropy_target use_adaptive_entropy": _NO_ENTROPY,
        "max_staleness max_inflight_tasks queue_maxsize async_generate": _AHEAD,
        "diagnostics_warning_interval diagnostics_flat_tolerance": "`collapse_guard` watches a run",
        "vllm_sync_frequency weight_sync_steps": "weights are sent to vLLM whenever they have changed",
        "request_timeout weight_sync_timeout heartbeat_stale_after_s": _DEADLINE,
        "use_transformers_paged use_transformers_continuous_batching": _CONTINUOUS,
        "vllm_data_parallel_size vllm_pipeline_parallel_size vllm_max_num_seqs vllm_enforce_eager": _OF_VLLM,
        "vllm_enable_prefix_caching vllm_engine_kwargs vllm_quantization engine_kwargs": _OF_VLLM,
        "vllm_server_group_port": "it is called `vllm_group_port`",
        # rows, prompts and tokens
        "max_prompt_length max_reprompt_len truncation_mode truncation_strategy cutoff_len": _NEVER_CUT,
        "max_length max_seq_length": _LIMITED,
        "max_tokens max_response_length": "it is called `max_completion_length`",
        "packing packing_strategy eval_packing": "`padding_free=True` reads the rows of a micro-batch as one",
        "token_budget use_dynamic_bsz": "it is called `max_tokens_per_microbatch`",
        "completion_only_loss assistant_only_loss": "the loss is on the tokens of completions, and on no others",
        "dataset_text_field": "the column is called 'prompt'",
        "dataset_num_proc": "datasets are read in one process",
        "eos_token pad_token pad_token_id chat_template_path": _OF_THE_TOKENIZER,
        "eos_token_id stop stop_strings stop_token_ids": _ENDS,
        "do_sample num_beams": "put it into `generation_kwargs`",
        "enable_thinking": "put it into `chat_template_kwargs`, or `teacher_chat_template_kwargs`",
        # loading
        "dtype torch_dtype attn_implementation device_map revision model_revision subfolder cache_dir": _LOADING,
        "load_in_4bit load_in_8bit": _QUANTIZED,
        "student_model_name_or_path model_name_or_path model_path base_model": "pass it to `OPSDTrainer` as `model`",
        "use_peft use_dora use_rslora target_modules": _PEFT,
        # the training loop, and earlier versions of transformers
        "evaluation_strategy": "it is called `eval_strategy`",
        "no_cuda": "it is called `use_cpu`",
        "warmup_ratio": "it is called `warmup_steps`, where a value below 1 is a share of all steps",
        "lr": "it is called `learning_rate`",
        "epochs num_epochs max_epochs": "it is called `num_train_epochs`",
        "num_steps num_training_steps train_iters": "it is called `max_steps`",
        "batch_size micro_batch_size per_gpu_train_batch_size": "it is called `per_device_train_batch_size`",
        "per_gpu_eval_batch_size val_batch_size": "it is called `per_device_eval_batch_size`",
        "grad_clip clip_grad": "it is called `max_grad_norm`",
        "logger use_wandb": "it is called `report_to`",
        "wandb_project": "it is called `project`",
        "wandb_log_unique_prompts": "it is called `log_unique_prompts`",
        "push_to_hub_token": "it is called `hub_token`",
        "log_completions_steps": "`log_completions=True` logs every `logging_steps`",
        "group_by_length": "the length of a completion is not known before it is generated",
        "overwrite_output_dir": "a run writes into its folder; `resume_from_checkpoint` continues the one in it",
        "logging_dir": "set the environment variable `TENSORBOARD_LOGGING_DIR`",
        "save_safetensors": "weights are always saved as safetensors",
        "activation_offloading": f"`{CHECKPOINTING}`, which is on by default, saves that memory",
        "fp16_backend half_precision_backend mixed_precision precision": "set `bf16` or `fp16`",
        "dispatch_batches split_batches even_batches": "put it into `accelerator_config`",
        "device n_gpu num_processes world_size zero_stage": _OF_THE_LAUNCH,
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
        "optimizer_cls_and_kwargs": "set `optim` in `OPSDConfig`, or pass `optimizers=(optimizer, None)`",
        "lora_config": "it is called `peft_config`",
        "reward_func reward_functions reward_model": "it is called `reward_funcs`",
        "reward_tokenizers": "it is called `reward_processing_classes`",
        "rollout_func": "it is called `rollout`, a `trl_opsd.RolloutBackend`",
        "environment_factory": "pass functions as `tools`, or a `rollout` of your own",
        "data_collator": "rows reach the trainer as they are, and the rollout pads them: remove it",
        "formatting_func": "make a column 'prompt' with `dataset.map`",
        "compute_metrics preprocess_logits_for_metrics": _NO_LABELS,
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


def distinct_elsewhere(name: str) -> str:
    """The same for an attribute: of names of one word, which may be the user's own, nothing is known."""
    return (OPTIONS.get(name) or ARGUMENTS.get(name, "")) if "_" in name else ""


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
