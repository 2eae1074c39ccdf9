"""Teachers with another tokenizer: what cannot be compared by bytes."""

from __future__ import annotations

from typing import Any

import tiny
from byte_languages import byte_pairs
from cases import Case, Lab, option, untouched
from tokenizers import normalizers

BYTES = {"cross_tokenizer": "bytes"}


def lowercasing() -> Any:
    words = byte_pairs(40)
    words.backend_tokenizer.normalizer = normalizers.Lowercase()
    return words


def _reassigned(lab: Lab) -> None:
    trainer = lab.make(teacher_processing_class=tiny.tokenizer(), **BYTES)
    trainer.teacher_model = tiny.qwen2(48, 2)


CASES: list[Case] = [
    option("tokenizers", "`cross_tokenizer='words'`: expected one of None, 'bytes'", cross_tokenizer="words"),
    *(
        option("tokenizers", "which compares tokens, or teachers that read the student's", **BYTES, **more)
        for more in (
            {"top_k_teacher": 5},
            {"kl_clip": 1.0},
            {"divergence": "sampled_reverse_kl"},
            {"token_selection": "student_entropy", "token_fraction": 0.5},
            {"contrast_weight": 0.5},
            {"extrapolation": 1.5},
            {"anchor_weight": 0.1},
            {"seq_kd": True, "lmbda": 0.5},
            {"teacher_model_kind": "base"},
            {"teacher_control": "constant"},
            {"teacher_control": "unprivileged"},
        )
    ),
    Case(
        "tokenizers",
        "another tokenizer without the option",
        "or set `cross_tokenizer='bytes'`, which compares bytes",
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
        "the tokenizer of the teacher is not known: pass it as `teacher_processing_class`",
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
    Case(
        "tokenizers",
        "another teacher by bytes",
        "the tokenizer of another teacher has to be proved first: build another trainer with it",
        _reassigned,
    ),
]
