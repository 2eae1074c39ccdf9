"""Gives a model back what serving it in two bits costs: quantised while it trains, it learns from itself unquantised.

    python examples/quantised.py --output out/quantised

The folder `student/quantized` is what is served. Four bits, the usual format, cost nothing in arithmetic; for a model
of the Hub take `StudentQuantization("int4")`, as `cases/quantised.yaml` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from arithmetic import SUBTRACTER
from arithmetic.evaluate import accuracy
from arithmetic.summary import summarize
from arithmetic.task import Problem, draw, prompts, prompts_with_answers, right
from torchao.quantization import IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards, StudentQuantization


def differences(number: int, held_out: bool = False) -> list[Problem]:
    """What the model knows."""
    return [one for one in draw(3 * number, held_out=held_out) if one.sign == "-"][:number]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="A student in two bits, taught by itself unquantised.")
    parser.add_argument("--output", type=Path, default=Path("out/quantised"))
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, each of 32 completions")
    parser.add_argument("--held-out", type=int, default=200, help="problems to measure accuracy on")
    options = parser.parse_args(arguments)

    held_out = differences(options.held_out, held_out=True)
    config = OPSDConfig(
        output_dir=str(options.output),
        divergence="forward_kl",
        max_steps=options.steps,
        per_device_train_batch_size=32,
        max_completion_length=40,
        learning_rate=3e-4,  # for a model this small; 1e-6 to 1e-5 for a real one
        warmup_steps=6,
        adam_beta2=0.98,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        eval_on_start=True,  # what quantising alone costs
        per_device_eval_batch_size=200,
        eval_temperature=0.0,  # greedy
        save_strategy="no",
        report_to="none",
    )
    trainer = OPSDTrainer(
        model=SUBTRACTER,
        teacher_model=SUBTRACTER,
        args=config,
        train_dataset=prompts(differences(32 * options.steps)),
        eval_dataset=prompts_with_answers(held_out),
        methods=[Rewards(right), StudentQuantization(IntxWeightOnlyConfig(torch.int2, PerGroup(32)))],
    )
    trainer.train()

    trainer.save_model(str(options.output / "student"))
    unquantised = accuracy(trainer.teacher.model, trainer.processing_class, held_out)
    metrics = summarize(trainer, unquantised, len(held_out))
    print(f"to serve: {options.output / 'student' / 'quantized'}")
    return metrics


if __name__ == "__main__":
    main()
