"""Names outside the public API of TRL and its neighbours that this package reads, writes or overrides.

Read this first when moving to another version of TRL. `test_borrowed.py` checks it against our source and theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ours import ANYWHERE, Reading

_DISTILLATION = "trl/trainer/distillation_trainer.py:DistillationTrainer"
_TRAINER = "transformers/trainer.py:Trainer"
_ARGUMENTS = "transformers/training_args.py:TrainingArguments"
_FSDP = "torch/distributed/fsdp/_fully_shard"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Where names are defined, and the names.

    A name of ours that the owner defines has to be listed. A name that is listed has to be used by us, and defined by
    the owner; if we write it or override it, the owner has to read it, as ours would go unnoticed otherwise.
    """

    kind: str
    """The kind of object that has these names: a value of a table of `READING` below."""
    where: tuple[str, ...]
    """Classes, functions or modules, as `package/file.py:Class.method`."""
    names: Mapping[str, str]
    """What we use each for, where that is not obvious."""
    also_read_in: tuple[str, ...] = ()
    """Further places where the owner's library reads them."""
    read_of: tuple[str, ...] = ("self",)
    """Names of the object where they are read."""
    entries: tuple[str, ...] = ()
    """Methods that users call and the owner does not."""
    keys: bool = False
    """Whether they are keys of a dict."""
    only_taken: bool = False
    """Whether names that are merely read are public, and need not be listed."""

    @property
    def package(self) -> str:
        """The library."""
        return self.where[0].partition("/")[0]

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.where[0].rpartition(":")[2]


READING = Reading(
    extended={
        "DistillationTrainer": "trainer",
        "Trainer": "trainer",
        "Host": "trainer",
        "VLLMClient": "client",
        "DistillationConfig": "config",
        "TrainingArguments": "config",
    },
    held={
        "_host": "trainer",
        "host": "trainer",
        "_dist": "backend",
        "distribution": "backend",
        "_sender": "client",
        "sender": "client",
        "distillation_trainer": "module",
        "parallel_state": "vllm groups",
    },
    dicts={"_metrics": "metrics", "logs": "logs"},
    listed={
        "IMAGE_COLUMNS": "row",
        "COLUMNS": "row",
        "_PASSED_BY": "trainer",
        "_DESTROYERS": "vllm groups",
    },
)
"""The kinds of objects behind the names in our source."""

