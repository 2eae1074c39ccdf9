"""Datasets that are missing, too small or lack a column, and rows that are no valid prompt."""

from __future__ import annotations

from typing import Any

from cases import Case, Lab, untouched
from datasets import Dataset, DatasetDict, IterableDataset
from support import tiny
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from trl_opsd.data.prompts import Prompt, common_kind

ANSWER = {"role": "assistant", "content": "ho"}
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


def adding(**options: bool) -> PreTrainedTokenizerFast:
    """A tokenizer that adds special tokens to text, as Llama's does."""
    words = tiny.tokenizer()
    words.bos_token = "<|endoftext|>"
    for name, value in options.items():
        setattr(words, name, value)
    return words


def streamed(phrase: str, message: str, row: dict[str, Any], error: type[Exception] = ValueError, **given: Any) -> Case:
    """Refused in training: a stream cannot be read ahead, so its rows are checked before they are completed."""

    def provoke(lab: Lab) -> None:
        lab.make(train_dataset=IterableDataset.from_generator(lambda: iter([row] * 8)), **given).train()

    return Case(phrase, "in a stream", message, provoke, error)


DATASETS = [
    trained_on("dataset None", "none", "`train_dataset` is None", None, before_loading=True),
    trained_on(
        "dataset empty",
        "no rows",
        "`train_dataset` is empty",
        Dataset.from_dict({"prompt": []}),
        before_loading=True,
    ),
    Case(
        "dataset empty",
        "no rows to evaluate on",
        "`eval_dataset` is empty",
        lambda lab: lab.make(eval_dataset=Dataset.from_dict({"prompt": []})),
        before_loading=True,
    ),
    trained_on(
        "dataset too small",
        "one row",
        r"1 rows, but one generation batch needs 2 = 2 per device x 1 processes x 1 accumulation",
        prompts("a"),
        before_loading=True,
    ),
    untouched(
        "dataset too small",
        "one row, for a student that is a model",
        "1 rows, but one generation batch needs 2",
        train_dataset=prompts("a"),
    ),
    untouched(
        "at least",
        "a stream without `max_steps`",
        "`train_dataset` is a stream",
        train_dataset=prompts("a", "b").to_iterable_dataset(),
        max_steps=-1,
    ),
    Case(
        "dataset too small",
        "a stream that ends before a batch is full",
        "ended before filling one generation batch",
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
        "at least",
        "a reward function by another name",
        "`Rewards`: 'accuracy' was not found .*: expected `module.function`",
        lambda lab: lab.make(reward_funcs="accuracy"),
        before_loading=True,
    ),
    Case(
        "dataset without the privileged column",
        "a student that teaches itself",
        r"only \['prompt'\]: add a column 'priv",
        lambda lab: lab.make(teacher_model=None, teacher_model_kind="base"),
        before_loading=True,
    ),
    *(
        trained_on("not a dataset", type(given).__name__ + str(number), message, given, TypeError, before_loading=True)
        for number, (given, message) in enumerate(
            [
                ([{"prompt": "a"}], "is a list: expected a `datasets.Dataset`"),
                ("trl-lib/tldr", r"is a str: expected .* `load_dataset\(...\)\['train'\]`"),
                (DatasetDict({"test": tiny.rows(), "train": tiny.rows()}), "is a DatasetDict: expected"),
            ]
        )
    ),
    Case(
        "not a dataset",
        "a list to evaluate on, by name",
        r"`eval_dataset\['easy'\]` is a list: expected",
        lambda lab: lab.make(eval_dataset={"easy": [{"prompt": "a"}]}),
        TypeError,
        before_loading=True,
    ),
    *(
        trained_on(
            "misspelt column",
            name,
            rf"train_dataset has an unknown column '{name}'; did you mean '{meant}'\?",
            tiny.rows().add_column(name, ["x"] * 8),
            before_loading=True,
        )
        for name, meant in [
            ("privileged_contex", "privileged_context"),
            ("teacher_promt", "teacher_prompt"),
            ("Teacher_prompt", "teacher_prompt"),
        ]
    ),
    trained_on(
        "at least",
        "a column of images",
        "The prompt in row 1 of train_dataset is text, but the row has images, which belong to a message: give",
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
        "row that ends with the assistant",
        "an answer",
        r"The prompt in row 2 of train_dataset ends with a message of the assistant.* `prompt = messages\[:-1\]`",
        prompts(GOOD, GOOD, [*GOOD, ANSWER]),
        before_loading=True,
    ),
    *(
        trained_on(
            "conversation without an answer",
            name,
            message,
            Dataset.from_list([{"messages": [*GOOD, ANSWER]}, {"messages": conversation}]),
            before_loading=True,
        )
        for name, message, conversation in [
            (
                "the user's",
                "The conversation in row 1 of train_dataset ends with a message of the user.*remove what follows",
                GOOD,
            ),
            ("nothing before it", "The prompt in row 1 of train_dataset is a list without messages", [ANSWER]),
            ("two answers", r"row 1 of train_dataset ends with .* the assistant.*\[:-1\]", [*GOOD, ANSWER, ANSWER]),
            ("empty", "The conversation in row 1 of train_dataset is a list without messages", []),
        ]
    ),
    trained_on(
        "row that ends with the assistant",
        "for the teacher",
        "The teacher_prompt in row 1 of train_dataset ends with a message of the assistant",
        prompts(GOOD, GOOD).add_column("teacher_prompt", [GOOD, [*GOOD, ANSWER]]),
        before_loading=True,
    ),
    streamed("row that ends with the assistant", "row 0 of train_dataset ends with", {"prompt": [*GOOD, ANSWER]}),
    Case(
        "row that ends with the assistant",
        "from `teacher_prompt_fn`",
        r"What `teacher_prompt_fn` returned for row \d of the batch of step 1 ends with a message of the assistant",
        lambda lab: lab.make(
            train_dataset=prompts(GOOD, GOOD),
            rollout=None,
            teacher_prompt_fn=lambda row, completion: [*row["prompt"], ANSWER],
        ).train(),
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
        "row 0 of train_dataset: message 0: its content is of type int: expected text",
        prompts(*[[{"role": "user", "content": 5}]] * 2),
        before_loading=True,
    ),
    trained_on(
        "row of a wrong type",
        "images",
        r"row 0 of train_dataset has 0 images for 1 places: expected one part \{'type': 'image'\}",
        prompts(IMAGE, IMAGE),
        before_loading=True,
    ),
    trained_on(
        "rows of mixed kinds",
        "at construction",
        "row 1 of train_dataset is messages, but earlier ones are text",
        mixed(),
    ),
    Case(
        "rows of mixed kinds",
        "one after the other",
        "The second is messages, but earlier ones are text",
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
        "The prompt in row 0 of train_dataset: the tokenizer's chat template rejects it: .*chat_template is not set",
        prompts(GOOD, GOOD),
        processing_class=without_template(),
    ),
    trained_on(
        "tokens that the tokenizer adds",
        "an end after text",
        r"in row 0 of train_dataset is text, to which the tokenizer appends '<\|im_end\|>'.* `add_eos_token=False`",
        prompts("a", "b"),
        processing_class=adding(add_eos_token=True),
    ),
    streamed(
        "tokens that the tokenizer adds",
        "row 0 of the batch of step 1 is text, to which the tokenizer appends",
        {"prompt": "a"},
        processing_class=adding(add_eos_token=True),
    ),
    trained_on(
        "tokens that the tokenizer adds",
        "a second start before text",
        r"in row 0 of train_dataset has two start tokens '<\|endoftext\|>'",
        prompts("<|endoftext|>a", "b"),
        processing_class=adding(add_bos_token=True),
    ),
    streamed(
        "tokens that the tokenizer adds",
        "The prompt in row 0 of train_dataset has two start tokens",
        {"prompt": "<|endoftext|>a"},
        processing_class=adding(add_bos_token=True),
    ),
    trained_on(
        "overlong",
        "a prompt",
        "row 1 of train_dataset has 500 tokens; with a completion of 24",
        prompts("a", "long " * 100),
    ),
    streamed("overlong", "row 0 of the batch of step 1 has 500 tokens", {"prompt": "long " * 100}),
    Case(
        "overlong",
        "a completion",
        "`max_completion_length=256` leaves no room for a prompt",
        lambda lab: lab.make(max_completion_length=256),
    ),
]


CASES: list[Case] = [*DATASETS, *ROWS]
