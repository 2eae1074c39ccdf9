"""Reports on a training run: a progress bar, one line per log, the accuracy over time, and a table at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import ProgressCallback

ACCURACY = "eval_rewards/right/mean"
"""What evaluations with the reward [`task.right`] log."""


class Report(ProgressCallback):
    """Replaces the default progress callback, which prints every metric of every log.

    Attributes:
        accuracy (`dict[int, float]`): by optimizer step, from the evaluations.
        divergence (`dict[int, float]`): by optimizer step, nats per token, the mean since the last log.
        completion_tokens (`int`): tokens the student has been trained on.
        train_seconds (`float`): as reported by the trainer, including measurements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.accuracy: dict[int, float] = {}
        self.divergence: dict[int, float] = {}
        self.completion_tokens = 0
        self.train_seconds = 0.0
        self._line = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._write(f"{'step':>6}  {'divergence':>10}  {'tokens':>8}  {'seconds/step':>12}  {'accuracy':>8}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No bar for an evaluation, which takes a second."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        logs, step = logs or {}, state.global_step
        self.train_seconds = logs.get("train_runtime", self.train_seconds)
        if ACCURACY in logs:
            self.accuracy[step] = round(logs[ACCURACY], 6)
            self._write(f"{self._line or f'{step:6d}':42}  {self.accuracy[step]:8.3f}")
            self._line = ""
        if "divergence/mean" not in logs:  # an evaluation; or the summary at the end, unless steps were left since then
            return
        last = max(self.divergence, default=0)
        completions = (step - last) * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.completion_tokens += round(completions * logs["completions/mean_length"])
        self.divergence[step] = logs["divergence/mean"]
        line = f"{step:6d}  {self.divergence[step]:10.4f}  {self.completion_tokens:8,d}"
        self._line = f"{line}  {logs['step_time']:12.2f}" if "step_time" in logs else line

    def save(self, folder: str | Path, teacher_accuracy: float, problems: int) -> dict[str, float]:
        """Writes `metrics.json` and `curves.png`, prints the table, and returns the metrics."""
        metrics = {
            "student_accuracy_before": self.accuracy[0],
            "student_accuracy_after": self.accuracy[max(self.accuracy)],
            "teacher_accuracy": teacher_accuracy,
            "steps": max(self.accuracy),
            "completion_tokens": self.completion_tokens,
            "train_seconds": round(self.train_seconds, 1),
        }
        (Path(folder) / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        self._draw(Path(folder) / "curves.png", metrics["teacher_accuracy"])
        print(_table(metrics, problems))
        return metrics

    def _write(self, line: str) -> None:
        if self.training_bar is not None:
            self.training_bar.write(line)

    def _draw(self, path: Path, teacher_accuracy: float) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(list(self.divergence), list(self.divergence.values()))
        left.set(xlabel="optimizer step", ylabel="divergence (nats per token)", ylim=(0, None))
        right.plot(list(self.accuracy), list(self.accuracy.values()), marker="o", label="student")
        right.axhline(teacher_accuracy, color="grey", linestyle="--", label="teacher")
        right.set(xlabel="optimizer step", ylabel="accuracy on held-out problems", ylim=(0, 1.02))
        right.legend(loc="lower right")
        figure.savefig(path, dpi=120)


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
