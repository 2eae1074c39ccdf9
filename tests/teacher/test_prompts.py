"""The prompts of a teacher, and its targets at the positions that predict each completion token."""

from __future__ import annotations

import logging

import pytest
import torch
from datasets import Dataset
from support import tiny

from trl_opsd import FixedRollout
from trl_opsd.report.describe import Banner

TEXTS = ["2+2=", "The sky is"]
ANSWERS = ["4<|im_end|>", " blue today<|im_end|>"]
THINKING = "{% if enable_thinking %}<think>{% endif %}"
WORDS = tiny.tokenizer()
WORDS.chat_template += THINKING


def chat(text):
    return [{"role": "user", "content": text}]


def rendered(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def make(make_trainer):
    """A trainer of two rows, each answered with a recorded completion."""

    def make(rows, is_chat=False, **given):
        asked = [rendered(text) if is_chat else text for text in TEXTS]
        answers = zip(map(tuple, WORDS(asked)["input_ids"]), WORDS(ANSWERS)["input_ids"], strict=True)
        prompts = [chat(text) if is_chat else text for text in TEXTS]
        return make_trainer(
            train_dataset=Dataset.from_list([{"prompt": p, **row} for p, row in zip(prompts, rows, strict=True)]),
            processing_class=WORDS,
            rollout=FixedRollout(dict(answers)),
            **given,
        )

    return make


def direct(trainer, teacher_prompts):
    """The teacher run on each prompt and answer alone, without padding."""
    found = []
    for prompt, completion in zip(WORDS(teacher_prompts)["input_ids"], WORDS(ANSWERS)["input_ids"], strict=True):
        with torch.no_grad():
            states = trainer.teacher.model(torch.tensor([prompt + completion]), output_hidden_states=True).hidden_states
        found.append(states[-1][0, len(prompt) - 1 : -1])
    return found


def context(one, other):
    return [{"privileged_context": one}, {"privileged_context": other}]


# Of each row its columns, options, whether it is a conversation, and what the teacher reads.
READ = {
    **{
        f"its own prompt, {more} longer": (
            [{"teacher_prompt": text + "h" * more} for text in TEXTS], {}, False, [text + "h" * more for text in TEXTS],
        )
        for more in (0, 1, 50)
    },
    **{
        f"the last message, {more} longer": (
            context("s" + "h" * more, "s" + "h" * more), {}, True,
            [rendered(f"{text}\n\ns{'h' * more}") for text in TEXTS],
        )
        for more in (0, 1, 50)
    },
    "text, whose cue of the answer stays last": (
        context("It is 4.", "It is blue."), {}, False, ["It is 4.\n\n2+2=", "It is blue.\n\nThe sky is"],
    ),
    "a template": (
        context(4, 5), {"teacher_prompt_template": "{{hint}} {privileged_context} | {prompt}"}, False,
        ["{hint} 4 | 2+2=", "{hint} 5 | The sky is"],
    ),
    "a function of row and completion": (
        context(None, None),
        {"teacher_prompt_fn": lambda row, text: f"{row['prompt']} {row['privileged_context']} Not {text}. "}, False,
        ["2+2= None Not 4. ", "The sky is None Not  blue today. "],
    ),
    "other arguments of the chat template": (
        [{}, {}], {"teacher_chat_template_kwargs": '{"enable_thinking": true}'}, True,
        [rendered(text) + "<think>" for text in TEXTS],
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", READ)
def test_targets_equal_a_direct_forward_over_teacher_prompt_and_completion(make, case):
    """The student reads its own prompt alone."""
    rows, options, is_chat, expected = READ[case]
    trainer = make(rows, is_chat, **options)
    batch = trainer.score(list(trainer.train_dataset))
    for row, states in zip(batch.targets.rows, direct(trainer, expected), strict=True):
        torch.testing.assert_close(row.hidden, states, rtol=1e-5, atol=2e-6)
    assert WORDS.batch_decode(batch.rollout.prompt_lists()) == [rendered(one) if is_chat else one for one in TEXTS]
    assert WORDS.batch_decode(batch.rollout.completion_lists()) == ANSWERS


def test_the_context_is_added_to_the_last_user_message_only(make):
    prompt = [
        {"role": "user", "content": "first"},
        {"role": "user", "content": [{"type": "text", "text": "last"}]},
        {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "on"},
    ]
    intake = make([{}, {}]).readers.intake
    row = {"prompt": prompt, "privileged_context": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}
    assert intake.read(row, "it").of_teacher.value == [
        prompt[0],
        {"role": "user", "content": [{"type": "text", "text": "last\n\na\nb"}]},
        *prompt[2:],
    ]
    assert prompt[1]["content"][0]["text"] == "last"
    with pytest.raises(ValueError, match="row 7 has no user message to which `teacher_prompt_template` could add"):
        intake.read({"prompt": [{"role": "system", "content": "a"}], "privileged_context": "b"}, "row 7")


def test_completion_ids_are_never_encoded_again(make):
    trainer = make(context("x", "x"))
    odd = [[200, 201, 202, 2], [130, 131, 2]]  # bytes that are no text
    trainer.rollout = FixedRollout(dict(zip(map(tuple, WORDS(TEXTS)["input_ids"]), odd, strict=True)))
    read = []
    reading = trainer.teacher.targets
    trainer.teacher.targets = lambda rollout: read.append(rollout) or reading(rollout)
    trainer.score(list(trainer.train_dataset))
    assert [ids[ids != 0].tolist() for ids in read[0].completion_ids] == odd


def test_teacher_columns_survive_the_removal_of_unused_ones(make):
    losses = []
    for remove in (False, True):
        trainer = make([{"privileged_context": "it is 4", "other": 1}] * 2, remove_unused_columns=remove)
        trainer.train()
        losses.append(tiny.logged(trainer, "loss"))
    assert losses[0] == losses[1] != []


def test_the_privileged_context_is_not_logged(make, tmp_path, caplog, capsys):
    with caplog.at_level(logging.DEBUG):
        trainer = make(context("SECRET", "SECRET"), log_completions=True)
        trainer.remove_callback(Banner)  # on standard output it shows the first prompt of each
        trainer.train()
    printed = capsys.readouterr()
    assert "SECRET" not in caplog.text + printed.out + printed.err + repr(trainer.state.log_history)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(b"SECRET" in content for content in files)
    with pytest.raises((ValueError, TypeError)) as caught:
        make(context(*[[{"role": "user", "content": {"SECRET": 1}}]] * 2))
    assert "SECRET" not in str(caught.value)


def test_rows_too_long_for_the_teacher_are_dropped_on_request(make_trainer):
    rows = Dataset.from_list([{"prompt": "a", "teacher_prompt": "b" * length} for length in (5, 240, 7)])
    trainer = make_trainer(train_dataset=rows, overlong_prompts="drop")
    assert [len(row["teacher_prompt"]) for row in trainer.train_dataset] == [5, 7]
    assert trainer.dropped_prompts["train_dataset"] == 1


# ---- What is refused -------------------------------------------------------------------------------------------------


def beyond(width):
    return {"teacher_model": tiny.qwen2(48, 1, max_position_embeddings=width)}


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("rows", "given", "error", "message"),
    [
        *(
            ([{name: "fine"}, {name: value}], {}, error, f"The {name} in row 1 of train_dataset {said}")
            for name in ("teacher_prompt", "privileged_context")
            for value, error, said in ((None, TypeError, "is None"), ("", ValueError, "is empty"))
        ),
        ([{"teacher_prompt": "x" * size} for size in (1, 240)], {}, ValueError, "The teacher_prompt in row 1 .* 240 t"),
        ([{"teacher_prompt": "a", "privileged_context": "b"}] * 2, {}, ValueError, "has both 'teacher_prompt' and 'pr"),
        (
            [{}, {}],
            {"teacher_prompt_fn": lambda row, text: "a", "remove_unused_columns": True},
            ValueError,
            "its columns would be hidden",
        ),
        *(
            (
                [{name: "x" * 60}] * 2,
                beyond(64),
                ValueError,
                rf"^The {said}; .* of the teacher \(64 tokens\)",
            )
            for name, said in {
                "privileged_context": "teacher's prompt in row 0 of train_dataset has 66 tokens",
                "teacher_prompt": "teacher_prompt in row 0 of train_dataset has 60 tokens",
                "prompt": "prompt in row 0 of train_dataset has 60 tokens",
            }.items()
        ),
    ],
)
def test_invalid_teacher_prompts_are_named_at_construction(make, rows, given, error, message):
    with pytest.raises(error, match=message):
        make(rows, **given)


@pytest.mark.refusal
def test_the_prompt_built_by_a_function_is_checked(make):
    def raising(row, text):
        return row["solution"]

    for function, error, message in (
        (lambda row, text: None, TypeError, "What `teacher_prompt_fn` returned for row 0 of the batch of step 1 is No"),
        (lambda row, text: "x" * 255, ValueError, "row 0 of the batch of step 1 has 255 tokens; with a completion of"),
        (raising, KeyError, "solution"),
    ):
        trainer = make([{}, {}], teacher_prompt_fn=function)
        with pytest.raises(error, match=message) as raised:
            trainer.score(list(trainer.train_dataset))
    (note,) = raised.value.__notes__
    assert note.startswith("`teacher_prompt_fn` raised this for row 0 of the batch of step 1")


@pytest.mark.refusal
def test_a_row_beyond_the_context_of_the_teacher_is_refused(make):
    """`evaluate` may be given rows the trainer has not seen before, without the teacher's columns of the others."""
    trainer = make(context("x", "x"), **beyond(64))
    trainer.rollout = FixedRollout({tuple([40] * 60): [50] * 10})
    with pytest.raises(
        ValueError, match=r"for row 0 .* has 60 tokens; with a completion of 10 .*the teacher \(64 tokens\)"
    ):
        trainer.score([{"prompt": WORDS.decode([40] * 60)}])


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{prompt}", r"\['prompt'\]"),
        ("{privileged_context}", r"\['privileged_context'\]"),
        ("{prompt} {privileged_context} {hint}", r"\['hint', 'privileged_context', 'prompt'\]"),
        ("{prompt.__class__} {prompt} {privileged_context}", "'prompt.__class__'"),
        ("{prompt} {privileged_context", "is no template"),
        (7, "7`: expected"),
    ],
)
def test_a_template_without_its_placeholders_is_refused(tmp_path, template, found):
    with pytest.raises(ValueError, match=f"`teacher_prompt_template=.*{found}"):
        tiny.config(tmp_path, teacher_prompt_template=template)
