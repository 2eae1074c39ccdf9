"""Teachers with another tokenizer: what cannot be compared by bytes."""

from __future__ import annotations

from typing import Any

from cases import Case, Lab, option, untouched
from support import tiny
from support.byte_languages import byte_pairs
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
        option("tokenizers", f" with `cross_tokenizer='bytes'`, .*{why}.*: remove one of them", **BYTES, **more)
        for why, more in {
            "257 outcomes": {"top_k_teacher": 5},
            "entries of a vocabulary": {"kl_clip": 1.0},
            "the teacher's probability of each token of the student": {"divergence": "sampled_reverse_kl"},
            "ranks tokens": {"token_selection": "student_entropy", "token_fraction": 0.5},
            "a contrast is a third": {"contrast_weight": 0.5},
            "and the initial one is a third": {"extrapolation": 1.5},
            "only two models are compared": {"anchor_weight": 0.1},
            "without the head and the vocabulary": {"teacher_server_url": "http://127.0.0.1:8000"},
            "teaches itself": {"teacher_model_kind": "base"},
            "by the student's probability": {"teacher_control": "constant"},
            "the token ids of the student": {"teacher_control": "unprivileged"},
        }.items()
    ),
    Case(
        "tokenizers",
        "another tokenizer without the option",
        "or, unless a server has it, set `cross_tokenizer='bytes'`",
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
