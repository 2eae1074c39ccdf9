"""The losses that bytes are compared with are TRL's and KDFlow's, and are not 0 between equal models."""

from __future__ import annotations

import importlib
import random
import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.byte_languages import Language, byte_pairs

from trl_opsd.bytes.vocabulary import ByteVocabulary

LEAST = {
    "Gold": 0.1,
    "GoldShifted": 0.03,
    "GoldHybrid": 0.05,
    "GoldHybridShifted": 0.05,
    "GoldBayesian": 0.03,
    "Overlap": 0.05,
}
"""Of one language in two tokenizers, where bytes are below 1e-4 (`tests/losses/test_bytewise.py`)."""


def test_other_losses_differ_between_models_of_one_language(monkeypatch):
    folder = Path(__file__).resolve().parents[2]
    for path in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(folder / path))
    benchmark = importlib.import_module("cross_tokenizer")
    language = Language.of_sentences()
    both = [ByteVocabulary.of(byte_pairs(200), "one"), ByteVocabulary.of(byte_pairs(120, start=9000), "other")]
    student, teacher = both
    trainer = SimpleNamespace(
        processing_class=student.tokenizer,
        readers=SimpleNamespace(tokenizers={"teacher": teacher.tokenizer}),
        teacher=SimpleNamespace(its=teacher, _student=student),
    )
    found: dict[str, list[float]] = {name: [] for name in LEAST}
    for text in random.Random(1).choices(list(language.texts), list(language.texts.values()), k=10):
        sides = [_side(language, text, vocabulary) for vocabulary in both]
        for name, losses in found.items():
            loss: Any = getattr(benchmark, name)
            trainer.settings, trainer.shifts = getattr(loss, "settings", {}), getattr(loss, "shifts", False)
            losses.append(float(loss.loss(trainer, *sides)))
    for name, least in LEAST.items():
        assert statistics.mean(found[name]) > least, found
    equal = _side(language, text, student)
    trainer.teacher, trainer.settings = SimpleNamespace(its=student, _student=student), {}
    assert float(benchmark.Overlap.loss(trainer, equal, equal)) == pytest.approx(0, abs=1e-6)


def _side(language: Language, text: str, vocabulary: ByteVocabulary) -> tuple[Any, ...]:
    """Logits [1, L, V], labels and ids [1, L], and the bytes of each token, after a prompt of one token."""
    ids, logits = language.logits(text, vocabulary)
    ids_BL = torch.tensor([[0, *ids]])
    labels_BL = ids_BL.clone()
    labels_BL[0, 0] = -100
    ends = torch.tensor([0, *(len(vocabulary.texts[one] or b"") for one in ids)]).cumsum(0).tolist()
    return torch.cat([logits, logits[-1:]])[None], labels_BL, ids_BL, [[[0, 0], *map(list, pairwise(ends))]]
