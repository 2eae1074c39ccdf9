"""Run by two processes under DeepSpeed ZeRO-3: one of them gets NaNs in several ways, and finally fails in a save."""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

import faults
import tiny
from accelerate.utils import gather_object

VARIANTS = {
    "raise teacher": {"side": "teacher"},
    "raise student": {"side": "student"},
    "raise gradient unclipped": {"side": "gradient", "max_grad_norm": 0.0},
    "raise gradient": {"side": "gradient"},
    "skip divergence": {"side": "divergence", "nonfinite": "skip"},
    "skip gradient unclipped": {"side": "gradient", "nonfinite": "skip", "max_grad_norm": 0.0},
}


SECONDS = 280
"""Time limit after which a process that still waits prints its stack and ends."""


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    teacher = tiny.qwen2(48, seed=1)  # before there is a DeepSpeed config, so that it stays whole
    results = {name: faults.trained_with_nan(folder, teacher, **options) for name, options in VARIANTS.items()}
    each = gather_object([results])
    trainer = faults.make_trainer(folder, teacher, save_strategy="steps", save_steps=1)
    if trainer.accelerator.is_main_process:
        (folder / "results.json").write_text(json.dumps(each))
    faults.fail_in(trainer, "save")
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
