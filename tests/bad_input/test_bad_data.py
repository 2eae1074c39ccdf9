"""Datasets that are missing, too small or lack a column, and rows that are no valid prompt: an error names the row."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from support import tiny, vision_language
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd.data.prompts import Prompt, common_kind
from trl_opsd.types import TeacherTargets

pytestmark = pytest.mark.refusal
GOOD = [{"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "ho"}


def prompts(*values: Any) -> Dataset:
    return Dataset.from_list([{"prompt": value} for value in values])


def answered(*conversations: Any) -> Dataset:
    return Dataset.from_list([{"messages": one} for one in ([*GOOD, ANSWER], *conversations)])


def stream(row: dict[str, Any], number: int = 8) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter([row] * number))


def with_column(name: str, values: list[Any]) -> Dataset:
    return prompts(*["a"] * len(values)).add_column(name, values)


DATASETS: list[tuple[str, Any]] = [
    ("train_dataset", None),
    ("train_dataset. is empty", Dataset.from_dict({"prompt": []})),
    ("1 rows, but one generation batch needs 2", prompts("a")),
    ("question", Dataset.from_dict({"question": ["a", "b"]})),
    ("privileged_contex'.*'privileged_context'", with_column("privileged_contex", ["x"] * 8)),
    ("Teacher_prompt'.*'teacher_prompt'", with_column("Teacher_prompt", ["x"] * 8)),
    ("row 1 of train_dataset is text, but the row has images", with_column("image", [None, "b.png"])),
    # rows
    ("row 1 of train_dataset is empty", prompts("a", "")),
    ("row 1 of train_dataset is a list without messages", prompts(GOOD, [])),
    ("row 2 of train_dataset ends with a message of the assistant", prompts(GOOD, GOOD, [*GOOD, ANSWER])),
    ("row 1 of train_dataset ends with a message of the user", answered(GOOD)),
    ("row 1 of train_dataset is a list without messages", answered([ANSWER])),
    ("row 1 of train_dataset is a list without messages", answered([])),
    ("row 1 of train_dataset ends with a message of the assistant", answered([*GOOD, ANSWER, ANSWER])),
    (
        "teacher_prompt in row 1 of train_dataset ends with",
        prompts(GOOD, GOOD).add_column("teacher_prompt", [GOOD, [*GOOD, ANSWER]]),
    ),
    ("row 0 of train_dataset: message 0 is of type str", prompts(["hi"], ["ho"])),
    ("row 0 of train_dataset: message 0: its content is of type int", prompts(*[[{"role": "user", "content": 5}]] * 2)),
    ("row 0 of train_dataset: message 0", prompts([{"content": "a"}], GOOD)),
    ("'role' and 'content'", prompts(*[[{"role": "user"}]] * 2)),
]
OF_WRONG_TYPE: list[tuple[str, Any]] = [
    ("list", [{"prompt": "a"}]),
    ("load_dataset", "trl-lib/tldr"),
    ("DatasetDict", DatasetDict({"test": tiny.rows(), "train": tiny.rows()})),
    ("row 1 of train_dataset is None", prompts("a", None)),
    ("row 2499 of train_dataset is None", prompts(*["a"] * 2499, None)),
    ("row 0 of train_dataset is of type int", prompts(1, 2)),
]


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize(("named", "dataset"), DATASETS, ids=[one for one, _ in DATASETS])
def test_a_dataset_is_refused_before_loading(refuses, named, dataset):
    refuses(named, {"train_dataset": dataset})


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize(("named", "dataset"), OF_WRONG_TYPE, ids=[one for one, _ in OF_WRONG_TYPE])
def test_what_is_no_dataset_or_prompt_is_a_type_error(refuses, named, dataset):
    refuses(named, {"train_dataset": dataset}, TypeError)


@pytest.mark.quick
@pytest.mark.before_loading
def test_datasets_of_evaluations_are_read_too(refuses):
    refuses("eval_dataset. is empty", {"eval_dataset": Dataset.from_dict({"prompt": []})})
    refuses(r"eval_dataset\['easy'\]", {"eval_dataset": {"easy": [{"prompt": "a"}]}}, TypeError)
    hard = {"easy": tiny.rows(), "hard": prompts("a", None)}
    refuses(r"row 1 of eval_dataset\['hard'\] is None", {"eval_dataset": hard}, TypeError)


@pytest.mark.quick
@pytest.mark.before_loading
def test_a_stream_needs_its_number_of_steps(refuses):
    refuses("max_steps", {"train_dataset": prompts("a", "b").to_iterable_dataset(), "max_steps": -1})


@pytest.mark.quick
@pytest.mark.before_loading
def test_a_student_that_teaches_itself_needs_context(refuses):
    refuses("privileged_context", {"teacher_model": None, "teacher_model_kind": "base"})


# ---- Once tokenizer or context are known, or a row is there ----------------------------------------------------------


def words(**options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with these attributes; as Llama's it may add special tokens to text."""
    made = tiny.tokenizer()
    made.bos_token = "<|endoftext|>"
    for name, value in options.items():
        setattr(made, name, value)
    return made


