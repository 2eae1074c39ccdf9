"""Training script: `trl-opsd train`, and beside it a built-in task.

    python examples/train.py --task arithmetic --output_dir out/train          # small models, minutes
    accelerate launch --config_file trl_opsd/accelerate_configs/zero3.yaml examples/train.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --teacher_model_name_or_path Qwen/Qwen2.5-7B-Instruct \
        --dataset_name trl-lib/ultrafeedback-prompt --learning_rate 1e-5 --output_dir out/qwen

It takes the options of TRL's `trl distillation`. `--config FILE` reads options from YAML, `--use_peft` trains a LoRA
adapter. The student is loaded in float32 (`--dtype`), the teacher in the dtype of its checkpoint
(`--teacher_model_init_kwargs`).

With `--task arithmetic`, a small student learns the built-in arithmetic task, with the options in `arithmetic.yaml`; it
is evaluated before and after training, and `score.py` evaluates the saved student in the same way.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import yaml
from arithmetic import STUDENT, TEACHER
from arithmetic.task import draw, prompts, prompts_with_answers, right
from score import held_out, result

from trl_opsd import OPSDTrainer
from trl_opsd.cli import train as script
from trl_opsd.cli.options import OptionParser, Splits


def data() -> Splits:
    """Problems to train on, and those that `score.py` evaluates."""
    return {"train": prompts(draw(2**14)), "test": prompts_with_answers(held_out())}


def evaluate(trainer: OPSDTrainer) -> None:
    """Prints how many held-out problems the student gets right now. Collective."""
    share = trainer.evaluate(prompts_with_answers(held_out()))["eval_rewards/right/mean"]
    trainer.accelerator.print(f"step {trainer.state.global_step}: {result(share)}")


def main(arguments: Sequence[str]) -> OPSDTrainer:
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--task", choices=["arithmetic"])
    given, rest = own.parse_known_args(arguments)
    if given.task is None:
        return script.main(rest)
    if any(one.startswith("--dataset_name") for one in rest):
        own.error(f"--task {given.task} has its own dataset: remove --dataset_name, or --task.")
    parser = OptionParser()
    parser.set_defaults_with_config(**yaml.safe_load((Path(__file__).parent / "arithmetic.yaml").read_text()))
    others = ("--teacher_model_kind", "--teacher_models", "--teacher_targets")
    teacher = {} if any(one.startswith(others) for one in rest) else {"teacher_model_name_or_path": TEACHER}
    parser.set_defaults_with_config(model_name_or_path=STUDENT, **teacher)
    trainer = script.main(rest, parser, SimpleNamespace(data=data, rewards=right, evaluate=evaluate))
    trainer.accelerator.print(f"the student: {trainer.args.output_dir}")
    return trainer


if __name__ == "__main__":
    script.end(main(sys.argv[1:]))
