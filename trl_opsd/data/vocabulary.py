"""Determines which token ids student and teacher share; knows tokenizers and sizes of heads, but no probabilities."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

_SHOWN = 3
"""Maximum number of differing ids that a message lists."""


def check_token_maps(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, role: str = "teacher", source: str | None = None
) -> None:
    """Refuses a teacher's tokenizer that gives a token another id than the student's."""
    mine, yours = _tokens(student), _tokens(teacher)
    # One saved where the teacher was loaded from (`source`) may be older than the model: ids it lacks are not compared.
    compared = mine.keys() | yours.keys() if source is None else yours.keys()
    differing = sorted(number for number in compared if mine.get(number) != yours.get(number))
    if not differing:
        return
    listed = "; ".join(
        f"id {number} is {_named(yours, number)} for the {role} and {_named(mine, number)} for the student"
        for number in differing[:_SHOWN]
    )
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    read = (
        f" The teacher's was read from {source}, where it was loaded from: if that is not the one it uses, pass its "
        "tokenizer as `teacher_processing_class`."
    )
    raise ValueError(
        f"The tokenizers of student and {role} differ: {listed}{more}. The loss compares the two distributions id by "
        f"id, so pass a teacher with the student's tokenizer.{read if source else ''}"
    )


def shared_vocabulary(
    student_rows: int, teacher_rows: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """The number of token ids that all models share; `None` if all heads have the same size and nothing is masked."""
    if all(rows == student_rows for rows in teacher_rows.values()):
        return None
    # Models with one tokenizer are padded to different multiples (Qwen2.5: 151936 or 152064 rows for 151665 tokens).
    # Ids beyond the tokenizer's may lack a row in another model: they are masked on both sides and never sampled.
    tokens = largest_id(tokenizer) + 1
    sides = [("student", student_rows), *teacher_rows.items()]
    for role, rows in sides:
        if rows < tokens:
            sizes = ", ".join(f"{name} {size}" for name, size in sides)
            raise ValueError(
                f"The head of the {role} has {rows} rows, but the tokenizer has {tokens} tokens (rows of all heads: "
                f"{sizes}): pass a teacher with the student's tokenizer."
            )
    return tokens


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id of a token; ids need not be consecutive."""
    return max(tokenizer.get_vocab().values())


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def _named(tokens: Mapping[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "nothing"
