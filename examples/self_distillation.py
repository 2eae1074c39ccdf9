"""On-policy self-distillation: a small model is its own teacher, which also sees the worked solution.

python examples/self_distillation.py --output out/self
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arithmetic import READER
from arithmetic.evaluate import accuracy
from arithmetic.summary import summarize
from arithmetic.task import draw, prompts_with_solutions, right
from peft import LoraConfig

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="On-policy self-distillation on arithmetic.")
    parser.add_argument("--output", type=Path, default=Path("out/self"))
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, each of 64 completions")
    parser.add_argument("--held-out", type=int, default=200, help="problems to measure accuracy on")
    options = parser.parse_args(arguments)

    held_out = draw(options.held_out, held_out=True)
    config = OPSDConfig(
        output_dir=str(options.output),
        teacher_model_kind="base",  # the model without its adapter: no second copy
        teacher_prompt_template="{prompt}{privileged_context}",  # the worked solution after the question
        divergence="forward_kl",
        max_steps=options.steps,
        per_device_train_batch_size=64,
        max_completion_length=40,
        top_p=0.6,
        learning_rate=5e-3,  # for an adapter this small; 5e-6 to 1e-4 for a real one
        lr_scheduler_type="linear",
        warmup_steps=10,
        adam_beta2=0.98,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        eval_on_start=True,
        per_device_eval_batch_size=200,
        eval_temperature=0.0,  # greedy
        save_strategy="no",
        report_to="none",
    )
    trainer = OPSDTrainer(
        model=READER,  # can copy a solution from its prompt, but rarely finds one by itself
        args=config,
        train_dataset=prompts_with_solutions(
            draw(64 * options.steps)
        ),  # "prompt", and for the teacher "privileged_context"
        eval_dataset=prompts_with_solutions(held_out).add_column("answer", [one.answer for one in held_out]),
        methods=[Rewards(right)],
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
    )
    trainer.train()

    trainer.save_model(str(options.output / "adapter"))
    with trainer.model.disable_adapter():
        teacher_accuracy = accuracy(trainer.model, trainer.processing_class, held_out, show_solution=True)
    return summarize(trainer, teacher_accuracy, len(held_out))


if __name__ == "__main__":
    main()