def stripping() -> PreTrainedTokenizerFast:
    made = tiny.tokenizer()
    made.backend_tokenizer.normalizer = normalizers.Strip()
    return made


def mixed() -> Dataset:
    """Rows of two kinds, which no Arrow column can hold: a transform makes them."""
    return prompts("a", "b").with_transform(lambda rows: {"prompt": ["a", GOOD][: len(rows["prompt"])]})


LONG = "long " * 100
LATE: list[tuple[str, dict[str, Any]]] = [
    ("row 1 of train_dataset is messages", {"train_dataset": mixed()}),
    (
        "row 1 of train_dataset has no tokens",
        {"train_dataset": prompts("a", "   "), "processing_class": stripping()},
    ),
    (
        "row 0 of train_dataset: .*chat_template",
        {"train_dataset": prompts(GOOD, GOOD), "processing_class": words(chat_template=None)},
    ),
    (
        "row 0 of train_dataset is text, to which the tokenizer appends",
        {"train_dataset": prompts("a", "b"), "processing_class": words(add_eos_token=True)},
    ),
    (
        "row 0 of the batch of step 1 is text, to which the tokenizer appends",
        {"train_dataset": stream({"prompt": "a"}), "processing_class": words(add_eos_token=True)},
    ),
    (
        "row 0 of train_dataset has two start tokens",
        {"train_dataset": prompts("<|endoftext|>a", "b"), "processing_class": words(add_bos_token=True)},
    ),
    ("row 1 of train_dataset has 500 tokens", {"train_dataset": prompts("a", LONG)}),
    ("row 0 of the batch of step 1 has 500 tokens", {"train_dataset": stream({"prompt": LONG})}),
    ("max_completion_length", {"max_completion_length": 256}),
    ("ended before filling", {"train_dataset": stream({"prompt": "a"}, 1)}),
    ("row 0 of train_dataset has no column 'prompt'", {"train_dataset": stream({"question": "a"})}),
    ("row 0 of train_dataset ends with", {"train_dataset": stream({"prompt": [*GOOD, ANSWER]})}),
    (
        "`teacher_prompt_fn` returned for row . of the batch of step 1",
        {
            "train_dataset": prompts(GOOD, GOOD),
            "rollout": None,
            "teacher_prompt_fn": lambda row, completion: [*row["prompt"], ANSWER],
        },
    ),
]


@pytest.mark.parametrize(("named", "given"), LATE, ids=[one for one, _ in LATE])
def test_a_row_is_refused_before_it_is_learned(refuses, named, given):
    refuses(named, given)


def test_kinds_of_prompts_are_not_mixed(refuses):
    with pytest.raises(ValueError, match="The second"):
        common_kind([Prompt.of("a", "The first"), Prompt.of(GOOD, "The second")])
    refuses("row 0 of train_dataset is None", {"train_dataset": stream({"prompt": None})}, TypeError)


# ---- Contrasts -------------------------------------------------------------------------------------------------------


class OwnTargets(OPSDTrainer):
    def teach(self, rollout: Any, rows: Any) -> TeacherTargets:
        return TeacherTargets(hidden=super().teach(rollout, rows).hidden)


