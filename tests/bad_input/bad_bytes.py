"""Teachers with another tokenizer: what cannot be compared by bytes."""

from __future__ import annotations

from typing import Any

from cases import Case, method, option, untouched
from support import tiny
from support.byte_languages import byte_pairs
from tokenizers import normalizers

BYTES = {"cross_tokenizer": "bytes"}


def lowercasing() -> Any:
    words = byte_pairs(40)
    words.backend_tokenizer.normalizer = normalizers.Lowercase()
    return words


CASES: list[Case] = [
    option("tokenizers", "`cross_tokenizer='words'`: expected 'bytes'", cross_tokenizer="words"),
    *(
        method("tokenizers", "`cross_tokenizer='bytes'` with .*: .* other tokens than the student", **BYTES, **more)
        for more in (
            {"top_k_teacher": 5},
            {"kl_clip": 1.0},
            {"divergence": "sampled_reverse_kl"},
            {"teacher_server_url": "http://127.0.0.1:8000", "teacher_model": "teacher"},
            {"teacher_model_kind": "base", "teacher_model": None},
            {"token_selection": "student_entropy", "token_fraction": 0.5},
        )
    ),
    Case(
        "tokenizers",
        "another tokenizer without the option",
        "or compare texts, unless a server has it",
        lambda lab: lab.make(teacher_processing_class=byte_pairs(40)),
        before_loading=True,
    ),
    Case(
        "tokenizers",
        "a tokenizer that changes what it reads",
        "the tokens of the tokenizer of the teacher do not spell what they read: \"Hello, world! It's 3.14 o'clock.\" "
        'becomes "hello, world',
        lambda lab: lab.make(teacher_processing_class=lowercasing(), **BYTES),
        before_loading=True,
    ),
    Case(
        "tokenizers",
        "a tokenizer that is not known",
        "The tokenizer of the teacher is not known: pass it as `teacher_processing_class`",
        lambda lab: lab.make(**BYTES),
        before_loading=True,
    ),
    untouched(
        "tokenizers",
        "tools by bytes",
        "`cross_tokenizer='bytes'` with `tools`",
        tools=[tiny.add],
        teacher_processing_class=byte_pairs(40),
        **BYTES,
    ),
]
