"""Sums up a training on arithmetic: its figures as a table and a file, and its curves as a picture."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_opsd import OPSDTrainer

ACCURACY = "eval_rewards/right/mean"
"""What evaluations with the reward [`task.right`] log."""


def summarize(trainer: OPSDTrainer, teacher_accuracy: float, problems: int) -> dict[str, float]:
    """Writes `metrics.json` and, with matplotlib, `curves.png` to the output folder; prints and returns the metrics.

    Args:
        trainer ([`OPSDTrainer`]):
            Has been trained, with evaluations.
        teacher_accuracy (`float`), problems (`int`):
            The share of the problems that the teacher solves, and how many there are.
    """
    logs, folder = trainer.state.log_history, Path(trainer.args.output_dir)
    accuracy = {log["step"]: log[ACCURACY] for log in logs if ACCURACY in log}
    metrics = {
        "student_accuracy_before": round(accuracy[0], 6),
        "student_accuracy_after": round(accuracy[max(accuracy)], 6),
        "teacher_accuracy": teacher_accuracy,
        "steps": max(accuracy),
        "completion_tokens": _completion_tokens(logs, trainer.args.train_batch_size),
        "train_seconds": round(logs[-1]["train_runtime"], 1),
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib"):
        _draw(logs, accuracy, teacher_accuracy).savefig(folder / "curves.png", dpi=120)
    print(f"{_table(metrics, problems)}files              {folder}\n")
    return metrics


def _completion_tokens(logs: list[dict[str, Any]], rows: int) -> int:
    """Tokens the student was trained on: each log has the mean length since the one before."""
    found = [(log["step"], log["completions/mean_length"]) for log in logs if "completions/mean_length" in log]
    starts = [0, *(step for step, _ in found)]
    return round(sum((step - start) * rows * length for start, (step, length) in zip(starts, found, strict=False)))


def _draw(logs: list[dict[str, Any]], accuracy: dict[int, float], teacher_accuracy: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    divergence = {log["step"]: log["divergence/mean"] for log in logs if "divergence/mean" in log}
    left.plot(list(divergence), list(divergence.values()))
    left.set(xlabel="optimizer step", ylabel="divergence (nats per token)", ylim=(0, None))
    right.plot(list(accuracy), list(accuracy.values()), marker="o", label="student")
    right.axhline(teacher_accuracy, color="grey", linestyle="--", label="teacher")
    right.set(xlabel="optimizer step", ylabel="held-out accuracy", ylim=(0, 1.02))
    right.legend(loc="lower right")
    return figure


def _table(metrics: dict[str, float], problems: int) -> str:
    return f"""
accuracy on {problems} held-out problems
  student before   {metrics["student_accuracy_before"]:.3f}
  student after    {metrics["student_accuracy_after"]:.3f}
  teacher          {metrics["teacher_accuracy"]:.3f}
steps              {metrics["steps"]}
completion tokens  {metrics["completion_tokens"]:,}
seconds            {metrics["train_seconds"]:.0f}
"""
