"""Trains two steps on a CPU and writes how much memory each process held at most in each phase of the last step.

Launched by accelerate, or not. Arguments: folder for results, `teacher_offload`, rows, tokens of prompt and completion,
checkpointing (0 or 1), then the folders of a student and its teacher, or of several such pairs, which are trained one
after the other. Writes `peak-RANK.json`: bytes by phase of each training.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import Dataset
from support import fsdp_on_cpu, tiny

from trl_opsd import OPSDConfig, OPSDTrainer


def resident(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


PHASES = {"complete": "rollout", "teach": "scoring"}
"""Of a step, by their names in the plan; what is in none is the learning of the student."""


class Measured(OPSDTrainer):
    """Knows the peak of the resident memory in each phase."""

    def __init__(self, *args, **kwargs) -> None:
        self.peaks: dict[str, int] = {}
        super().__init__(*args, **kwargs)

    def taken(self, phase: str) -> None:
        """Notes the peak since the last call as one of a phase."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), resident("VmHWM"))
        ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept is not needed
        Path("/proc/self/clear_refs").write_text("5")  # from here on, a new peak

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As it is, and noted."""
        if name not in PHASES:
            with super().phase(name):
                yield
            return
        self.taken("training")
        with super().phase(name):
            yield
        self.taken(PHASES[name])

    def training_step(self, *args, **kwargs):
        """Forgets what was before the last step."""
        if self.state.global_step == self.state.max_steps - 1:
            self.taken("before")
            self.peaks.clear()
        return super().training_step(*args, **kwargs)


def peaks(folder: str, student: str, teacher: str, offload: str, *numbers: str) -> dict[str, int]:
    """The teacher is in the memory of the process wherever it is placed: there is no other device."""
    rows, prompt, length, checkpointing = map(int, numbers)
    config = OPSDConfig(
        output_dir=folder, use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=rows, report_to="none",
        max_completion_length=length, gradient_checkpointing=bool(checkpointing), teacher_offload=offload, top_k=0,
        save_strategy="no", logging_steps=1, teacher_model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    fsdp_on_cpu.allow()
    trainer = Measured(
        model=student,
        teacher_model=teacher,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a" * prompt] * 64}),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    trainer.taken("training")
    assert trainer.state.log_history[0]["completions/mean_length"] > 0.9 * length
    return trainer.peaks


def main(folder: str, *arguments: str) -> None:
    """Measures all pairs of models."""
    options, models, found = arguments[:5], arguments[5:], []
    for pair in zip(models[::2], models[1::2], strict=True):
        found.append(peaks(folder, *pair, *options))
        gc.collect()
    Path(folder, f"peak-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
