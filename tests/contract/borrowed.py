"""Names outside the public API of TRL and its neighbours that this package reads, writes or overrides.

Read this first when moving to another version of TRL. `test_borrowed.py` looks for each in the file of its library, and
for private names in our source that are missing here.
"""

from __future__ import annotations

OVERRIDDEN = {
    "_get_dataloader", "_get_grad_norm", "_get_output_dir", "_init_training_state", "_load_best_model",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_maybe_log_save_evaluate", "_name", "_paper",
    "_prepare_inputs", "_push_from_checkpoint", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler",
    "_set_signature_columns_if_needed", "_tag_names", "compute_loss", "create_accelerator_and_postprocess",
    "create_model_card", "create_scheduler", "evaluate", "evaluation_loop", "get_batch_samples",
    "get_eval_dataloader", "get_test_dataloader", "get_train_dataloader", "log", "predict", "prediction_step",
    "save_model", "train", "training_step",
}  # fmt: skip
"""Of the trainer: TRL's own, and transformers' that it inherits. One that is renamed would leave ours uncalled."""

ENTRIES = {"create_model_card", "evaluate", "get_test_dataloader", "predict", "save_model", "train"}
"""Of these, what users call and a library need not."""

_FSDP = "torch/distributed/fsdp/_fully_shard"

BORROWED = {
    # what we set or write to, and what is read of ours
    "trl/trainer/distillation_trainer.py": """
        _dist _forward_redirection _get_tool_suffix_ids _logs _metrics _tokenize_prompts beta chat_template
        chat_template_kwargs eos_token_ids generation_config generation_kwargs get_peft_model image images
        log_completions max_tool_calling_iterations pad_to_multiple_of prompt shuffle_dataset teacher_model temperature
        tools use_vllm
    """,
    "trl/distributed.py": "fsdp_version gather_params is_fsdp summon_full_params zero_stage",
    "trl/trainer/distillation_config.py": "_VALID_DICT_FIELDS generation_kwargs use_vllm vllm_server_host",
    "trl/generation/vllm_client.py": """
        _post _updating_weights base_url close_communicator communicator get_server_info get_world_size group_port
        init_communicator update_named_params
    """,
    "transformers/trainer.py": """
        _get_collator_with_removed_columns _move_model_to_device _remove_unused_columns _signature_columns
        callback_handler compute_loss_context_manager control data_collator deepspeed grad_norm is_deepspeed_enabled
        is_in_train model_wrapped neftune_hook_handle should_log
    """,
    "transformers/training_args.py": "_VALID_DICT_FIELDS _n_gpu enable_jit_checkpoint n_gpu",
    "transformers/generation/utils.py": """
        _has_unfinished_sequences _optimize_model_for_decode _prefill _prepare_generation_config
        _supports_default_dynamic_cache _update_model_kwargs_for_generation _valid_auto_compile_criteria
    """,
    "transformers/generation/configuration_utils.py": "_compile_all_devices",
    "transformers/modeling_utils.py": "_can_compile_fullgraph _from_config",
    "transformers/integrations/peft.py": "_hf_peft_config_loaded",
    "transformers/integrations/deepspeed.py": "_hf_deepspeed_config_weak_ref",
    "transformers/configuration_utils.py": "_attn_implementation",
    "transformers/core_model_loading.py": "_weight_conversions",
    "transformers/models/qwen2_5_vl/processing_qwen2_5_vl.py": "_get_num_multimodal_tokens",
    "accelerate/accelerator.py": "_models",
    "accelerate/optimizer.py": "_is_overflow",
    "accelerate/state.py": "_set_sync_gradients _shared_state",
    "datasets/arrow_dataset.py": "_indices",
    "torch/__init__.py": "_dynamo",
    "torch/_dynamo/config.py": "recompile_limit",
    "torch/distributed/distributed_c10d.py": "_new_process_group_helper _world",
    "torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py": "_CHECKPOINT_PREFIX",
    f"{_FSDP}/_fully_shard.py": "_get_fsdp_state",
    f"{_FSDP}/_fsdp_state.py": "_fsdp_param_group _modules_to_run_forward",
    f"{_FSDP}/_fsdp_param_group.py": "_to_sharded",
    "vllm/distributed/parallel_state.py": """
        _EP _TP destroy_distributed_environment destroy_model_parallel get_tp_group
    """,
    "vllm/lora/worker_manager.py": "_adapter_manager _load_adapter",
    "vllm/v1/engine/core_client.py": "_finalizer",
}
"""By the file that defines or reads them; of a library that is not installed nothing is checked."""

NOT_BORROWED = {
    "_actions", "_add_action", "_asdict", "_device_types", "_get_backend", "_replace",
    "_set_default_timeout", "_timeout", "_version",
}  # fmt: skip
"""Of Python, and of torch's C++, which have no file to look into."""
