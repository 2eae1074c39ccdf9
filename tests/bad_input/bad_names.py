"""Options and arguments that do not exist: those of other trainers, and misspelt ones."""

from __future__ import annotations

import re
from typing import Any

from cases import Case

from trl_opsd import OPSDConfig, OPSDTrainer


def unknown(message: str, **options: Any) -> Case:
    """Options that do not exist."""
    name = ", ".join(options)
    return Case("unknown option", name, message, lambda lab: OPSDConfig("out", **options), TypeError, True)


def unknown_argument(message: str, name: str) -> Case:
    """An argument of the trainer that does not exist."""

    def provoke(lab: Any) -> None:
        OPSDTrainer("student", "teacher", **{name: object()})

    return Case("unknown argument", name, message, provoke, TypeError, True)


ELSEWHERE = {
    # TRL's GKD and GOLD
    "cross_tokenizer='bytes'": "use_uld_loss uld_strategy uld_token_merge_strategy use_extended_uld",
    "`teacher_processing_class`": "teacher_tokenizer_name_or_path",
    "`student_temperature` and `teacher_temperature`": "uld_student_temperature kd_temperature",
    "weights are synced whenever they have changed": "vllm_sync_frequency weight_sync_steps",
    "`log_completions` saves to `output_dir`": "log_completions_steps",
    # TRL's GRPO and RLOO
    "no counterpart: completions are trained on once": "epsilon epsilon_high delta vespo_k_pos",
    "no counterpart: the loss has no entropy term": "entropy_coef use_adaptive_entropy entropy_target",
    "bounded by `vllm_importance_sampling_clip_max`": "vllm_importance_sampling_mode vllm_importance_sampling_cap",
    "set `teacher_model_kind='ema'`": "sync_ref_model use_ema_teacher",
    "without an estimator": "use_bias_correction_kl",
    "set `scale_rewards='batch'`": "normalize_advantages",
    "apply it in a reward function": "reward_clip_range missing_eos_penalty",
    "no counterpart: remove it": "router_aux_loss_coef cast_lm_head_to_fp32 log_multimodal",
    # TRL's SDPO and SDFT
    "`teacher_context='group_success'`": "use_successful_as_teacher",
    "it is always so": "dont_reprompt_on_self_success remove_thinking_from_demonstration",
    "prompts are never cut": "max_reprompt_len max_len truncation_strategy filter_overlong_prompts",
    "it is called `teacher_prompt_template`": "reprompt_template solution_template",
    "feedback is the column 'privileged_context'": "include_environment_feedback",
    "the divergence has the weight 1": "distillation_weight teacher_kl_coef kd_ratio distillation_loss_coef",
    "the loss uses the full vocabulary": "distillation_add_tail loss_add_tail reverse_kl_top_1_mode",
    "override `weigh`": "num_loss_tokens_to_skip",
    "`overlap='ahead'` generates one step ahead": "max_staleness queue_maxsize",
    # ms-swift, verl and KDFlow
    "`quantization_config=BitsAndBytesConfig": "load_in_4bit load_in_8bit bnb_4bit_quant_type",
    "`peft_config=LoraConfig": "tuner_type target_modules",
    "the column 'teacher' names": "teacher_tag_key teacher_key",
    "it is called `teacher_server_url`": "teacher_server_urls use_teacher_server",
    "set `teacher_offload='cpu'`": "offload_teacher_model teacher_enable_sleep",
    "it is called `top_k_teacher`": "gkd_logits_topk",
    "it is called `vllm_enable_sleep_mode`": "sleep_level free_cache_engine",
    "it is called `divergence`": "loss_mode kd_loss_fn",
    "set `divergence='sampled_reverse_kl'`": "use_policy_gradient",
    "`kl_clip` bounds": "loss_max_clamp",
    "it is called `num_generations`": "n n_samples_per_prompt",
    "it is called `max_completion_length`": "generate_max_len max_response_length",
    "`per_device_train_batch_size` x processes x": "train_batch_size ppo_mini_batch_size",
    "set `max_tokens_per_microbatch`": "use_dynamic_bsz",
    "it is called `padding_free`": "use_remove_padding",
    "it is 1 - `teacher_update_rate`": "teacher_ema_decay",
    "it is the argument `model`": "student_name_or_path",
    "it is called `teacher_model_name_or_path`": "teacher_name_or_path",
    "put it into `chat_template_kwargs`": "enable_thinking",
    "it is called `num_train_epochs`": "total_epochs",
}
"""Names of other trainers by what is said of each."""

