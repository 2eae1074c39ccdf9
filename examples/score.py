"""Evaluates a saved student as `train.py` does, but loads it without `trl_opsd`.

python examples/score.py out/train
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arithmetic.evaluate import accuracy
from arithmetic.task import Problem, draw
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer


def held_out() -> list[Problem]:
    """The problems of the evaluation; training uses none of them."""
    return draw(200, held_out=True)


def result(share: float) -> str:
    """The line to print for an accuracy."""
    return f"{round(share * len(held_out()))} of {len(held_out())} held-out problems right ({share:.3f})"


def main(folder: str) -> float:
    """The accuracy of the student in a folder, either a full model, or a LoRA adapter with the path of its base."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder!r} is not a folder: expected one that `train.py` has written, its `output_dir`.")
    is_adapter = (Path(folder) / "adapter_config.json").is_file()
    student = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(folder)
    return accuracy(student, AutoTokenizer.from_pretrained(folder), held_out())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Evaluates a student that `train.py` saved on held-out problems.")
    parser.add_argument("folder", help="the `output_dir` of the run, for instance out/train")
    folder = parser.parse_args().folder
    print(f"{folder}: {result(main(folder))}")
