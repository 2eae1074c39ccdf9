"""Two specialised teachers, one student: one knows sums, the other differences, and each row names its teacher.

python examples/two_teachers.py --output out/two
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arithmetic import ADDER, STUDENT, SUBTRACTER
from arithmetic.evaluate import accuracy
from arithmetic.task import Problem, draw, prompts
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDConfig, OPSDTrainer

TEACHERS = {"sums": ADDER, "differences": SUBTRACTER}


def teacher_of(problem: Problem) -> str:
    return "sums" if problem.sign == "+" else "differences"


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description="On-policy distillation from two teachers.")
    parser.add_argument("--output", type=Path, default=Path("out/two"))
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, each of 64 completions")
    parser.add_argument("--held-out", type=int, default=400, help="problems to measure accuracy on")
    options = parser.parse_args(arguments)

    problems = draw(64 * options.steps)
    config = OPSDConfig(
        output_dir=str(options.output),
        divergence="forward_kl",
        max_steps=options.steps,
        per_device_train_batch_size=64,
        max_completion_length=40,
        top_p=0.6,
        learning_rate=1e-3,  # for a model this small; 1e-6 to 1e-5 for a real one
        lr_scheduler_type="linear",
        warmup_steps=10,
        adam_beta2=0.98,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
    )
    trainer = OPSDTrainer(
        model=STUDENT,
        teacher_model=TEACHERS,
        args=config,
        train_dataset=prompts(problems).add_column("teacher", [teacher_of(problem) for problem in problems]),
    )
    models = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in TEACHERS.items()}
    models["student before"] = AutoModelForCausalLM.from_pretrained(STUDENT)

    trainer.train()

    models["student after"] = trainer.model
    held_out = draw(options.held_out, held_out=True)
    domains = {name: [problem for problem in held_out if teacher_of(problem) == name] for name in TEACHERS}
    print(f"{'accuracy':16}" + "".join(f"{name:>14}" for name in domains))
    table = {}
    for who, model in models.items():
        table[who] = {name: accuracy(model, trainer.processing_class, rows) for name, rows in domains.items()}
        print(f"{who:16}" + "".join(f"{share:14.3f}" for share in table[who].values()))
    return table


if __name__ == "__main__":
    main()
