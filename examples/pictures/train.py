"""A student that reads digits in crops learns from itself, shown the crop, to read them in whole pictures.

    python examples/pictures/student.py --output out/pictures/student
    python examples/pictures/train.py out/pictures/student --output out/pictures/trained

No row has an answer that a model reads. With `--writer teacher` the completions are the teacher's: off-policy.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pictures.task import draw_scenes, right, rows
from trl_opsd import OPSDConfig, OPSDTrainer

BATCH = 32


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Self-distillation with a crop that only the teacher sees.")
    parser.add_argument("student", help="a folder that student.py wrote")
    parser.add_argument("--output", type=Path, default=Path("out/pictures/trained"))
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, each of 32 completions")
    parser.add_argument("--writer", choices=["student", "teacher"], default="student", help="of the completions")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    config = OPSDConfig(
        output_dir=str(options.output),
        teacher_model_kind="base",  # the student as it was before training
        divergence="forward_kl",
        lmbda=1.0 if options.writer == "student" else 0.0,
        seq_kd=options.writer == "teacher",
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        max_completion_length=4,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=10,
        adam_beta2=0.98,
        logging_steps=25,
        per_device_eval_batch_size=100,
        eval_temperature=0.0,  # greedy
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    held_out = draw_scenes(300, held_out=True)
    trainer = OPSDTrainer(
        model=options.student,
        args=config,
        train_dataset=rows(draw_scenes(BATCH * options.steps, seed=options.seed), to_teacher="crop"),
        eval_dataset={
            "whole": rows(held_out, to_teacher="crop"),
            "crop": rows(held_out, shown="crop", to_teacher="crop"),
        },
        reward_funcs=right,
    )
    before = trainer.evaluate()
    seconds = trainer.train().metrics["train_runtime"]
    after = trainer.evaluate()
    trainer.save_model()

    found = {"seconds": round(seconds), "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
    for when, log in (("before", before), ("after", after)):
        found |= {f"{name}_{when}": log[f"eval_{name}_rewards/right/mean"] for name in ("whole", "crop")}
    (options.output / "metrics.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("\n".join(f"{name:14} {figure:.3f}" for name, figure in found.items()))
    return found


if __name__ == "__main__":
    main()
