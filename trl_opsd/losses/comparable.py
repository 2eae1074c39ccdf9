"""Refuses hidden states and heads that cannot be compared, before any product is computed."""

from __future__ import annotations

from torch import Tensor

from trl_opsd.types import LazyLogits


def check_comparable(
    student: LazyLogits,
    teacher: LazyLogits,
    weights_N: Tensor | None,
    chunk_tokens: int | None,
    vocabulary: int | None,
) -> None:
    """Refuses shapes, devices and settings that do not go together, before any product is computed."""
    for name, side in (("student", student), ("teacher", teacher)):
        hidden_NH, weight_VH, bias_V = side.hidden, side.head.weight, side.head.bias
        if hidden_NH.ndim != 2:
            raise ValueError(
                f"{name} hidden states have shape {list(hidden_NH.shape)}, expected [N, H]: "
                "select the tokens in the loss first, for example hidden[weights != 0]."
            )
        if weight_VH.ndim != 2 or weight_VH.size(1) != hidden_NH.size(1):
            raise ValueError(
                f"{name} head weight has shape {list(weight_VH.shape)}, expected [V, {hidden_NH.size(1)}] for hidden "
                f"states of width {hidden_NH.size(1)}: pass hidden states and head of the same model."
            )
        if bias_V is not None and bias_V.shape != weight_VH.shape[:1]:
            raise ValueError(
                f"{name} head bias has shape {list(bias_V.shape)}, expected [{weight_VH.size(0)}]: "
                "pass weight and bias of the same head."
            )
        if not side.temperature > 0:
            raise ValueError(f"{name} temperature is {side.temperature}, expected a number above 0: use 1.0 for none.")
    if student.hidden.size(0) != teacher.hidden.size(0):
        raise ValueError(
            f"student has {student.hidden.size(0)} tokens, teacher {teacher.hidden.size(0)}: "
            "select the same tokens from both."
        )
    mine, yours = student.head.weight.size(0), teacher.head.weight.size(0)
    if vocabulary is None and mine != yours:
        raise ValueError(
            f"student vocabulary is {mine}, teacher vocabulary {yours}: pass a teacher with the same tokenizer, and "
            "set `vocabulary` to the number of ids they share."
        )
    if vocabulary is not None and not 1 <= vocabulary <= min(mine, yours):
        raise ValueError(
            f"vocabulary is {vocabulary}, but the student's head has {mine} rows and the teacher's {yours}: expected "
            f"a number from 1 to {min(mine, yours)}, the ids that both models know."
        )
    tensors = (student.hidden, student.head.weight, teacher.hidden, teacher.head.weight)
    if len(devices := {str(tensor.device) for tensor in tensors}) > 1:
        raise ValueError(
            f"tensors are on {sorted(devices)}, expected one device: move heads and hidden states together."
        )
    if weights_N is not None and weights_N.shape != student.hidden.shape[:1]:
        raise ValueError(
            f"weights have shape {list(weights_N.shape)}, expected [{student.hidden.size(0)}]: pass one per token."
        )
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}, expected an int of at least 1: pass None for the default.")
