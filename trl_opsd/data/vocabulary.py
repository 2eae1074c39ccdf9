"""Finds out which token ids student and teacher share; it knows tokenizers and sizes of heads, and no probabilities."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

_SHOWN = 3
"""Differing ids that a message lists."""


def check_token_maps(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, role: str = "teacher") -> None:
    """Checks that two tokenizers give every token the same id.

    Args:
        student ([`~transformers.PreTrainedTokenizerBase`]):
            The student's.
        teacher ([`~transformers.PreTrainedTokenizerBase`]):
            The teacher's.
        role (`str`, *optional*, defaults to `"teacher"`):
            Name of the teacher, for the message.

    Raises:
        ValueError: They do not; the message lists the first differing ids.
    """
    mine, yours = _tokens(student), _tokens(teacher)
    differing = sorted(number for number in mine.keys() | yours.keys() if mine.get(number) != yours.get(number))
    if not differing:
        return
    listed = "; ".join(
        f"id {number} is {_named(yours, number)} for the {role} and {_named(mine, number)} for the student"
        for number in differing[:_SHOWN]
    )
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise ValueError(
        f"The tokenizers of student and {role} differ: {listed}{more}. The loss compares the two distributions id by "
        "id, so pass a teacher with the student's tokenizer."
    )


def shared_vocabulary(
    student_rows: int, teacher_rows: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """How many token ids all models know, where their heads differ in size.

    One tokenizer's models are padded to different multiples (Qwen2.5: 151936 or 152064 rows for 151665 tokens). The ids
    behind the tokenizer's last one stand for nothing, and may lack a row in the other model's embedding.

    Args:
        student_rows (`int`):
            Rows of the student's head.
        teacher_rows (`Mapping[str, int]`):
            Rows of each teacher's head, by how a message calls that teacher.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The one they share.

    Returns:
        `int`, *optional*: ids from here on are to be masked on both sides and never sampled; `None` when all heads are
        of one size, which leaves everything as it is.

    Raises:
        ValueError: The tokenizer has more tokens than one of the heads has rows.
    """
    if all(rows == student_rows for rows in teacher_rows.values()):
        return None
    tokens = max(_tokens(tokenizer)) + 1
    sides = [("student", student_rows), *teacher_rows.items()]
    for role, rows in sides:
        if rows < tokens:
            sizes = ", ".join(f"{name} {size}" for name, size in sides)
            raise ValueError(
                f"The head of the {role} has {rows} rows, but the tokenizer has {tokens} tokens (rows of all heads: "
                f"{sizes}): pass a teacher with the student's tokenizer."
            )
    return tokens


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def _named(tokens: Mapping[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "nothing"
