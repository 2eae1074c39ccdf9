"""User mistakes, and the message that refuses each of them before anything expensive starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bad_arguments
import bad_bytes
import bad_engines
import bad_images
import bad_models
import bad_names
import bad_numbers
import bad_options
import bad_remedies
import bad_resuming
import bad_rows
import pytest
from cases import Case, Lab

from trl_opsd import OPSDTrainer

PHRASES = (
    "at least",  # all that the list does not name
    "teacher missing",
    "not causal",
    "same object as the student",
    "vocabulary mismatch",
    "tokenizer mismatch",
    "tokenizers",
    "head rows unlike the config",
    "weights missing",
    "not a dataset",
    "misspelt column",
    "remedies",
    "dataset None",
    "dataset empty",
    "dataset too small",
    "dataset without prompt",
    "dataset without the privileged column",
    "row ''",
    "row None",
    "row []",
    "row that ends with the assistant",
    "conversation without an answer",
    "tokens that the tokenizer adds",
    "row of a wrong type",
    "rows of mixed kinds",
    "message without role or content",
    "no chat template",
    "overlong",
    "images",
    "token ids beyond the embedding",
    "no tokenizer",
    "no eos and no pad",
    "beta",
    "temperature",
    "max_completion_length",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "pad_to_multiple_of",
    "chunk size",
    "generation kwargs: number of sequences",
    "generation kwargs: return type",
    "generation kwargs: overriding",
    "generation kwargs: end tokens",
    "generation kwargs: range",
    "generation kwargs: unknown",
    "cache_implementation",
    "vllm_mode",
    "divergence",
    "teacher_offload",
    "vLLM absent",
    "aiohttp absent",
    "vLLM of an unsupported version",
    "vLLM and a student without a checkpoint",
    "SGLang",
    "auto_find_batch_size",
    "torch_compile",
    "resume path missing",
    "resume path torn",
    "resume path with another fingerprint",
    "learning_rate",
    "weight_decay",
    "batch size",
    "generations",
    "steps",
    "seed",
    "a word for a boolean",
    "a word for a number",
    "unknown option",
    "unknown argument",
    "a class for an object",
    "wrong kind",
    "wrong order",
    "nothing would be learned",
    "optimizer of another model",
    "teacher given twice",
    "rollout given twice",
    "divergence assigned",
    "best model without evaluations",
)
"""The bad inputs that must be refused, in the order in which they were listed."""

FILES = (
    bad_arguments,
    bad_options,
    bad_numbers,
    bad_names,
    bad_rows,
    bad_images,
    bad_models,
    bad_engines,
    bad_remedies,
    bad_bytes,
    bad_resuming,
)

CASES: list[Case] = sorted(
    (case for file in FILES for case in file.CASES),
    key=lambda case: PHRASES.index(case.phrase),
)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Callable[..., OPSDTrainer]) -> Lab:
    return Lab(tmp_path, monkeypatch, make_trainer)


@pytest.mark.parametrize("case", [case.param() for case in CASES])
def test_bad_input_is_refused_with_an_explanation(lab, case):
    if case.needs_vllm:
        pytest.importorskip("vllm")
    with pytest.raises(case.error, match=case.message) as raised:
        case.provoke(lab)
    assert raised.type is case.error
    lab.check_that_nothing_was_learned()


@pytest.mark.parametrize("phrase", PHRASES)
def test_every_kind_of_bad_input_has_a_case(phrase):
    assert [case.name for case in CASES if case.phrase == phrase]
