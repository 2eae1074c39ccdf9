"""Options and arguments of other trainers: what they are called here, or why there is nothing like them."""

from __future__ import annotations

from types import MappingProxyType

from trl_opsd._compat.transformers import CHECKPOINTING

_LEARNED_ONCE = "a completion is used for one optimizer step; `num_generations` is the completions of a prompt"
_GENERATIONS = "it is called `num_generations`"
_REWARDS = "rewards are passed to `OPSDTrainer`, as `reward_funcs`; `reward_weight` says what they count in training"
_GIVEN = "it is called `sft_weight`, with `lmbda` below 1"
_NO_RATIO = "a completion is learned once, by the student that wrote it, so there is no ratio of policies to bound"
_AS_GRPO = "`loss_type` of TRL's GRPO is not chosen here: each token of a completion counts alike, as in its 'dapo'"
_LOSS_TYPE = f"`divergence` says what is compared; {_AS_GRPO}"
_NO_ENTROPY = "the loss has no term for entropy; `divergence='forward_kl'` keeps the student's entropy up"
_FULL_VOCABULARY = (
    "the loss compares the whole vocabulary; with `top_k_teacher` the teacher's likeliest tokens, and all others as one"
)
_SERVER = "it is called `teacher_server_url`, the address of a pooling server; see docs/teachers.md"
_ONE_TOKENIZER = "teacher and student share one tokenizer; `trl.experimental.gold` compares two"
_COMPLETION_ONLY = "the loss is on the tokens of completions, and on no others"
_NO_LABELS = (
    "there are no labels to hold predictions against; an evaluation logs `eval_loss` and `eval_divergence/mean`"
)
_OWN_WEIGHTS = "override `weigh`, see docs/extending.md"
_WHOLE_LOSS = "the divergence has the weight 1; `divergence` and `beta` say which it is"
_OF_THE_TOKENIZER = "set it in the tokenizer that you pass as `processing_class`"
_END_TOKENS = "`generation_kwargs={'eos_token_id': ...}` says which tokens end a completion"
_BOTH_MODELS = "`temperature` applies to both models, `teacher_temperature` and `student_temperature` to one"
_OF_THE_LAUNCH = "the launch decides: `accelerate launch`, see docs/sharding.md"
_OF_THE_FILE = "it belongs into the file of `accelerate launch`, see docs/sharding.md"
_OF_THE_LOADER = "put it into `accelerator_config`"
_GLOBAL_BATCH = "it is `per_device_train_batch_size` x processes x `gradient_accumulation_steps`, in completions"
_OF_THE_ENGINE = "give it to `vllm serve`, with `vllm_mode='server'`"
_WEIGHT_1 = "the divergence has the weight 1, and rewards `reward_weight` beside it"
_IMPORTANCE = "it is called `vllm_importance_sampling_clip_max`, with `divergence='sampled_reverse_kl'`"
_IMPORTANCE_MODE = "weights of single tokens are bounded by `vllm_importance_sampling_clip_max`"
_AHEAD = "`overlap='ahead'` writes the rows of the next step meanwhile, one step old; see docs/overlap.md"
_SYNCED = "weights are sent to vLLM whenever they have changed"
_REPROMPTED = (
    "SDPO's prompts from successful completions and feedback are not here; `teacher_prompt_fn`, an argument of "
    "`OPSDTrainer`, takes a row and the text of its completion and returns what the teacher reads"
)
_DEADLINE = "a request to a server has nine tenths of `ddp_timeout`, see docs/rollouts.md"
_IW_OPD = (
    "the objective of TRL's `iw_opd` is not here; 'sampled_reverse_kl' compares sampled tokens, without its weights"
)
_SLEEP = "it is called `vllm_enable_sleep_mode`"
_TOOLS = "pass `tools` to `OPSDTrainer`, or a `rollout` of your own; `max_tool_calling_iterations` limits their calls"
_RESUME = "pass it to `train`, `trainer.train(resume_from_checkpoint=...)`"
_NEVER_CUT = "prompts are never cut; see `overlong_prompts`"
_TEACHER_COLUMN = "the column is called 'teacher', see docs/teachers.md"
_TILES = "logits are never whole; `loss_chunk_tokens` says how many tokens have theirs at once"
_CONTINUOUS = "rows leave the batch as they end; `use_vllm=True` hands them to vLLM, which batches continuously"
_DECAY = "with `teacher_model_kind='ema'`, `teacher_update_rate` is 1 - decay"
_PRECISION = "set `bf16` or `fp16`"
_COLUMN = "it is a column of the dataset, see docs/teachers.md"
_LOADING = "it says how to load a model: put it into `model_init_kwargs` or `teacher_model_init_kwargs`"
_LOADING_STUDENT = "it says how to load the student: put it, without 'student_', into `model_init_kwargs`"
_LOADING_TEACHER = "it says how to load the teacher: put it, without 'teacher_', into `teacher_model_init_kwargs`"
_QUANTIZED = "pass `quantization_config` to `OPSDTrainer`, or put one into `teacher_model_init_kwargs`"
_PEFT = "pass `peft_config=LoraConfig(...)` to `OPSDTrainer`"

