"""How often the rows of a dataset are read and tokenized at construction, and that no bad one passes for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from support import tiny, vision_language

from trl_opsd import OPSDTrainer
from trl_opsd.data import images


class Counting(OPSDTrainer):
    """Counts the prompts that are tokenized."""

    tokenized = 0

    def tokenize(self, prompts: list[Any], **chat_template_kwargs: Any) -> list[list[int]]:
        self.tokenized += len(prompts)
        return super().tokenize(prompts, **chat_template_kwargs)


@pytest.fixture
def make(make_trainer):
    return lambda dataset, **given: make_trainer(Counting, train_dataset=dataset, **given)


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def chats(number: int, **special: Any) -> Dataset:
    """Short questions; `row_7=...` is another prompt for row 7."""
    prompts = [special.get(f"row_{number}", chat(f"What is {number}?")) for number in range(number)]
    return Dataset.from_dict({"prompt": prompts})


def tokens_of(prompt: Any) -> int:
    return len(tiny.tokenizer().apply_chat_template(prompt, add_generation_prompt=True)["input_ids"])


ROOM = 256 - 24
"""Tokens of a prompt that fits."""


@pytest.mark.quick
def test_one_row_per_shape_is_tokenized_if_others_fit(make):
    dataset = chats(5000, row_70=chat("a", system="b"), row_4000=chat("a", "b", "c"), row_4900=chat("x", "", "y"))
    assert make(dataset).tokenized == 4
    assert make(dataset.shuffle(seed=1)).tokenized == 4
    assert make(dataset, eval_dataset=dataset).tokenized == 8


@pytest.mark.quick
@pytest.mark.refusal
@pytest.mark.parametrize("order", [lambda rows: rows, lambda rows: rows.select(range(2999, -1, -1))])
def test_the_only_overlong_row_of_thousands_is_named(make, order):
    longest = chat("a" * (ROOM - tokens_of(chat(""))))
    assert tokens_of(longest) == ROOM
    assert make(order(chats(3000, row_2001=longest))).tokenized <= 3
    dataset = order(chats(3000, row_2001=chat(longest[0]["content"] + "a")))
    number = dataset["prompt"][:].index(chat(longest[0]["content"] + "a"))
    with pytest.raises(ValueError, match=rf"The prompt in row {number} of train_dataset has {ROOM + 1} tokens"):
        make(dataset)


@pytest.mark.parametrize("privileged", [False, True])
def test_exactly_the_overlong_rows_are_dropped(make, privileged):
    generator = np.random.default_rng(0)
    prompts = [chat("é" * int(size)) if size % 3 else chat("a", "b", "c" * int(size)) for size in range(20, 280)] * 2
    rows: dict[str, Any] = {"prompt": [prompts[place] for place in generator.permutation(len(prompts))]}
    fits = [tokens_of(prompt) <= ROOM for prompt in rows["prompt"]]
    if privileged:
        rows["privileged_context"] = ["z" * int(size) for size in generator.integers(1, 200, len(prompts))]
        for place, (prompt, context) in enumerate(zip(rows["prompt"], rows["privileged_context"], strict=True)):
            told = [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{context}"}]
            fits[place] &= tokens_of(told) <= ROOM
    trainer = make(Dataset.from_dict(rows), overlong_prompts="drop")
    assert trainer.train_dataset["prompt"][:] == [one for one, fit in zip(rows["prompt"], fits, strict=True) if fit]
    assert 0 < trainer.dropped_prompts["train_dataset"] == fits.count(False)


@pytest.mark.refusal
def test_errors_of_the_chat_template_name_the_row(make):
    words = tiny.tokenizer()
    words.chat_template += "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role!') }}{% endif %}"
    dataset = chats(2000, row_1500=chat("a", system="b"))
    with pytest.raises(ValueError, match=r"row 1500 of train_dataset: .* No system role"):
        make(dataset, processing_class=words)


def test_images_a_processor_fails_to_count_have_unknown_tokens():
    processor = vision_language.processor("llava")
    assert images.tokens_of(processor, [(32, 32), (80, 20)]) == 2 * 4
    processor.image_processor.crop_size = None  # as SigLIP's
    assert images.tokens_of(processor, [(32, 32), (80, 20)]) is None
