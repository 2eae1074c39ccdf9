"""A language of invented words; only a few may follow each; and tokenizers that cut them differently."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
WORDS = 137
FOLLOWERS = 4
LONGEST = 14
"""Words of a sentence, at most."""


class Language:
    """Which word may follow which, and how often; a share `noise` of its sentences' words are any."""

    def __init__(self, noise: float = 0.0) -> None:
        draw, self.noise = random.Random(0), noise
        parts = [f"{one}{other}" for one in "bdfgklmnprst" for other in "aeiou"]
        words = dict.fromkeys("".join(draw.choices(parts, k=draw.choice([1, 2, 2, 3]))) for _ in range(4 * WORDS))
        self.words = list(words)[:WORDS]
        self.after = {
            word: (draw.sample(self.words, FOLLOWERS), [draw.random() + 0.1 for _ in range(FOLLOWERS)])
            for word in self.words
        }

    def sentence(self, draw: random.Random) -> str:
        """One sentence."""
        found = [draw.choice(self.words)]
        while len(found) < LONGEST and draw.random() > 0.08:
            words, weights = (self.words, None) if draw.random() < self.noise else self.after[found[-1]]
            found.append(draw.choices(words, weights)[0])
        return " ".join(found) + "."

    def sentences(self, seed: int, count: int) -> list[str]:
        """As many, always the same of a seed."""
        draw = random.Random(seed)
        return [self.sentence(draw) for _ in range(count)]

    def right(self, text: str) -> tuple[int, int]:
        """How many transitions of a text are of the language, and how many it has."""
        words = text.split(".")[0].split(" ")
        pairs = list(pairwise(words))
        return sum(other in self.after.get(one, ((), ()))[0] for one, other in pairs), len(pairs)


def tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the merges that are frequent in these texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)


def prompts(language: Language, seed: int, count: int) -> Dataset:
    """The first word of a sentence each."""
    return Dataset.from_dict({"prompt": [one.split(" ")[0].rstrip(".") for one in language.sentences(seed, count)]})


def batches(words: PreTrainedTokenizerFast, language: Language, seed: int, rows: int) -> Iterator[Mapping[str, object]]:
    """Endless batches of sentences for supervised training, with an end each."""
    draw = random.Random(seed)
    while True:
        texts = [language.sentence(draw) + END for _ in range(rows)]
        batch = words(texts, padding=True, return_tensors="pt")
        yield {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
