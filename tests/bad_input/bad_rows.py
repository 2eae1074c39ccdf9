"""Datasets that are missing, too small or lack a column, and rows that are no valid prompt."""

from __future__ import annotations

from typing import Any

import tiny
from cases import Case, Lab, untouched
from datasets import Dataset, IterableDataset
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from trl_opsd.data.prompts import Prompt, common_kind

GOOD = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "text": "x"}]}]


def prompts(*values: Any) -> Dataset:
    return Dataset.from_list([{"prompt": value} for value in values])


def mixed() -> Dataset:
    """Rows of two kinds, which no Arrow column can hold: a transform makes them."""
    return prompts("a", "b").with_transform(lambda rows: {"prompt": ["a", GOOD][: len(rows["prompt"])]})


def without_template() -> PreTrainedTokenizerFast:
    words = tiny.tokenizer()
    words.chat_template = None
    return words


def stripping() -> PreTrainedTokenizerFast:
    """A tokenizer that drops surrounding spaces."""
    words = tiny.tokenizer()
    words.backend_tokenizer.normalizer = normalizers.Strip()
    return words


def trained_on(
    phrase: str,
    name: str,
    message: str,
    dataset: Any,
    error: type[Exception] = ValueError,
    before_loading: bool = False,
    **given: Any,
) -> Case:
    """Refused at construction: before loading, unless the check needs the tokenizer or the student's context."""
    return Case(
        phrase,
        name,
        message,
        lambda lab: lab.make(train_dataset=dataset, **given),
        error,
        before_loading=before_loading,
    )


def streamed(phrase: str, message: str, row: dict[str, Any], error: type[Exception] = ValueError) -> Case:
    """Refused in training: a stream cannot be read ahead, so its rows are checked before they are completed."""

    def provoke(lab: Lab) -> None:
        lab.make(train_dataset=IterableDataset.from_generator(lambda: iter([row] * 8))).train()

    return Case(phrase, "in a stream", message, provoke, error)


DATASETS = [
    trained_on("dataset None", "none", "`train_dataset` is None", None, before_loading=True),
    trained_on(
        "dataset empty",
        "no rows",
        "has 0 rows, but one generation batch takes 2",
        Dataset.from_dict({"prompt": []}),
        before_loading=True,
    ),
    Case(
        "dataset empty",
        "no rows to evaluate on",
        "`eval_dataset` has no rows",
        lambda lab: lab.make(eval_dataset=Dataset.from_dict({"prompt": []})),
        before_loading=True,
    ),
    trained_on(
        "dataset too small",
        "one row",
        r"1 rows, but one generation batch takes 2 = 2 per device x 1 processes x 1 accumulation",
        prompts("a"),
        before_loading=True,
    ),
    untouched(
        "dataset too small",
        "one row, for a student that is a model",
        "1 rows, but one generation batch takes 2",
        train_dataset=prompts("a"),
    ),
    untouched(
        "at least",
        "a stream without `max_steps`",
        "`train_dataset` is a stream, whose length is not known: set `max_steps`",
        train_dataset=prompts("a", "b").to_iterable_dataset(),
        max_steps=-1,
    ),
    Case(
        "dataset too small",
        "a stream that ends before a batch is full",
        "ended before it filled one generation batch of 2 = 2 per device x 1 processes x 1 accumulation",
        lambda lab: lab.make(train_dataset=prompts("a").to_iterable_dataset()).train(),
    ),
    trained_on(
        "dataset without prompt",
        "another column",
        r"no column 'prompt', only \['question'\]",
        Dataset.from_dict({"question": ["a", "b"]}),
        before_loading=True,
    ),
    streamed("dataset without prompt", "row 0 of train_dataset has no column 'prompt'", {"question": "a"}),
    Case(
        "dataset without the privileged column",
        "a student that teaches itself",
        r"no context for the teacher .* only \['prompt'\]. Add a column 'priv",
        lambda lab: lab.make(teacher_model=None, teacher_model_kind="base"),
        before_loading=True,
    ),
    trained_on(
        "at least",
        "a list for a dataset",
        "`train_dataset` is a list: expected a `datasets.Dataset`",
        [{"prompt": "a"}],
        TypeError,
        before_loading=True,
    ),
    trained_on(
        "at least",
        "a column of images",
        "train_dataset has a column 'image' with images in it",
        Dataset.from_dict({"prompt": ["a", "b"], "image": [None, "b.png"]}),
        before_loading=True,
    ),
]