DEFAULTS: MappingProxyType[str, str] = MappingProxyType(
    {
        "gkd": "learning_rate=2e-05, temperature=0.9, lmbda=0.5, beta=0.5, disable_dropout=True, "
        "max_completion_length=128, student_temperature=1.0, teacher_temperature=1.0",
        "gold": "learning_rate=1e-07, temperature=0.9, top_p=0.95, lmbda=0.5, beta=0.5, max_completion_length=128, "
        "disable_dropout=True, vllm_gpu_memory_utilization=0.9",
        "sdft": "learning_rate=5e-05, disable_dropout=True, num_generations=8, max_completion_length=256, "
        r"teacher_model_kind='base', beta=0.5, teacher_prompt_template='{prompt}\n\n{privileged_context}'",
        "sdpo": "learning_rate=5e-05, disable_dropout=True, num_generations=8, max_completion_length=256, "
        "teacher_model_kind='ema'",
    }
)
"""What a config of `trl.experimental` has by default, where that is another value here, in the names of here."""
_AS_THERE = "other defaults there, to be set for the same training:"

OPTIONS: MappingProxyType[str, str] = MappingProxyType(
    {
        # other ways to distil
        "generate_from_teacher": "it is called `seq_kd`, with `lmbda` below 1",
        "max_new_tokens": "it is called `max_completion_length`. If this was a `GKDConfig`, "
        f"{_AS_THERE} {DEFAULTS['gkd']}",
        "max_tokens": "it is called `max_completion_length`",
        "max_length": "`max_completion_length` limits completions; prompts are never cut, see `overlong_prompts`",
        "max_seq_length": "`max_completion_length` limits completions; prompts are never cut, see `overlong_prompts`",
        **dict.fromkeys(
            ("max_prompt_length", "max_reprompt_len"),
            "prompts are never cut; `overlong_prompts='drop'` drops those that are too long",
        ),
        **dict.fromkeys(("jsd_token_clip", "token_clip", "loss_clip"), "it is called `kl_clip`"),
        **dict.fromkeys(("skew_alpha", "skl_alpha"), "it is called `skew`"),
        "f_alpha_divergence_coef": "it is called `alpha`, with `divergence='alpha_divergence'`",
        "distillation_alpha": "it is called `beta`: 0 forward KL, 1 reverse KL; or set `divergence`. If this was an "
        f"`SDFTConfig`, {_AS_THERE} {DEFAULTS['sdft']}; an `SDPOConfig`, whose `beta` weighs a reference: "
        f"{DEFAULTS['sdpo']}",
        "distillation_mode": _FULL_VOCABULARY,
        "distillation_topk": _FULL_VOCABULARY,
        "distillation_add_tail": _FULL_VOCABULARY,
        **dict.fromkeys(("distillation_is_clip", "vllm_importance_sampling_cap"), _IMPORTANCE),
        **dict.fromkeys(("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min"), _IMPORTANCE_MODE),
        "distillation_weight": _WEIGHT_1,
        "distillation_objective": f"it is called `divergence`; {_IW_OPD}",
        "loss_top_k": _FULL_VOCABULARY,
        **dict.fromkeys(("loss_add_tail", "add_tail_bucket"), _FULL_VOCABULARY),
        "teacher_top_k": _FULL_VOCABULARY,
        "reverse_kl_top_1_mode": _FULL_VOCABULARY,
        **dict.fromkeys(("forward_kl", "reverse_kl", "jsd"), "name it: `divergence='reverse_kl'`"),
        "loss_type": _LOSS_TYPE,
        "kl_type": "it is called `divergence`",
        **dict.fromkeys(("kd_temperature", "distill_temperature", "distillation_temperature"), _BOTH_MODELS),
        **dict.fromkeys(("kd_alpha", "kd_coef"), _WHOLE_LOSS),
        **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_loss_coef", "use_kl_loss", "kl_penalty"), _WHOLE_LOSS),
        **dict.fromkeys(("router_aux_loss_coef", "label_smoothing"), _WHOLE_LOSS),
        **dict.fromkeys(("f_divergence_type", "kl_loss_type", "kl_estimator"), "it is called `divergence`"),
        **dict.fromkeys(("jsd_beta", "kl_beta", "gkd_beta"), "it is called `beta`"),
        **dict.fromkeys(("gkd_logits_topk", "top_logprobs", "kd_top_k"), _FULL_VOCABULARY),
        "loss_mode": "it is called `divergence`: 'sampled_reverse_kl' is the policy gradient of a sampled token",
        "use_policy_gradient": "`divergence='sampled_reverse_kl'` is the policy gradient of a sampled token",
        "topk": _FULL_VOCABULARY,
        **dict.fromkeys(("use_task_rewards", "custom_reward_function", "reward_fn_key"), _REWARDS),
        **dict.fromkeys(("distillation_loss_coef", "teacher_kl_coef"), _WEIGHT_1),
        **dict.fromkeys(("loss_max_clamp", "log_prob_min_clamp"), "`kl_clip` bounds each entry of the vocabulary"),
        **dict.fromkeys(("use_chunked_topk", "chunked_topk_chunk_size", "use_fused_kernels"), _TILES),
        **dict.fromkeys(("teacher_key", "teacher_tag_key"), _TEACHER_COLUMN),
        "teacher_models": "pass a dict to `OPSDTrainer` as `teacher_model`, and a column 'teacher'",
        "teacher_adapters": "pass a `PeftModel` to `OPSDTrainer` as `teacher_model`",
        "teacher_model_type": "it is read from the checkpoint's config: remove it",
        "num_replicas": "list several addresses in `teacher_server_url`",
        **dict.fromkeys(("distillation", "distillation_loss"), "options have no sections here, see docs/migration.md"),
        "offload_teacher_model": "`teacher_offload` says where its weights are kept",
        "teacher_deepspeed": "`teacher_offload='zero3'` splits it over the processes",
        "teacher_model": "pass it to `OPSDTrainer`, or set `teacher_model_name_or_path`",
        "student_model_name_or_path": "pass it to `OPSDTrainer` as `model`",
        **dict.fromkeys(
            ("teacher_model_server", "teacher_model_server_url", "teacher_server_urls", "use_teacher_server"), _SERVER
        ),
        "teacher_tokenizer_name_or_path": _ONE_TOKENIZER,
        "use_uld_loss": f"{_ONE_TOKENIZER}. With one tokenizer, its loss is that of here divided by "
        f"`gradient_accumulation_steps`; {_AS_THERE} {DEFAULTS['gold']}",
        "use_extended_uld": _ONE_TOKENIZER,
        "num_loss_tokens_to_skip": _OWN_WEIGHTS,
        **dict.fromkeys(("mask_truncated_completions", "overlong_filter", "loss_agg_mode", "loss_scale"), _OWN_WEIGHTS),
        **dict.fromkeys(("ema_decay", "teacher_ema", "teacher_ema_decay"), _DECAY),
        **dict.fromkeys(("ema_rate", "ema_alpha", "tau"), "it is called `teacher_update_rate`"),
        "self_distillation": "set `teacher_model_kind`",
        **dict.fromkeys(("privileged_context", "privileged_column", "prompt_column", "hint_column"), _COLUMN),
        "sync_ref_model": "`teacher_model_kind='ema'` is a teacher that follows the student",
        "ref_model_mixup_alpha": "it is called `teacher_update_rate`, with `teacher_model_kind='ema'`",
        "ref_model_sync_steps": "it is called `teacher_sync_steps`, with `teacher_model_kind='ema'`",
        **dict.fromkeys(
            (
                *("reprompt_template", "solution_template", "feedback_template"),
                *("success_reward_threshold", "use_successful_as_teacher", "dont_reprompt_on_self_success"),
                *("include_environment_feedback", "environment_feedback_only_without_solution"),
                "remove_thinking_from_demonstration",
            ),
            _REPROMPTED,
        ),
        # reinforcement learning
        "num_iterations": _LEARNED_ONCE,
        **dict.fromkeys(("steps_per_generation", "ppo_epochs"), _LEARNED_ONCE),
        **dict.fromkeys(("n_samples_per_prompt", "rollout_n", "num_return_sequences"), _GENERATIONS),
        **dict.fromkeys(("generation_batch_size", "rollout_batch_size", "ppo_mini_batch_size"), _GLOBAL_BATCH),
        "global_batch_size": _GLOBAL_BATCH,
        "missing_eos_penalty": "subtract it in a function of `reward_funcs`, which sees `completion_ids`",
        **dict.fromkeys(("normalize_advantages", "whiten_rewards"), "it is called `scale_rewards`"),
        "norm_adv_by_std_in_grpo": "it is called `scale_rewards`",
        **dict.fromkeys(("adv_estimator", "advantage_estimator"), "advantages are those of TRL's GRPO"),
        **dict.fromkeys(("rollout_is", "rollout_is_threshold"), _IMPORTANCE),
        **dict.fromkeys(("rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"), _IMPORTANCE),
        **dict.fromkeys(("trainer_mode", "async_generate", "parameter_sync_step", "max_staleness"), _AHEAD),
        **dict.fromkeys(("max_inflight_tasks", "queue_maxsize"), _AHEAD),
        "max_off_policy_threshold": "it is called `overlap_max_divergence`, with `overlap='ahead'`",
        **dict.fromkeys(("multi_turn", "multi_turn_scheduler", "tool_config_path", "max_assistant_turns"), _TOOLS),
        **dict.fromkeys(("epsilon", "epsilon_high", "delta", "importance_sampling_level"), _NO_RATIO),
        **dict.fromkeys(("cliprange", "clip_ratio", "off_policy_mask_threshold", "policy_loss_mode"), _NO_RATIO),
        "use_bias_correction_kl": "the divergence is computed over the whole vocabulary, and needs no correction",
        **dict.fromkeys(("entropy_coef", "use_adaptive_entropy", "entropy_target"), _NO_ENTROPY),
        **dict.fromkeys(("reward_model_path", "reward_model_name_or_path"), _REWARDS),
        "reward_coef": "it is called `reward_weight`",
        **dict.fromkeys(
            ("diagnostics_warning_interval", "diagnostics_flat_tolerance"), "`collapse_guard` watches a run"
        ),
        **dict.fromkeys(("sft_alpha", "sft_coef", "ce_weight", "nll_weight", "rpo_alpha"), _GIVEN),
        "top_entropy_quantile": "set `token_selection='student_entropy'` and `token_fraction`",
        **dict.fromkeys(("vllm_sync_frequency", "weight_sync_steps"), _SYNCED),
        **dict.fromkeys(("request_timeout", "weight_sync_timeout", "heartbeat_stale_after_s"), _DEADLINE),
        **dict.fromkeys(("use_transformers_paged", "use_transformers_continuous_batching"), _CONTINUOUS),
        **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), _OF_THE_ENGINE),
        **dict.fromkeys(("vllm_data_parallel_size", "vllm_pipeline_parallel_size"), _OF_THE_ENGINE),
        **dict.fromkeys(("vllm_max_num_seqs", "vllm_enforce_eager", "vllm_enable_prefix_caching"), _OF_THE_ENGINE),
        **dict.fromkeys(("vllm_engine_kwargs", "vllm_quantization", "engine_kwargs", "enforce_eager"), _OF_THE_ENGINE),
        **dict.fromkeys(("max_num_seqs", "enable_prefix_caching"), _OF_THE_ENGINE),
        **dict.fromkeys(("free_cache_engine", "sleep_level"), _SLEEP),
        "vllm_server_group_port": "it is called `vllm_group_port`",
        "vllm_enable_lora": "`vllm_weight_sync='adapter'` sends the adapter alone",
        "val_kwargs": "they are called `eval_temperature` and `num_generations_eval`",
        "val_before_train": "it is called `eval_on_start`",
        "val_batch_size": "it is called `per_device_eval_batch_size`",
        "log_val_generations": "it is called `log_completions`",
        "log_completions_steps": "`log_completions=True` logs every `logging_steps`",
        "wandb_log_unique_prompts": "it is called `log_unique_prompts`",
        # supervised fine-tuning
        "dataset_text_field": "the column is called 'prompt'",
        "dataset_num_proc": "datasets are read in one process",
        "chat_template_path": "give it to the tokenizer that you pass as `processing_class`",
        **dict.fromkeys(("eos_token", "pad_token", "pad_token_id"), _OF_THE_TOKENIZER),
        **dict.fromkeys(("eos_token_id", "stop", "stop_strings", "stop_token_ids", "stop_words"), _END_TOKENS),
        **dict.fromkeys(("do_sample", "num_beams"), "put it into `generation_kwargs`"),
        **dict.fromkeys(
            ("truncation_mode", "truncation_strategy", "cutoff_len"), "prompts are never cut; see `overlong_prompts`"
        ),
        "activation_offloading": f"`{CHECKPOINTING}`, which is on by default, saves that memory",
        "use_remove_padding": "it is called `padding_free`",
        **dict.fromkeys(
            ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "token_budget"), "it is called `max_tokens_per_microbatch`"
        ),
        "ppo_micro_batch_size_per_gpu": "it is called `per_device_train_batch_size`",
        "enable_thinking": "put it into `chat_template_kwargs`, or `teacher_chat_template_kwargs`",
        "packing_strategy": "`padding_free=True` reads the rows of a micro-batch as one",
        "packing": "`padding_free=True` reads the rows of a micro-batch as one",
        "eval_packing": "`padding_free=True` reads the rows of a micro-batch as one",
        "completion_only_loss": _COMPLETION_ONLY,
        "assistant_only_loss": _COMPLETION_ONLY,
        # loading
        **dict.fromkeys(("dtype", "torch_dtype", "attn_implementation", "flash_attn", "device_map"), _LOADING),
        **dict.fromkeys(("revision", "subfolder", "cache_dir", "max_memory"), _LOADING),
        **dict.fromkeys(("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant", "quantization_bit"), _QUANTIZED),
        "model_revision": "put `revision` into `model_init_kwargs`",
        **dict.fromkeys(("model_name_or_path", "model_path", "base_model"), "pass it to `OPSDTrainer` as `model`"),
        **dict.fromkeys(("use_peft", "use_dora", "use_rslora", "target_modules"), _PEFT),
        **dict.fromkeys(("train_type", "tuner_type", "finetuning_type"), _PEFT),
        # earlier versions of transformers, and short names
        "evaluation_strategy": "it is called `eval_strategy`",
        "no_cuda": "it is called `use_cpu`",
        "warmup_ratio": "it is called `warmup_steps`, where a value below 1 is a share of all steps",
        "group_by_length": "the length of a completion is not known before it is generated",
        "overwrite_output_dir": "a run writes into its folder; `resume_from_checkpoint` continues the one in it",
        "per_gpu_train_batch_size": "it is called `per_device_train_batch_size`",
        "per_gpu_eval_batch_size": "it is called `per_device_eval_batch_size`",
        "logging_dir": "set the environment variable `TENSORBOARD_LOGGING_DIR`",
        "save_safetensors": "weights are always saved as safetensors",
        "lr": "it is called `learning_rate`",
        **dict.fromkeys(("grad_clip", "clip_grad"), "it is called `max_grad_norm`"),
        "min_lr_ratio": "put `min_lr_rate` into `lr_scheduler_kwargs`, with `lr_scheduler_type='cosine_with_min_lr'`",
        "warmup_style": "it is called `lr_scheduler_type`",
        "lr_warmup_steps_ratio": "it is called `warmup_steps`, where a value below 1 is a share of all steps",
        "train_iters": "it is called `max_steps`",
        "logger": "it is called `report_to`",
        "default_local_dir": "it is called `output_dir`",
        "max_actor_ckpt_to_keep": "it is called `save_total_limit`",
        **dict.fromkeys(("resume_mode", "resume_from_path"), _RESUME),
        "epochs": "it is called `num_train_epochs`",
        "num_epochs": "it is called `num_train_epochs`",
        "batch_size": "it is called `per_device_train_batch_size`",
        **dict.fromkeys(("micro_batch_size", "micro_train_batch_size"), "it is called `per_device_train_batch_size`"),
        "train_batch_size": _GLOBAL_BATCH,
        "sampling_temperature": "it is called `temperature`",
        "total_epochs": "it is called `num_train_epochs`",
        "max_epochs": "it is called `num_train_epochs`",
        **dict.fromkeys(("num_steps", "total_training_steps", "num_training_steps"), "it is called `max_steps`"),
        **dict.fromkeys(("max_response_length", "generate_max_len"), "it is called `max_completion_length`"),
        "actor_lr": "it is called `learning_rate`",
        "save_freq": "it is called `save_steps`",
        "test_freq": "it is called `eval_steps`",
        "wandb_project": "it is called `project`",
        "use_wandb": "set `report_to='wandb'`",
        **dict.fromkeys(("fp16_backend", "half_precision_backend", "mixed_precision", "precision"), _PRECISION),
        **dict.fromkeys(("push_to_hub_model_id", "push_to_hub_organization"), "it is a part of `hub_model_id`"),
        "push_to_hub_token": "it is called `hub_token`",
        "adafactor": "set `optim='adafactor'`",
        **dict.fromkeys(("dispatch_batches", "split_batches", "even_batches"), _OF_THE_LOADER),
        **dict.fromkeys(("device", "n_gpu", "num_processes", "world_size"), _OF_THE_LAUNCH),
        **dict.fromkeys(("n_gpus_per_node", "nnodes", "strategy"), _OF_THE_LAUNCH),
        **dict.fromkeys(("zero_stage", "sharded_ddp", "fsdp_transformer_layer_cls_to_wrap"), _OF_THE_FILE),
        **dict.fromkeys(("param_offload", "optimizer_offload", "offload_model", "fsdp_size"), _OF_THE_FILE),
        **dict.fromkeys(("ulysses_sequence_parallel_size", "sequence_parallel_size"), _OF_THE_FILE),
    }
)
"""Options that configs of other trainers have, and what to do here."""

