"""Options and arguments of other trainers: what they are called here, or why there is nothing like them.

No class is read here; `strict_names.py` asks when a name is unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from types import MappingProxyType

_WRITTEN_ONCE = (
    "each prompt is completed once in an epoch, and its completion is used for one optimizer step; for more "
    "completions of a prompt, repeat its row"
)
_NO_REWARDS = "there are no rewards, the teacher scores every token; `trl.GRPOTrainer` takes rewards"
_FULL_VOCABULARY = "the loss compares the full vocabulary, without a list of top tokens"
_NO_SERVER = "a teacher is loaded into the training processes; `teacher_offload` says where its weights are kept"
_ONE_TOKENIZER = "teacher and student share one tokenizer; `trl.experimental.gold` compares two"
_COMPLETION_ONLY = "the loss is on the tokens that the student writes, and on no others"
_NO_LABELS = (
    "there are no labels to hold predictions against; an evaluation logs `eval_loss` and `eval_divergence/mean`"
)
_OWN_WEIGHTS = "override `weigh`, see docs/extending.md"
_LOADING = "it says how to load a model: put it into `model_init_kwargs` or `teacher_model_init_kwargs`"
_PEFT = "pass `peft_config=LoraConfig(...)` to `OPSDTrainer`"

OPTIONS: MappingProxyType[str, str] = MappingProxyType(
    {
        # other ways to distil
        "lmbda": "the student writes all completions, which is `lmbda=1`: remove it",
        "seq_kd": "the student writes all completions; to learn from texts of the teacher, use `trl.SFTTrainer`",
        "generate_from_teacher": "the student writes all completions: remove it",
        "max_new_tokens": "it is called `max_completion_length`",
        "max_tokens": "it is called `max_completion_length`",
        "max_length": "`max_completion_length` limits completions; prompts are never cut, see `overlong_prompts`",
        "max_seq_length": "`max_completion_length` limits completions; prompts are never cut, see `overlong_prompts`",
        "max_prompt_length": "prompts are never cut; `overlong_prompts='drop'` drops those that are too long",
        "alpha": "`divergence` names the objective, and `beta` interpolates as in TRL",
        "distillation_alpha": "it is called `beta`: 0 forward KL, 1 reverse KL; or set `divergence`",
        "distillation_mode": _FULL_VOCABULARY,
        "distillation_topk": _FULL_VOCABULARY,
        "distillation_add_tail": _FULL_VOCABULARY,
        "distillation_is_clip": "completions are sampled by the student that is trained: there is nothing to correct",
        "distillation_weight": "distillation is the whole loss: scale the `learning_rate`",
        "distillation_objective": "it is called `divergence`",
        "loss_top_k": _FULL_VOCABULARY,
        "loss_add_tail": _FULL_VOCABULARY,
        "teacher_top_k": _FULL_VOCABULARY,
        "reverse_kl_top_1_mode": _FULL_VOCABULARY,
        "loss_type": "it is called `divergence`",
        "kl_type": "it is called `divergence`",
        "teacher_temperature": "`temperature` applies to both models",
        "teacher_model": "pass it to `OPSDTrainer`, or set `teacher_model_name_or_path`",
        "teacher_model_server_url": _NO_SERVER,
        "teacher_server_urls": _NO_SERVER,
        "use_teacher_server": _NO_SERVER,
        "teacher_tokenizer_name_or_path": _ONE_TOKENIZER,
        "use_uld_loss": _ONE_TOKENIZER,
        "num_loss_tokens_to_skip": _OWN_WEIGHTS,
        "mask_truncated_completions": _OWN_WEIGHTS,
        "sync_ref_model": "`teacher_model_kind='ema'` is a teacher that follows the student",
        "ref_model_mixup_alpha": "it is called `teacher_update_rate`, with `teacher_model_kind='ema'`",
        "ref_model_sync_steps": "it is called `teacher_sync_steps`, with `teacher_model_kind='ema'`",
        "solution_template": "it is called `teacher_prompt_template`",
        "reprompt_template": "it is called `teacher_prompt_template`",
        # reinforcement learning
        "num_generations": _WRITTEN_ONCE,
        "num_generations_eval": _WRITTEN_ONCE,
        "num_iterations": _WRITTEN_ONCE,
        "steps_per_generation": _WRITTEN_ONCE,
        "generation_batch_size": "it is `per_device_train_batch_size` x processes x `gradient_accumulation_steps`",
        "reward_weights": _NO_REWARDS,
        "scale_rewards": _NO_REWARDS,
        "epsilon": _NO_REWARDS,
        "epsilon_high": _NO_REWARDS,
        "delta": _NO_REWARDS,
        "importance_sampling_level": _NO_REWARDS,
        "vllm_importance_sampling_correction": "every weight sync is verified instead, see `vllm_sync_check`",
        "vllm_sync_frequency": "weights are sent to vLLM whenever they have changed",
        "entropy_coef": "the divergence is the whole loss; `divergence='forward_kl'` keeps the student's entropy up",
        "log_completions_steps": "`log_completions=True` logs every `logging_steps`",
        "wandb_log_unique_prompts": "it is called `log_unique_prompts`",
        # supervised fine-tuning
        "dataset_text_field": "the column is called 'prompt'",
        "dataset_num_proc": "datasets are read in one process",
        "packing": "completions have different lengths, and none is packed",
        "eval_packing": "completions have different lengths, and none is packed",
        "padding_free": "completions have different lengths, and none is packed",
        "completion_only_loss": _COMPLETION_ONLY,
        "assistant_only_loss": _COMPLETION_ONLY,
        # loading
        "dtype": _LOADING,
        "torch_dtype": _LOADING,
        "attn_implementation": _LOADING,
        "device_map": _LOADING,
        "load_in_4bit": _LOADING,
        "load_in_8bit": _LOADING,
        "model_revision": "put `revision` into `model_init_kwargs`",
        "model_name_or_path": "pass it to `OPSDTrainer` as `model`",
        "use_peft": _PEFT,
        "lora_r": _PEFT,
        "lora_alpha": _PEFT,
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
        "epochs": "it is called `num_train_epochs`",
        "num_epochs": "it is called `num_train_epochs`",
        "batch_size": "it is called `per_device_train_batch_size`",
    }
)
"""Options that configs of other trainers have, and what to do here."""

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
        "reward_funcs": _NO_REWARDS,
        "reward_model": _NO_REWARDS,
        "reward_processing_classes": _NO_REWARDS,
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
    "teacher_processing_class",
    "teacher_prompt_fn",
)
"""Arguments of `OPSDTrainer` that are no options as well."""


def explained_option(name: str, known: Collection[str]) -> str:
    """A sentence about an option that does not exist.

    Args:
        name (`str`):
            The unknown name.
        known (`Collection[str]`):
            The options that exist.
    """
    if name in OPTIONS:
        return f"has no option {name!r}: {OPTIONS[name]}."
    if name in TRAINER_ARGUMENTS:
        return f"has no option {name!r}: it is an argument of `OPSDTrainer`."
    if name in ARGUMENTS:
        return f"has no option {name!r}; of `OPSDTrainer`: {ARGUMENTS[name]}."
    return f"has no option {name!r}. {_closest(name, known)}"


def explained_argument(name: str, known: Collection[str], options: Collection[str]) -> str:
    """A sentence about an argument of the trainer that does not exist.

    Args:
        name (`str`):
            The unknown name.
        known (`Collection[str]`):
            The arguments that exist.
        options (`Collection[str]`):
            Names of `OPSDConfig`.
    """
    if name in ARGUMENTS:
        return f"has no argument {name!r}: {ARGUMENTS[name]}."
    if name in options:
        return f"has no argument {name!r}: it is an option, `args=OPSDConfig({name}=...)`."
    if name in OPTIONS:
        return f"has no argument {name!r}; in `OPSDConfig`: {OPTIONS[name]}."
    return f"has no argument {name!r}. {_closest(name, known)}"


def misspelt(name: str, known: Collection[str]) -> str | None:
    """The name that a new attribute was most likely meant to have; `None` for a name of the user's own.

    Args:
        name (`str`):
            The new attribute.
        known (`Collection[str]`):
            Names of attributes that exist. One that continues them is the user's: `rollouts`, `train_dataset_2`.
    """
    candidates = [one for one in known if not one.startswith("_") and not name.startswith(one)]
    close = () if name.startswith("_") else difflib.get_close_matches(name, candidates, n=1, cutoff=0.9)
    return close[0] if close else None


def _closest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else "docs/reference.md lists all."