@pytest.mark.parametrize(
    ("named", "columns"),
    [
        ("row 0 .*contrast_prompt", {}),
        ("row 0 .*contrast_prompt", {"contrast_prompt": ["a"] * 4, "contrast_context": ["a"] * 4}),
        ("row 3 .*teacher's own prompt", {"contrast_context": ["wrong", "wrong", "wrong", "hint"]}),
        ("row 1 of train_dataset is empty", {"contrast_context": ["wrong", "", "wrong", "wrong"]}),
        ("row 2 of train_dataset has", {"contrast_context": ["wrong", "wrong", "wrong" * 99, "wrong"]}),
        ("OwnTargets.*contrast", {"contrast_context": ["wrong"] * 4}),
    ],
)
def test_a_contrast_is_another_prompt_of_each_row(refuses, named, columns):
    rows = Dataset.from_dict({"prompt": ["a"] * 4, "privileged_context": ["hint"] * 4, **columns})
    refuses(named, {"cls": OwnTargets, "train_dataset": rows, "contrast_weight": 0.5})


# ---- Images ----------------------------------------------------------------------------------------------------------


class Blind(FixedRollout):
    """A rollout of the user's own that reads token ids only."""

    reads_images = False


def parts(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": one} if isinstance(one, str) else one for one in content]}]


SENDS = {"type": "image", "image": "a.png"}
ONE = {"prompt": GOOD, "image": "a.png"}
WORDS = {"type": "text", "text": "hi"}

SHOWN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("row 1 of train_dataset.*processing_class", ONE, {"processing_class": tiny.tokenizer()}),
    ("teacher's prompt in row 1", ONE, {"blind": "teacher_model"}),
    ("teacher's prompt in row 1", ONE, {"teacher_server_url": "http://127.0.0.1:1"}),
    *(
        (rf"row 1 .*\['{kind}'\]", {"prompt": parts({"type": kind, kind: "a"})}, {"first": parts(WORDS)})
        for kind in ("video", "audio", "image_url")
    ),
    ("has 1 images for 2", {"prompt": parts("image", "image"), "images": ["a.png"]}, {"first": parts(WORDS)}),
    ("has 2 images for 1", {"prompt": parts("image"), "images": ["a.png"] * 2}, {"first": parts(WORDS)}),
    ("has 1 images for 0", {"prompt": parts(SENDS), "images": ["a.png"]}, {"first": parts(WORDS)}),
    (
        "teacher's prompt in row 1 of train_dataset has 2 images for 1",
        {"prompt": parts("image"), "images": ["a.png"], "teacher_images": ["a.png"] * 2},
        {"first": parts(WORDS)},
    ),
    *(
        ("row 1 .* both columns", {"prompt": GOOD, n: "a.png", f"{n}s": ["a.png"]}, {})
        for n in ("image", "teacher_image")
    ),
    ("row 1 .*1 of 2", {"prompt": GOOD, "images": ["a.png", None]}, {}),
    ("padding_free", ONE, {"padding_free": True}),
    ("Blind", ONE, {"rollout": Blind({})}),
    ("row 1 of train_dataset is text", {"prompt": "a", "image": "a.png"}, {"first": "hi"}),
    ("row 1 .*no user message", {"prompt": [{"role": "system", "content": "a"}], "image": "a.png"}, {}),
    *(
        (f"'{name}'; did you mean", {"prompt": GOOD, name: ["a.png"]}, {})
        for name in ("Images", "imagess", "teacher_img")
    ),
]


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize(("named", "row", "given"), SHOWN, ids=[one for one, *_ in SHOWN])
def test_images_that_nobody_could_read_are_refused(refuses, tmp_path, named, row, given):
    """The second of two rows, whose first is text, by a trainer whose models see."""
    given, models = dict(given), {}
    first, blind = given.pop("first", GOOD), given.pop("blind", None)
    for role, width in {"model": 32, "teacher_model": 48}.items():
        if role != blind:
            one = vision_language.model("gemma3", width, 0, sees=True)
            one.config.architectures = [type(one).__name__]
            one.config.save_pretrained(tmp_path / role)
            models[role] = str(tmp_path / role)
    data = Dataset.from_list([dict.fromkeys(row) | {"prompt": first}, row])
    seeing = {"processing_class": vision_language.processor("gemma3"), "train_dataset": data}
    refuses(named, {**models, **seeing, **given})