ROWS = [
    trained_on(
        "row ''", "no text", "The prompt in row 1 of train_dataset is empty", prompts("a", ""), before_loading=True
    ),
    trained_on(
        "row ''",
        "no tokens",
        "row 1 of train_dataset has no tokens after tokenization",
        prompts("a", "   "),
        processing_class=stripping(),
    ),
    trained_on(
        "row None",
        "none",
        "The prompt in row 1 of train_dataset is None",
        prompts("a", None),
        TypeError,
        before_loading=True,
    ),
    trained_on(
        "row None",
        "the last of many",
        "row 2499 of train_dataset is None",
        prompts(*["a"] * 2499, None),
        TypeError,
        before_loading=True,
    ),
    streamed("row None", "row 0 of train_dataset is None", {"prompt": None}, TypeError),
    Case(
        "row None",
        "to evaluate on",
        r"row 1 of eval_dataset\['hard'\] is None",
        lambda lab: lab.make(eval_dataset={"easy": tiny.rows(), "hard": prompts("a", None)}),
        TypeError,
        before_loading=True,
    ),
    trained_on(
        "row []",
        "no messages",
        "row 1 of train_dataset is a list without messages",
        prompts(GOOD, []),
        before_loading=True,
    ),
    trained_on(
        "row of a wrong type",
        "numbers",
        "The prompt in row 0 of train_dataset is of type int: expected a string",
        prompts(1, 2),
        TypeError,
        before_loading=True,
    ),
    trained_on(
        "row of a wrong type",
        "texts for messages",
        "row 0 of train_dataset: message 0 is of type str: expected",
        prompts(["hi"], ["ho"]),
        before_loading=True,
    ),
    trained_on(
        "row of a wrong type",
        "a number for content",
        "row 0 of train_dataset: message 0 has of type int as its content: expected text",
        prompts(*[[{"role": "user", "content": 5}]] * 2),
        before_loading=True,
    ),
    trained_on(
        "row of a wrong type", "images", "only text is supported so far", prompts(IMAGE, IMAGE), before_loading=True
    ),
    trained_on(
        "rows of mixed kinds",
        "at construction",
        "row 1 of train_dataset is messages, those before it are text",
        mixed(),
    ),
    Case(
        "rows of mixed kinds",
        "one after the other",
        "The second is messages, those before it are text",
        lambda lab: common_kind([Prompt.of("a", "The first"), Prompt.of(GOOD, "The second")]),
        before_loading=True,
    ),
    trained_on(
        "message without role or content",
        "no role",
        "prompt in row 0 of train_dataset: message 0",
        prompts([{"content": "a"}], GOOD),
        before_loading=True,
    ),
    trained_on(
        "message without role or content",
        "no content",
        "expected a dict with 'role' and 'content'",
        prompts([{"role": "user"}], [{"role": "user"}]),
        before_loading=True,
    ),
    trained_on(
        "no chat template",
        "messages",
        "the tokenizer has no chat template",
        prompts(GOOD, GOOD),
        processing_class=without_template(),
    ),
    trained_on(
        "overlong",
        "a prompt",
        "row 1 of train_dataset has 500 tokens; with a completion of 24",
        prompts("a", "long " * 100),
    ),
    streamed("overlong", "row 0 of this batch has 500 tokens", {"prompt": "long " * 100}),
    Case(
        "overlong",
        "a completion",
        "`max_completion_length=256` leaves no room for a prompt",
        lambda lab: lab.make(max_completion_length=256),
    ),
]

CASES: list[Case] = [*DATASETS, *ROWS]
