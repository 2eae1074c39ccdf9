"""Two specialised teachers, one student: one knows sums, the other differences, and each row names its teacher.

python examples/two_teachers.py --output out/two
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arithmetic import ADDER, STUDENT, SUBTRACTER
from arithmetic.evaluate import accuracy
from arithmetic.task import Problem, draw, prompts_with_answers, right
from datasets import Dataset
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards

TEACHERS = {"sums": ADDER, "differences": SUBTRACTER}


def teacher_of(problem: Problem) -> str:
    return "sums" if problem.sign == "+" else "differences"


def rows(problems: list[Problem]) -> Dataset:
    return prompts_with_answers(problems).add_column("teacher", list(map(teacher_of, problems)))


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description="On-policy distillation from two teachers.")
    parser.add_argument("--output", type=Path, default=Path("out/two"))
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, each of 64 completions")
    parser.add_argument("--held-out", type=int, default=400, help="problems to measure accuracy on")
    options = parser.parse_args(arguments)

    held_out = draw(options.held_out, held_out=True)
    domains = {name: [one for one in held_out if teacher_of(one) == name] for name in TEACHERS}
    config = OPSDConfig(
        output_dir=str(options.output),
        divergence="forward_kl",
        max_steps=options.steps,
        per_device_train_batch_size=64,
        max_completion_length=40,
        top_p=0.6,
        learning_rate=1e-3,  # for a model this small; 1e-6 to 1e-5 for a real one
        warmup_steps=10,
        adam_beta2=0.98,
        logging_steps=20,
        per_device_eval_batch_size=200,
        eval_temperature=0.0,  # greedy
        save_strategy="no",
        report_to="none",
    )
    trainer = OPSDTrainer(
        model=STUDENT,
        teacher_model=TEACHERS,
        args=config,
        train_dataset=rows(draw(64 * options.steps)),
        eval_dataset={name: rows(some) for name, some in domains.items()},
        methods=[Rewards(right)],
    )
    table = {}
    for name, path in TEACHERS.items():
        model = AutoModelForCausalLM.from_pretrained(path)
        table[name] = {domain: accuracy(model, trainer.processing_class, some) for domain, some in domains.items()}
    figures = {"student before": trainer.evaluate()}
    trainer.train()
    trainer.save_model()
    figures["student after"] = trainer.evaluate()
    table |= {who: {name: one[f"eval_{name}_rewards/right/mean"] for name in domains} for who, one in figures.items()}
    print(f"{'accuracy':16}" + "".join(f"{domain:>14}" for domain in domains))
    for who, shares in table.items():
        print(f"{who:16}" + "".join(f"{share:14.3f}" for share in shares.values()))
    print(f"the student: {options.output}")
    return table


if __name__ == "__main__":
    main()
