"""A student that reads digits in crops learns from itself, shown the crop, to read them in whole pictures.

    python examples/pictures/train.py --output out/pictures

The first run makes the student, later ones load it. No model reads the rows' answers. Two controls: with `--same-image`
the teacher sees no crop; with `--writer teacher` it generates the completions (off-policy).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pictures.student import make_student
from pictures.task import draw_scenes, right, rows
from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards

BATCH = 32


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Self-distillation with a crop that only the teacher sees.")
    parser.add_argument("--output", type=Path, default=Path("out/pictures"))
    parser.add_argument("--student-steps", type=int, default=130, help="of supervised training, if there is no student")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, each of 32 completions")
    parser.add_argument("--writer", choices=["student", "teacher"], default="student", help="of the completions")
    parser.add_argument("--same-image", action="store_true", help="show the teacher the whole picture too")
    parser.add_argument("--seed", type=int, default=0, help="of rows and sampling")
    parser.add_argument("--held-out", type=int, default=300, help="scenes to measure with")
    options = parser.parse_args(arguments)

    student = options.output / "student"
    if not student.exists():
        make_student(student, options.student_steps)
    folder = options.output / f"{options.writer}{'-same-image' * options.same_image}-{options.seed}"
    config = OPSDConfig(
        output_dir=str(folder),
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
        logging_steps=20,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=options.steps,
        per_device_eval_batch_size=100,
        eval_temperature=0.0,  # greedy
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    held_out = draw_scenes(options.held_out, held_out=True)
    to_teacher = "whole" if options.same_image else "crop"
    trainer = OPSDTrainer(
        model=str(student),
        args=config,
        train_dataset=rows(draw_scenes(BATCH * options.steps, seed=options.seed), to_teacher=to_teacher),
        eval_dataset={shown: rows(held_out, shown, to_teacher) for shown in ("whole", "crop")},
        methods=[Rewards(right)],
    )
    seconds = trainer.train().metrics["train_runtime"]
    trainer.save_model()

    found = {}
    for shown in ("whole", "crop"):
        evaluations = [row for row in trainer.state.log_history if f"eval_{shown}_runtime" in row]
        seconds -= sum(row[f"eval_{shown}_runtime"] for row in evaluations)
        for when, row in zip(("before", "after"), evaluations, strict=True):
            found[f"{shown}_{when}"] = row[f"eval_{shown}_rewards/right/mean"]
    found |= {"seconds": round(seconds), "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
    (folder / "metrics.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("\n".join(f"{name:14}{figure:.3f}" for name, figure in found.items()))
    print(f"the student: {folder}")
    return found


if __name__ == "__main__":
    main()
