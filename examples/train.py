"""Training script: takes models, data and every option of `OPSDConfig` from the command line or a YAML file.

accelerate launch --config_file examples/accelerate_configs/zero3.yaml examples/train.py \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --teacher_model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --dataset_name trl-lib/ultrafeedback-prompt --learning_rate 2e-5 --output_dir out/qwen

`--config FILE` reads options from YAML, `--use_peft` trains a LoRA adapter. With neither a model nor a file, a small
student learns the built-in arithmetic task, with the options in `arithmetic.yaml`; it is evaluated before and after
training, and `score.py` evaluates the saved student in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from arithmetic import STUDENT, TEACHER
from arithmetic.evaluate import accuracy
from arithmetic.task import draw, prompts
from datasets import load_dataset
from score import held_out, result
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_opsd import OPSDConfig, OPSDTrainer

NAMED = ("--config", "--model_name_or_path")


def main(arguments: Sequence[str]) -> OPSDTrainer:
    built_in = not any(argument.partition("=")[0] in NAMED for argument in arguments)
    if built_in:
        arguments = ["--config", str(Path(__file__).parent / "arithmetic.yaml"), *arguments]
    if not torch.accelerator.is_available():  # without it, DeepSpeed on a CPU counts one process where there are two
        arguments = [*arguments, "--use_cpu"]
    parser = TrlParser((ScriptArguments, OPSDConfig, ModelConfig))
    script, config, model = parser.parse_args_and_config(list(arguments))
    both = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    config.model_init_kwargs = {"revision": model.model_revision, **both, **(config.model_init_kwargs or {})}
    config.teacher_model_init_kwargs = {**both, **(config.teacher_model_init_kwargs or {})}
    if built_in:
        config.teacher_model_name_or_path = config.teacher_model_name_or_path or TEACHER
        data = {script.dataset_train_split: prompts(draw(2**14))}
    else:
        data = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)

    trainer = OPSDTrainer(
        model=model.model_name_or_path or STUDENT,
        args=config,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=data[script.dataset_test_split] if config.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    if built_in:
        evaluate(trainer)
    resume = config.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=resume == "True" or resume)  # a string on the command line
    trainer.save_model()
    if built_in:
        evaluate(trainer)
    return trainer


def evaluate(trainer: OPSDTrainer) -> None:
    """Prints how many held-out problems the student gets right now. Collective."""
    with trainer.student_for_generation() as student:  # gathered, if it is split over the processes
        share = accuracy(student, trainer.processing_class, held_out())
    trainer.accelerator.print(f"step {trainer.state.global_step}: {result(share)}")


if __name__ == "__main__":
    trainer = main(sys.argv[1:])
    trainer.accelerator.wait_for_everyone()  # if one process exits first, the others fail
    trainer.accelerator.end_training()
