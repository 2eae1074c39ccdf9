"""Training script: takes models, data and every option of `OPSDConfig` from the command line or a YAML file.

accelerate launch --config_file examples/accelerate_configs/zero3.yaml examples/train.py \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --teacher_model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --dataset_name trl-lib/ultrafeedback-prompt --learning_rate 2e-5 --output_dir out/qwen

It takes the options of TRL's `trl distillation`. `--config FILE` reads options from YAML, `--use_peft` trains a LoRA
adapter. The student is loaded in float32 (`--dtype`), the teacher in the dtype of its checkpoint (`--teacher_dtype`).

With `--task arithmetic`, a small student learns the built-in arithmetic task, with the options in `arithmetic.yaml`; it
is evaluated before and after training, and `score.py` evaluates the saved student in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from arithmetic import STUDENT, TEACHER
from arithmetic.task import prompts_with_answers, right
from score import held_out, result
from train_data import arithmetic, loaded, split
from train_options import ExtraArguments, OptionParser, warn_of_options
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_opsd import OPSDConfig, OPSDTrainer


def main(arguments: Sequence[str]) -> OPSDTrainer:
    if not torch.accelerator.is_available():  # without it, DeepSpeed on a CPU counts one process where there are two
        arguments = [*arguments, "--use_cpu"]
    extra, script, config, model, mixture = OptionParser().parse_args_and_config(arguments)
    if extra.task:
        if script.dataset_name or mixture.datasets:
            raise ValueError(f"`task={extra.task!r}` has a dataset of its own: remove it, or the other dataset.")
        model.model_name_or_path = model.model_name_or_path or STUDENT
        if config.teacher_model_kind is None and extra.teacher_models is None:
            config.teacher_model_name_or_path = config.teacher_model_name_or_path or TEACHER
    check_models(extra, config, model)
    warn_of_options(extra, script, config, model, mixture)
    set_loading(extra, config, model)
    data = arithmetic() if extra.task else loaded(script, mixture)
    evaluated = config.eval_strategy != "no"
    trainer = OPSDTrainer(
        model=model.model_name_or_path,
        teacher_model=extra.teacher_models,
        args=config,
        train_dataset=split(data, "dataset_train_split", script.dataset_train_split),
        eval_dataset=split(data, "dataset_test_split", script.dataset_test_split) if evaluated else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        reward_funcs=right if extra.task else None,
    )
    if extra.task:
        evaluate(trainer)
    resume = config.resume_from_checkpoint  # a string on the command line
    trainer.train(resume_from_checkpoint={"true": True, "false": False}.get(str(resume).lower(), resume))
    trainer.save_model()
    if extra.task:
        evaluate(trainer)
    return trainer


def check_models(extra: ExtraArguments, config: OPSDConfig, model: ModelConfig) -> None:
    """Refuses a run without a student or without a teacher, before anything is loaded."""
    if model.model_name_or_path is None:
        raise ValueError(
            "A student model is required for distillation training. Set it with `--model_name_or_path`; or train on a "
            "built-in task, with `--task arithmetic`."
        )
    options = {
        "teacher_model_name_or_path": config.teacher_model_name_or_path,
        "teacher_models": extra.teacher_models,
        "teacher_model_kind": config.teacher_model_kind,
    }
    given = [f"`{name}={value!r}`" for name, value in options.items() if value is not None]
    if not given:
        raise ValueError(
            "A teacher model is required for distillation training. Set it with `--teacher_model_name_or_path`, "
            "several with `--teacher_models`; or let the student teach itself, with `--teacher_model_kind`."
        )
    if len(given) > 1 and extra.teacher_models:
        raise ValueError(f"{' and '.join(given)} each say who teaches: remove all but one.")


def set_loading(extra: ExtraArguments, config: OPSDConfig, model: ModelConfig) -> None:
    """Says in the config how to load each model; what its `*_init_kwargs` already say goes before a default.

    Raises:
        ValueError: An option that is set says something else.
    """
    attention = model.attn_implementation
    options = {"model_revision": "revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    config.model_init_kwargs = _joined(model, options, "model_init_kwargs", config)
    if config.teacher_model_kind is None:
        options = {"teacher_dtype": "dtype", "teacher_attn_implementation": "attn_implementation"}
        loading = _joined(extra, options, "teacher_model_init_kwargs", config)
        if config.teacher_server_url is None:
            loading["attn_implementation"] = loading["attn_implementation"] or attention
        else:  # the server has loaded it: what is set is refused
            loading = {name: value for name, value in loading.items() if value not in (None, "auto")}
        config.teacher_model_init_kwargs = loading


def _joined(group: Any, options: Mapping[str, str], of_model: str, config: OPSDConfig) -> dict[str, Any]:
    """How to load a model, as `options` of a group and the dict `of_model` say; `options` has the names in that."""
    given = getattr(config, of_model) or {}
    for option, name in options.items():
        value = getattr(group, option)
        if name in given and value not in (given[name], getattr(type(group), option)):
            raise ValueError(
                f"`{option}={value!r}` and `{of_model}={{{name!r}: {given[name]!r}}}` are two values for one thing: "
                "remove one of them."
            )
    return {**{name: getattr(group, option) for option, name in options.items()}, **given}


def evaluate(trainer: OPSDTrainer) -> None:
    """Prints how many held-out problems the student gets right now. Collective."""
    share = trainer.evaluate(prompts_with_answers(held_out()))["eval_rewards/right/mean"]
    trainer.accelerator.print(f"step {trainer.state.global_step}: {result(share)}")


if __name__ == "__main__":
    trainer = main(sys.argv[1:])
    trainer.accelerator.wait_for_everyone()  # if one process exits first, the others fail
    trainer.accelerator.end_training()
