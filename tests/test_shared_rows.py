"""Students that can read rows by parts of their positions, and those that cannot."""

from __future__ import annotations

import pytest
import tiny
from transformers import Gemma2Config, MistralConfig

from trl_opsd.models.shared_rows import check_shareable

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("make", [tiny.qwen2, tiny.llama])
def test_students_with_full_attention_are_accepted(make):
    student = make()
    check_shareable(student, 2, "sdpa")
    check_shareable(student, 2, None)


SIZES = {name: getattr(tiny.qwen2().config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}


@pytest.mark.parametrize(
    ("make", "size", "said"),
    [
        (lambda: tiny.qwen2(attn_implementation="eager"), 2, "attention is 'eager', expected 'sdpa'"),
        (lambda: tiny.model(Gemma2Config(**SIZES)), 2, "layers of the kind 'sliding_attention'"),
        (lambda: tiny.model(MistralConfig(**SIZES, sliding_window=8)), 2, "layers of the kind 'sliding_attention'"),
        (tiny.qwen2, 3, "attention heads and .* which 3 processes cannot divide"),
    ],
)
def test_students_that_cannot_are_refused(make, size, said):
    with pytest.raises(ValueError, match=said):
        check_shareable(make(), size, "sdpa")
