"""Datasets that are missing, too small or lack a column, and rows that are no valid prompt: an error names the row."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from support import tiny, tool_calls, vision_language
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd.data.prompts import Prompt, common_kind
from trl_opsd.types import TeacherTargets

pytestmark = pytest.mark.refusal
GOOD = [{"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "ho"}
UNASKED = {"role": "tool", "name": "add", "content": "5"}


def prompts(*values: Any) -> Dataset:
    return Dataset.from_list([{"prompt": value} for value in values])


def answered(*conversations: Any) -> Dataset:
    return Dataset.from_list([{"messages": one} for one in ([*GOOD, ANSWER], *conversations)])


def stream(value: Any, number: int = 8, column: str = "prompt") -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter([{column: value}] * number))


def with_column(name: str, values: list[Any]) -> Dataset:
    return prompts(*["a"] * len(values)).add_column(name, values)


DATASETS: list[tuple[str, Any]] = [
    ("train_dataset", None),
    ("train_dataset. is empty", Dataset.from_dict({"prompt": []})),
    ("1 rows, but one generation batch needs 2", prompts("a")),
    ("question", Dataset.from_dict({"question": ["a", "b"]})),
    ("privileged_contex'.*'privileged_context'", with_column("privileged_contex", ["x"] * 8)),
    ("Teacher_prompt'.*'teacher_prompt'", with_column("Teacher_prompt", ["x"] * 8)),
    ("row 1 .* is text, but the row has images", with_column("image", [None, "b.png"])),
    # rows
    ("row 1 .* is empty", prompts("a", "")),
    ("row 1 .* is a list without messages", prompts(GOOD, [])),
    ("row 2 .*: message 1 is of a tool", prompts(GOOD, GOOD, [*GOOD, UNASKED])),
    ("row 1 .* ends with a message of the user", answered(GOOD)),
    ("row 1 .* is a list without messages", answered([ANSWER])),
    ("row 1 .* is a list without messages", answered([])),
    ("teacher_prompt in row 1", prompts(GOOD, GOOD).add_column("teacher_prompt", [GOOD, [*GOOD, UNASKED]])),
    ("row 0 .*: message 0 is of type str", prompts(["hi"], ["ho"])),
    ("row 0 .*: message 0: its content is of type int", prompts(*[[{"role": "user", "content": 5}]] * 2)),
    ("row 0 .*: message 0", prompts([{"content": "a"}], GOOD)),
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
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("eval_dataset. is empty", {"eval_dataset": Dataset.from_dict({"prompt": []})}),
    ("max_steps", {"train_dataset": prompts("a", "b").to_iterable_dataset(), "max_steps": -1}),
    (
        "privileged_context",
        {"teacher_model": None, "teacher_model_kind": "base"},
    ),  # which a student may teach itself by
]
OTHERS_OF_WRONG_TYPE: list[tuple[str, dict[str, Any]]] = [
    (r"eval_dataset\['easy'\]", {"eval_dataset": {"easy": [{"prompt": "a"}]}}),
    (r"row 1 of eval_dataset\['hard'\]", {"eval_dataset": {"easy": tiny.rows(), "hard": prompts("a", None)}}),
]
REFUSED = [
    *((named, {"train_dataset": dataset}, ValueError) for named, dataset in DATASETS),
    *((named, {"train_dataset": dataset}, TypeError) for named, dataset in OF_WRONG_TYPE),
    *((*row, ValueError) for row in OTHERS),
    *((*row, TypeError) for row in OTHERS_OF_WRONG_TYPE),
]


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize(("named", "given", "error"), REFUSED, ids=[one for one, *_ in REFUSED])
def test_a_dataset_is_refused_before_loading(refuses, named, given, error):
    refuses(named, given, error)


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


def told_more(row: dict[str, Any], completion: str) -> list[dict[str, str]]:
    """A prompt of the teacher that ends with the answer of a tool that nothing has called."""
    return [*row["prompt"], UNASKED]


LONG = "long " * 100
OPEN = [*GOOD, ANSWER]
UPPER_CASE = "(message['content'] | upper if message['role'] == 'assistant' else message['content'])"
UPPER = words(chat_template=tiny.CHAT_TEMPLATE.replace("message['content']", UPPER_CASE))
TWO = prompts("a", "b")
CHATS = prompts(GOOD, GOOD)
LATE: list[tuple[str, Any, dict[str, Any]]] = [
    ("row 1 of train_dataset is messages", mixed(), {}),
    ("row 1 of train_dataset has no tokens", prompts("a", "   "), {"processing_class": stripping()}),
    ("row 0 of train_dataset: .*chat_template", CHATS, {"processing_class": words(chat_template=None)}),
    ("row 0 of train_dataset .* appends", TWO, {"processing_class": words(add_eos_token=True)}),
    ("row 0 of the batch of step 1 .* appends", stream("a"), {"processing_class": words(add_eos_token=True)}),
    ("row 0 .* two start tokens", prompts("<|endoftext|>a", "b"), {"processing_class": words(add_bos_token=True)}),
    ("row 1 of train_dataset has 500 tokens", prompts("a", LONG), {}),
    ("row 0 of the batch of step 1 has 500 tokens", stream(LONG), {}),
    ("max_completion_length", TWO, {"max_completion_length": 256}),
    *(("eos_token_id", TWO, {"generation_kwargs": {"eos_token_id": value}}) for value in (None, "x", [2, -1])),
    ("ended before filling", stream("a", 1), {}),
    ("row 0 of the batch of step 1 has no column 'prompt'", stream("a", column="question"), {}),
    ("row 0 of the batch of step 1: message 1 is of a tool", stream([*GOOD, UNASKED]), {}),
    *(("row 0 .* cannot continue", rows, {"processing_class": UPPER}) for rows in (prompts(OPEN, OPEN), stream(OPEN))),
    ("`teacher_prompt_fn` .* row . of the batch of step 1", CHATS, {"rollout": None, "teacher_prompt_fn": told_more}),
]


@pytest.mark.parametrize(("named", "rows", "given"), LATE, ids=[one for one, *_ in LATE])
def test_a_row_is_refused_before_it_is_learned(refuses, named, rows, given):
    refuses(named, {"train_dataset": rows, **given})


def test_kinds_of_prompts_are_not_mixed(refuses):
    with pytest.raises(ValueError, match="The second"):
        common_kind([Prompt.of("a", "The first"), Prompt.of(GOOD, "The second")])
    refuses("row 0 of the batch of step 1 is None", {"train_dataset": stream(None)}, TypeError)


# ---- Recorded completions, and their beginnings ----------------------------------------------------------------------


def call(arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def second(column: str, value: Any, prompt: Any = GOOD, first: Any = None) -> Dataset:
    return Dataset.from_list([{"prompt": prompt, column: first}, {"prompt": prompt, column: value}])


COMPLETED: list[tuple[str, list[Any]]] = [
    ("row 1 .* expected 'assistant' and 'tool', first assistant, last assistant", [call(), UNASKED]),
    ("row 1 .*'user', 'assistant'.: expected 'assistant'", [ANSWER, *GOOD, ANSWER]),
    ("row 1 .*: message 2 is of a tool, but", [ANSWER, UNASKED, ANSWER]),
    ("row 1 .*: message 1: the arguments of a call are text that is no JSON", [call("{'a': 2}"), UNASKED, ANSWER]),
]
BEGUN: list[tuple[str, Any]] = [
    ("completion_prefix in row 1 of train_dataset is empty", ""),
    ("completion_prefix in row 1 of train_dataset is a list without messages", []),
    ("row 1 .* ends with an empty message", [{"role": "assistant", "content": ""}]),
    ("row 1 .* ends with calls without answers", [call()]),
    ("row 1 .* last assistant or tool", [ANSWER, *GOOD]),
    ("row 1 .* ends with '<.im_e', in the middle of '<.im_end.>'", "so <|im_e"),
    ("row 1 .* ends with '<.im_e', in the middle of", [call(), UNASKED, {"role": "assistant", "content": "so <|im_e"}]),
    ("row 1 .* contains the end of a completion", "so<|im_end|> it"),
    ("row 1 .* contains the end of a completion", [call(), UNASKED, {**ANSWER, "content": "so<|im_end|> it"}]),
]
QWEN3 = words(chat_template=tool_calls.words().chat_template)
CONVERSED: list[tuple[str, dict[str, Any]]] = [
    *((named, {"train_dataset": second("completion", one, first=[ANSWER]), "lmbda": 0.5}) for named, one in COMPLETED),
    *((named, {"train_dataset": second("completion_prefix", one)}) for named, one in BEGUN),
    ("row 1 .* ends with a message of the tool", {"train_dataset": answered([*GOOD, call(), UNASKED])}),
    ("is messages, but the prompt is text", {"train_dataset": second("completion_prefix", [ANSWER], "hi")}),
    ("row 1 of eval_dataset contains", {"eval_dataset": second("completion_prefix", "so<|im_end|>", "hi")}),
    (
        "row 0 of train_dataset: .* message 1 in another way once others follow",
        {
            "train_dataset": second("completion", [ANSWER], first=[call(), UNASKED, ANSWER]),
            "processing_class": QWEN3,
            "lmbda": 0.5,
        },
    ),
]


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize(("named", "given"), CONVERSED, ids=[one for one, *_ in CONVERSED])
def test_what_could_not_be_learned_or_continued_is_refused_before_loading(refuses, named, given):
    refuses(named, given)


def test_a_beginning_that_leaves_no_room_or_templates_without_tools_are_refused(refuses):
    for kind in ("a", GOOD):
        rows = second("completion_prefix", LONG, kind, "so")
        refuses("row 1 of train_dataset, with its completion_prefix, has 5", {"train_dataset": rows})
    rows = second("completion_prefix", "so", first="so")
    template = words(chat_template="{{ raise_exception('no') if messages[2:] }}{{ messages[0].content }}")
    given = {"train_dataset": rows, "tools": [tiny.add], "processing_class": template}
    refuses("chat template does not support tool calling", given)


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
FIRST = {"first": parts({"type": "text", "text": "hi"})}
SEEN = {"prompt": parts("image"), "images": ["a.png"]}

SHOWN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("row 1 of train_dataset.*processing_class", ONE, {"processing_class": tiny.tokenizer()}),
    ("teacher's prompt in row 1", ONE, {"blind": "teacher_model"}),
    ("teacher's prompt in row 1", ONE, {"teacher_server_url": "http://127.0.0.1:1"}),
    *((rf"row 1 .*\['{kind}'\]", {"prompt": parts({"type": kind, kind: "a"})}, FIRST) for kind in ("video", "audio")),
    ("has 1 images for 2", {"prompt": parts("image", "image"), "images": ["a.png"]}, FIRST),
    ("has 2 images for 1", {"prompt": parts("image"), "images": ["a.png"] * 2}, FIRST),
    ("has 1 images for 0", {"prompt": parts(SENDS), "images": ["a.png"]}, FIRST),
    ("teacher's .* 2 images for 1", {**SEEN, "teacher_images": ["a.png"] * 2}, FIRST),
    ("row 1 .* both columns", {"prompt": GOOD, "image": "a.png", "images": ["a.png"]}, {}),
    ("row 1 .* both columns", {"prompt": GOOD, "teacher_image": "a.png", "teacher_images": ["a.png"]}, {}),
    ("row 1 .*1 of 2", {"prompt": GOOD, "images": ["a.png", None]}, {}),
    ("padding_free", ONE, {"padding_free": True}),
    ("Blind", ONE, {"rollout": Blind({})}),
    ("row 1 of train_dataset is text", {"prompt": "a", "image": "a.png"}, {"first": "hi"}),
    ("row 1 .*no user message", {"prompt": [{"role": "system", "content": "a"}], "image": "a.png"}, {}),
    *((f"'{name}'; did you mean", {"prompt": GOOD, name: ["a.png"]}, {}) for name in ("Images", "teacher_img")),
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
