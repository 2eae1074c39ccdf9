"""Measures what the student's pass keeps for its backward pass, in one process and with two that share each row.

    python benchmarks/shared_rows.py
    python benchmarks/shared_rows.py --tokens 4096 --width 256 --layers 8

"kept" is the sum of the tensors that autograd saves in one pass over one row, each storage counted once, without the
student's own weights: on an accelerator that is most of the peak of a step with long rows. It is the largest of the
processes and of the passes of one optimizer step, in bytes; the two processes run under ZeRO-3.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from accelerate.utils import gather_object
from common import options, show
from datasets import Dataset
from support import forks, tiny
from torch import Tensor

from trl_opsd import FixedRollout, OPSDTrainer

PROMPT = "2+2="


class Measured(OPSDTrainer):
    """Adds up what autograd saves while a loss is computed."""

    kept = 0
    """Bytes, the most of any pass."""

    def compare(self, student: Any, *others: Any) -> Any:
        # By their shapes, as ZeRO-3 gathers them into other storages.
        weights = {getattr(parameter, "ds_shape", parameter.shape) for parameter in student.parameters()}
        found: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not {tensor.shape, tensor.shape[::-1]} & weights:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            parts = super().compare(student, *others)
        if self.model.training:
            self.kept = max(self.kept, sum(found.values()))
        return parts


def measured(folder: Path, given: argparse.Namespace, processes: int) -> int:
    """The bytes that one process keeps at most."""
    answer = [5 + number % 200 for number in range(given.tokens - len(PROMPT))]
    trainer = Measured(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=tiny.config(
            folder / "out",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2 // processes,
            max_steps=1,
            max_completion_length=given.tokens,
        ),
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 2),
        processing_class=tiny.tokenizer(),
        rollout=FixedRollout({tuple(tiny.tokenizer()(PROMPT)["input_ids"]): answer}),
    )
    trainer.train()
    return max(gather_object([trainer.kept]))


def main() -> None:
    given = options(__doc__, tokens=2048, width=128, layers=4)
    sizes = {"num_hidden_layers": given.layers, "max_position_embeddings": given.tokens + 64}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.qwen2(given.width, seed=0, **sizes).save_pretrained(folder / "student")
        tiny.qwen2(given.width, seed=1, **sizes).save_pretrained(folder / "teacher")
        two = forks.launch("sp_cpu", measured, folder, given, 2)[0]
        show([{"tokens": given.tokens, "one_process": measured(folder, given, 1), "two_processes": two}], given.json)


if __name__ == "__main__":
    main()