FAMILIES: MappingProxyType[str, str] = MappingProxyType(
    {
        "student_": _LOADING_STUDENT,
        "teacher_": _LOADING_TEACHER,
        "lora_": _PEFT,
        "bnb_4bit_": _QUANTIZED,
        "dataset_": "pass the dataset itself to `OPSDTrainer`, as `train_dataset` or `eval_dataset`",
        "reward_": _REWARDS,
        "sapo_": _AS_GRPO,
        "vespo_": _AS_GRPO,
        "uld_": _ONE_TOKENIZER,
        "vllm_importance_sampling_": _IMPORTANCE_MODE,
        "iw_opd_": _IW_OPD,
        "precompute_ref_": "completions are new in each step, so the teacher cannot read them before",
    }
)
"""What to do instead of options that begin so."""

ARGUMENTS: MappingProxyType[str, str] = MappingProxyType(
    {
        "tokenizer": "it is called `processing_class`",
        "teacher_tokenizer": "it is called `teacher_processing_class`",
        "student": "it is called `model`",
        "student_model": "it is called `model`",
        "teacher": "it is called `teacher_model`",
        "ref_model": "it is called `teacher_model`; `teacher_model_kind` makes the student its own teacher",
        "config": "it is called `args`",
        "training_args": "it is called `args`",
        "dataset": "it is called `train_dataset`",
        "optimizer": "pass `optimizers=(optimizer, None)`",
        "lr_scheduler": "pass `optimizers=(optimizer, lr_scheduler)`",
        "optimizer_cls_and_kwargs": "set `optim` in `OPSDConfig`, or pass `optimizers=(optimizer, None)`",
        "lora_config": "it is called `peft_config`",
        "reward_func": "it is called `reward_funcs`",
        "reward_functions": "it is called `reward_funcs`",
        "reward_model": "it is called `reward_funcs`",
        "reward_tokenizers": "it is called `reward_processing_classes`",
        "rollout_func": "it is called `rollout`, a `trl_opsd.RolloutBackend`",
        "environment_factory": "pass functions as `tools`, or a `rollout` of your own",
        "data_collator": "rows reach the trainer as they are, and the rollout pads them: remove it",
        "formatting_func": "make a column 'prompt' with `dataset.map`",
        "compute_metrics": _NO_LABELS,
        "preprocess_logits_for_metrics": _NO_LABELS,
        "compute_loss_func": "pass a `divergence`, see docs/extending.md",
        "loss": "it is called `divergence`",
        "model_init": "pass the model itself",
    }
)
"""Arguments that other trainers have, and what to do here."""

TRAINER_ARGUMENTS = (
    "model",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "callbacks",
    "optimizers",
    "quantization_config",
    "peft_config",
    "tools",
    "rollout",
    "reward_funcs",
    "reward_processing_classes",
    "teacher_processing_class",
    "teacher_prompt_fn",
)
"""Arguments of `OPSDTrainer` that are no options as well."""
