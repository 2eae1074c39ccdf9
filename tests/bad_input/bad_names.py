"""Options and arguments that do not exist: those of other trainers, and misspelt ones."""

from __future__ import annotations

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


CASES: list[Case] = [
    unknown("has no option 'generate_from_teacher': it is called `seq_kd`", generate_from_teacher=True),
    unknown("it is called `num_generations`", rollout_n=8),
    unknown("is used for one optimizer step; `num_generations` sets the completions", num_iterations=2),
    unknown("it is called `max_completion_length`; docs/migration.md", max_new_tokens=128),
    unknown("all tokens of a completion have the same weight", loss_type="grpo"),
    unknown("'max_reprompt_len': see docs/reference.md for all, docs/migration.md", max_reprompt_len=1.0),
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
    unknown_argument("'compute_metrics': there are no labels", "compute_metrics"),
    unknown_argument("'teacher': it is the argument `teacher_model`", "teacher"),
    unknown_argument(r"it is an option, `args=OPSDConfig\(max_steps=...\)`", "max_steps"),
    unknown_argument("it is called `max_completion_length`", "max_new_tokens"),
    unknown_argument("did you mean 'peft_config'", "peft_cfg"),
]