OWNERS = (
    Owner(
        kind="trainer",
        where=(_DISTILLATION, "trl/trainer/base_trainer.py:_BaseTrainer"),
        also_read_in=(_TRAINER,),
        names={
            "_dist": "which ways of splitting the student are on, and how to make it whole",
            "_forward_redirection": "runs a function inside the wrapper's forward",
            "_get_tool_suffix_ids": "token ids of what tools answered",
            "_logs": "texts of completions, for its table",
            "_metrics": "means for the next log; emptied of what an interrupted run left",
            "_name": "the method, for the model card",
            "_prepare_inputs": "a micro-batch is ready",
            "_paper": "the paper of that method, for the model card",
            "_save_checkpoint": "writes the model card first",
            "_set_signature_columns_if_needed": "lets our columns through",
            "_signature_columns": "lets our columns through",
            "_tag_names": "for the model card",
            "_tokenize_prompts": "prompts are checked, and teachers' prompts tokenized, where TRL tokenizes",
            "beta": "assigning to it sets the divergence",
            "chat_template": "prompts with images are rendered as others are",
            "chat_template_kwargs": "changed while a teacher's prompts are tokenized",
            "compute_loss": "where a loss may take part in collectives",
            "create_model_card": "base model and teachers are written into TRL's",
            "eos_token_ids": "those that the student has a row for",
            "generation_config": "takes over the end and padding tokens",
            "generation_kwargs": "takes over the end and padding tokens",
            "get_train_dataloader": "reads the rows of a step once",
            "shuffle_dataset": "whether rows are shuffled",
            "get_eval_dataloader": "renames a column of its dataset",
            "log": "adds means over tokens",
            "log_completions": "texts are kept for its table",
            "pad_to_multiple_of": "",
            "prediction_step": "timed; returns completions",
            "teacher_model": "ours, under TRL's name; another can be assigned",
            "temperature": "checked when it is assigned",
            "max_tool_calling_iterations": "turns that may call tools",
            "tools": "for the fingerprint",
            "training_step": "all of a step happens in its last call",
            "use_vllm": "true where vLLM generates, but not to TRL's tool loop",
        },
    ),
    Owner(
        kind="trainer",
        where=(_TRAINER,),
        entries=("predict", "train"),
        names={
            "_get_dataloader": "streams are shared out by rows",
            "control": "whether a step is logged",
            "_maybe_log_save_evaluate": "after each step, in all processes: where what was recorded is reduced",
            "_get_grad_norm": "called before each step: where one can still be left out",
            "_get_output_dir": "a folder aside while a checkpoint is written",
            "_init_training_state": "where a stream goes on",
            "_load_best_model": "counted, so that engines get the weights",
            "_load_from_checkpoint": "counted, so that engines get the weights",
            "_load_optimizer_and_scheduler": "our own state is read after it",
            "_move_model_to_device": "for an evaluation that wraps nothing",
            "_push_from_checkpoint": "waits until the checkpoint has its name",
            "_remove_unused_columns": "before rows are wrapped so that each is decoded once",
            "_save": "saves the processor too",
            "_save_checkpoint": "into a folder aside",
            "_save_optimizer_and_scheduler": "our own state is written after it",
            "_set_signature_columns_if_needed": "",
            "_signature_columns": "",
            "accelerator": "",
            "add_callback": "",
            "args": "",
            "callback_handler": "its callbacks keep progress bars of a training that failed; one of ours comes last",
            "compute_loss": "",
            "compute_loss_context_manager": "",
            "data_collator": "of our loader, too",
            "_get_collator_with_removed_columns": "of a stream",
            "_prepare_inputs": "",
            "create_model_card": "",
            "create_scheduler": "settings of the optimizer before a checkpoint is loaded",
            "create_optimizer": "FSDP2 is prepared with it, for an evaluation before training",
            "deepspeed": "reset, so that each training has an engine of its own",
            "create_accelerator_and_postprocess": "notes `use_cache` of the student's config before it is changed",
            "eval_dataset": "",
            "evaluate": "with the launch's state of this trainer",
            "evaluation_loop": "seeded, timed, and weighed by tokens",
            "get_eval_dataloader": "renames a column of its dataset",
            "get_train_dataloader": "",
            "get_test_dataloader": "in the order of the rows; renames a column",
            "hub_model_id": "for the model card",
            "is_deepspeed_enabled": "off while an evaluation wraps nothing",
            "is_fsdp_enabled": "",
            "is_in_train": "reset after a training that failed",
            "get_batch_samples": "reads the rows of the next step too, where these are written ahead",
            "is_world_process_zero": "writes the model card",
            "log": "",
            "model": "",
            "model_wrapped": "reset, so that each training has an engine of its own",
            "neftune_hook_handle": "removed after a training that failed",
            "optimizer": "",
            "predict": "returns completions",
            "prediction_step": "",
            "processing_class": "",
            "state": "",
            "train": "",
            "train_dataset": "",
            "training_step": "",
            "save_model": "at the end of `trl-opsd train`",
        },
    ),
    Owner(
        kind="row",
        where=(f"{_DISTILLATION}._generate_and_score_completions",),
        keys=True,
        names={
            "image": "kept from TRL, which would take an empty column for images",
            "images": "kept from TRL, which would take an empty column for images",
            "prompt": "",
        },
    ),
    Owner(
        kind="metrics",
        where=(_DISTILLATION,),
        keys=True,
        names={
            "eval": "the half that an evaluation empties",
            "train": "the half that a training empties",
        },
    ),
    Owner(
        kind="logs",
        where=(f"{_TRAINER}._maybe_log_save_evaluate",),
        keys=True,
        names={
            "grad_norm": "left out where no token has counted",
            "loss": "tells the log of a step from the one at the end",
        },
    ),
    Owner(
        kind="module",
        where=("trl/trainer/distillation_trainer.py",),
        names={"get_peft_model": "replaced while TRL loads the student, to see it before the adapter is put on"},
    ),
    Owner(
        kind="backend",
        where=("trl/distributed.py:DistributedBackend",),
        names={"fsdp_version": "", "gather_params": "", "is_fsdp": "", "summon_full_params": "", "zero_stage": ""},
    ),
    Owner(
        kind="config",
        where=("trl/trainer/distillation_config.py:DistillationConfig",),
        also_read_in=(_DISTILLATION, _ARGUMENTS),
        read_of=("self", "args"),
        only_taken=True,
        names={
            "_VALID_DICT_FIELDS": "options that may come as JSON",
            "generation_kwargs": "loses what is an option, which is set instead",
            "model_init_kwargs": "asks for safetensors while TRL loads the student",
            "teacher_model_init_kwargs": "joined with the options of the command line",
            "use_vllm": "hidden while TRL would build an engine of its own",
            "vllm_server_host": "loopback by default",
        },
    ),
    Owner(
        kind="config",
        where=(_ARGUMENTS,),
        also_read_in=(_TRAINER,),
        read_of=("self", "args"),
        only_taken=True,
        names={
            "_VALID_DICT_FIELDS": "options that may come as JSON",
            "_n_gpu": "1 without a launcher, where several accelerators are visible",
            "bf16": "off without an accelerator",
            "dataloader_pin_memory": "off without an accelerator",
            "device": "the CPU without a number",
            "enable_jit_checkpoint": "hidden while transformers would begin to listen for a SIGTERM",
            "eval_on_start": "off in a dry run",
            "output_dir": "a folder that is removed, in a dry run",
            "push_to_hub": "off in a dry run",
            "report_to": "nothing, in a dry run",
            "to_dict": "a divergence in words",
        },
    ),
    Owner(
        kind="client",
        where=("trl/generation/vllm_client.py:VLLMClient",),
        entries=("init_communicator", "update_named_params"),
        names={
            "_post": "bounded in time, sent once, and refused if it is no answer",
            "_updating_weights": "as TRL's `__init__` sets it",
            "base_url": "",
            "close_communicator": "",
            "communicator": "`None` unless it is connected",
            "get_server_info": "",
            "get_world_size": "",
            "group_port": "",
            "init_communicator": "",
            "update_named_params": "",
        },
    ),
    Owner(
        kind=ANYWHERE,
        where=("argparse/argparse.py:_ActionsContainer",),
        names={
            "_actions": "the options of `accelerate launch`, and of a training",
            "_add_action": "an option of `accelerate launch` in a parser of ours",
        },
    ),
    Owner(
        kind=ANYWHERE,
        where=("accelerate/state.py:GradientState",),
        names={"_set_sync_gradients": "off for all micro-batches of a call but the last"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/models/qwen2_5_vl/processing_qwen2_5_vl.py:Qwen2_5_VLProcessor",),
        names={"_get_num_multimodal_tokens": "tokens of images, from their sizes"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/generation/utils.py:GenerationMixin",),
        names={
            "_has_unfinished_sequences": "",
            "_optimize_model_for_decode": "",
            "_prefill": "",
            "_prepare_generation_config": "",
            "_supports_default_dynamic_cache": "whether its cache can lose rows",
            "_update_model_kwargs_for_generation": "",
            "_valid_auto_compile_criteria": "",
        },
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/modeling_utils.py:PreTrainedModel",),
        names={"_can_compile_fullgraph": "", "_from_config": "an empty twin of a model"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/integrations/peft.py:PeftAdapterMixin",),
        names={"_hf_peft_config_loaded": "whether an adapter in its layers is the model's own"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/configuration_utils.py:PreTrainedConfig",),
        names={
            "_attn_implementation": "whether scores of attention exist in full",
        },
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/generation/configuration_utils.py:CompileConfig",),
        also_read_in=("transformers/generation/utils.py:GenerationMixin",),
        read_of=("self", "compile_config"),
        names={"_compile_all_devices": "compiles on the CPU too"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/integrations/deepspeed.py",),
        names={"_hf_deepspeed_config_weak_ref": "the launch's config, put back after a teacher is loaded with another"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("transformers/core_model_loading.py:convert_and_load_state_dict_in_model",),
        names={"_weight_conversions": "how the names in a checkpoint differ from those in memory"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("datasets/arrow_dataset.py:Dataset",),
        names={"_indices": "which stored rows are selected, in which order"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("accelerate/state.py:AcceleratorState",),
        names={"_shared_state": "that of each trainer, which another config in the process resets"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("accelerate/accelerator.py:Accelerator",),
        names={"_models": "lists the student while an evaluation wraps nothing, so that it is not prepared"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("accelerate/optimizer.py:AcceleratedOptimizer",),
        names={"_is_overflow": "the learning rate stays with a step that is left out"},
    ),
    Owner(
        kind=ANYWHERE,
        where=(f"{_FSDP}/_fully_shard.py:FSDPModule",),
        names={"_get_fsdp_state": ""},
    ),
    Owner(
        kind=ANYWHERE,
        where=(f"{_FSDP}/_fsdp_state.py:FSDPState",),
        names={"_fsdp_param_group": "", "_modules_to_run_forward": "emptied of a forward that did not end"},
    ),
    Owner(
        kind=ANYWHERE,
        where=(f"{_FSDP}/_fsdp_param_group.py:FSDPParamGroup",),
        names={"_to_sharded": "splits what a forward left whole"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py",),
        names={"_CHECKPOINT_PREFIX": "what activation checkpointing adds to names"},
    ),
    Owner(
        kind=ANYWHERE,
        where=("torch/distributed/distributed_c10d.py",),
        names={
            "_new_process_group_helper": "a group with a server, which SGLang makes with the same function",
            "_world": "all process groups there are",
        },
    ),
    Owner(
        kind="vllm groups",
        where=("vllm/distributed/parallel_state.py",),
        names={
            "_EP": "lent, where a first engine has made none",
            "_TP": "lent as the group of experts",
            "destroy_distributed_environment": "switched off while an engine shuts down",
            "destroy_model_parallel": "switched off while an engine shuts down",
            "get_tp_group": "the processes that share an engine",
        },
    ),
    Owner(
        kind=ANYWHERE,
        where=("vllm/lora/worker_manager.py:WorkerLoRAManager",),
        names={
            "_adapter_manager": "which layers can have an adapter",
            "_load_adapter": "replaced: the adapter comes from memory",
        },
    ),
    Owner(
        kind=ANYWHERE,
        where=("vllm/v1/engine/core_client.py:InprocClient",),
        names={"_finalizer": "detached, as it would end the trainer's process groups"},
    ),
)
"""All owners."""

NOT_BORROWED = {
    "_device_types": "of a process group, in C++",
    "_dynamo": "a module",
    "_get_backend": "of a process group, in C++",
    "_asdict": "of every named tuple",
    "_replace": "of every named tuple",
    "_set_default_timeout": "of a process group, in C++; asked for before it is called",
    "_timeout": "of a process group, in C++",
    "_version": "of a tensor, in C++",
}
"""Private names on objects of others that no library's Python source defines."""
