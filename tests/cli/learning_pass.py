"""Measures, in a process of its own, the peak memory of a student that learns from a teacher's states on the CPU.

Arguments: config of the student, config of the teacher, rows, prompt tokens, completion tokens, checkpointing (0 or 1).
Prints bytes: the peak resident memory less that before the models existed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trl_opsd.losses import ForwardKL
from trl_opsd.losses.streamed import streamed_divergence
from trl_opsd.models.backbone import hidden_states
from trl_opsd.types import LazyLogits, OutputHead


def resident(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def made(source: str) -> PreTrainedModel:
    """A random model."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)


def learn(student: PreTrainedModel, head: OutputHead, states_NH: torch.Tensor, rows: int, tokens: int) -> None:
    """Forward, loss and backward of one micro-batch; states are those of the last tokens of each row."""
    ids_BL = torch.randint(student.config.vocab_size, (rows, tokens))
    hidden_BLH = hidden_states(student, ids_BL, torch.ones_like(ids_BL))
    hidden_NH = hidden_BLH[:, -len(states_NH) // rows :].flatten(0, 1)
    logits = LazyLogits(hidden_NH, OutputHead(student.lm_head.weight))
    streamed_divergence(logits, LazyLogits(states_NH, head), ForwardKL()).divergence.sum().backward()


def main(student_at: str, teacher_at: str, *numbers: str) -> None:
    """Learns from two micro-batches, so that gradients and Adam's moments exist in the second."""
    rows, prompt, length, checkpointing = map(int, numbers)
    before = resident("VmRSS")
    student, teacher = made(student_at).train(), made(teacher_at)
    if checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(student.parameters(), foreach=False)
    for one in student.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    states_NH = torch.randn(rows * length, teacher.config.hidden_size)
    head = OutputHead(teacher.lm_head.weight.detach())
    for _ in range(2):
        learn(student, head, states_NH, rows, prompt + length)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