CASES: list[Case] = [
    *(
        unknown(f"has no option '{name}': .*{re.escape(message)}", **{name: 1})
        for message, names in ELSEWHERE.items()
        for name in names.split()
    ),
    unknown("has no option 'generate_from_teacher': it is called `seq_kd`", generate_from_teacher=True),
    unknown("it is called `num_generations`", rollout_n=8),
    unknown("is used for one optimizer step; `num_generations` sets the completions", num_iterations=2),
    unknown("it is called `max_completion_length`; docs/migration.md", max_new_tokens=128),
    unknown("`loss_aggregation` whether tokens or rows count alike", loss_type="grpo"),
    unknown("'precompute_ref_log_probs': see docs/reference.md for all, docs/migration.md", precompute_ref_log_probs=1),
    unknown("`overlong_prompts='drop'` drops", max_prompt_length=512),
    unknown("prompts are never cut", max_length=512),
    unknown("`per_device_train_batch_size` x processes x", generation_batch_size=8),
    unknown("it is called `beta`: 0 forward KL", distillation_alpha=0.5),
    unknown("it is called `kl_clip`", jsd_token_clip=0.05),
    unknown("set `token_selection='student_entropy'` and `token_fraction`", top_entropy_quantile=0.2),
    unknown("pass it to `OPSDTrainer`, or set `teacher_model_name_or_path`", teacher_model="teacher"),
    unknown("it is called `eval_strategy`", evaluation_strategy="steps"),
    unknown("it is called `use_cpu`", no_cuda=True),
    unknown("it is called `warmup_steps`", warmup_ratio=0.1),
    unknown("it is an argument of `OPSDTrainer`", processing_class=None),
    unknown("it is the argument `processing_class` of `OPSDTrainer`", tokenizer=None),
    unknown("it is an argument of `OPSDTrainer`", reward_funcs=[]),
    unknown("passed to `OPSDTrainer`, as `reward_funcs`", reward_model_path="m"),
    unknown("it is called `sft_weight`", sft_alpha=0.5),
    unknown("put it into `model_init_kwargs`", torch_dtype="bfloat16"),
    unknown("the teacher: put it, without 'teacher_', into `teacher_model_init_kwargs`", teacher_dtype="bfloat16"),
    unknown("put it, without 'teacher_', into `teacher_model_init", teacher_attn_implementation="eager"),
    unknown("set it in the tokenizer that you pass as `processing_class`", eos_token="</s>"),
    unknown("'lora_rank': pass `peft_config=LoraConfig", lora_rank=8),
    unknown("'student_model_name_or_path': it is the argument `model`", student_model_name_or_path="m"),
    unknown("'dataset_name': pass the dataset itself", dataset_name="d"),
    unknown("did you mean 'vllm_server_host'", vllm_host="::1"),
    unknown("did you mean 'teacher_model_revision'", teacher_revision="main"),
    unknown("did you mean 'teacher_sync_steps'", teacher_sync_step=2),
    unknown("has no option 'learing_rate': did you mean 'learning_rate'", learing_rate=1e-5),
    unknown("has no option 'zzz': see docs/reference.md for all", zzz=1),
    unknown("'max_tokens': .*\n`OPSDConfig` has no option 'lr': it is called", max_tokens=1, lr=1),
    unknown_argument("has no argument 'tokenizer': it is the argument `processing_class`", "tokenizer"),
    unknown_argument("'reward_model': it is the argument `reward_funcs`", "reward_model"),
    unknown_argument("'data_collator': rows reach the trainer as they are", "data_collator"),
    unknown_argument("'compute_metrics': pass `reward_funcs`, and an `eval_dataset`", "compute_metrics"),
    unknown_argument("'preprocess_logits_for_metrics': pass `reward_funcs`", "preprocess_logits_for_metrics"),
    unknown_argument("'teacher': it is the argument `teacher_model`", "teacher"),
    unknown_argument(r"it is an option, `args=OPSDConfig\(max_steps=...\)`", "max_steps"),
    unknown_argument("it is called `max_completion_length`", "max_new_tokens"),
    unknown_argument("did you mean 'peft_config'", "peft_cfg"),
]
