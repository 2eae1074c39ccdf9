"""A student that learns from a teacher with another tokenizer: what it is asked, and that it learns."""

from __future__ import annotations

import random

import pytest
from two_tokenizers import train
from two_tokenizers.task import END, Language, prompts, tokenizer


def test_sentences_are_of_the_language_and_noise_is_not():
    language = Language()
    assert len(language.words) == 137
    texts = language.sentences(1, 200)
    assert texts == Language().sentences(1, 200) != language.sentences(2, 200)
    right, pairs = map(sum, zip(*map(language.right, texts), strict=True))
    assert right == pairs > 1000
    noisy = Language(0.7).sentences(1, 200)
    right, pairs = map(sum, zip(*map(language.right, noisy), strict=True))
    assert 0.25 < right / pairs < 0.4
    assert all(one.split(" ")[0] in language.words for one in prompts(language, 3, 50)["prompt"])


def test_tokenizers_cut_the_same_text_differently():
    text = Language().sentence(random.Random(3))
    both = [tokenizer(Language(noise).sentences(1, 300), size) for noise, size in ((0.0, 560), (0.7, 360))]
    ids = [one(text + END)["input_ids"] for one in both]
    assert [one.decode(row) for one, row in zip(both, ids, strict=True)] == [text + END] * 2
    assert len(ids[0]) < len(ids[1])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_teacher_is_learned_from_byte_by_byte(tmp_path):
    found = train.main(["--output", str(tmp_path)])
    assert found["divergence_after"] < 0.5 * found["divergence_before"]
    assert found["right_after"] > found["right_before"] + 0.3
    assert found["nats_per_byte_after"] < found["nats_per_byte_before"]
    assert found["used"] > 0.7
