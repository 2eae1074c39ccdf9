"""The prompts of a teacher, and its targets at the positions that predict each completion token."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from datasets import Dataset, IterableDataset
from support import tiny

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer
from trl_opsd.report.describe import Banner

TEXTS = ["2+2=", "The sky is"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
ANSWERS = ["4<|im_end|>", " blue today<|im_end|>"]


THINKING = "{% if enable_thinking %}<think>{% endif %}"


def make(tmp_path, rows, conversational=False, teacher=None, **given):
    """A trainer of two rows, each answered with a recorded completion."""
    words = tiny.tokenizer()
    words.chat_template += THINKING
    prompts = CHATS if conversational else TEXTS
    ids_of = partial(words.apply_chat_template, add_generation_prompt=True) if conversational else words
    asked = [ids_of(prompt)["input_ids"] for prompt in prompts]
    answers = {tuple(prompt): words(answer)["input_ids"] for prompt, answer in zip(asked, ANSWERS, strict=True)}
    options = {name: value for name, value in given.items() if name in OPSDConfig.__dataclass_fields__}
    return OPSDTrainer(
        model=tiny.qwen2(32, 0),
        teacher_model=teacher or tiny.qwen2(48, 1),
        args=tiny.config(tmp_path, **options),
        train_dataset=Dataset.from_list([{"prompt": p, **row} for p, row in zip(prompts, rows, strict=True)]),
        processing_class=words,
        rollout=FixedRollout(answers),
        **{name: value for name, value in given.items() if name not in options},
    )


def targets(trainer):
    """The teacher's hidden states for both rows, by token."""
    return [row.hidden for row in trainer.score(list(trainer.train_dataset)).targets.rows]


def direct(trainer, teacher_prompts):
    """The teacher run on each prompt and answer alone, without padding."""
    found = []
    for prompt, answer in zip(teacher_prompts, ANSWERS, strict=True):
        completion = trainer.processing_class(answer)["input_ids"]
        with torch.no_grad():
            states = trainer.teacher.model(torch.tensor([prompt + completion]), output_hidden_states=True).hidden_states
        found.append(states[-1][0, len(prompt) - 1 : -1])
    return found


def same(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


LONGER = [0, 1, 50]


@pytest.mark.parametrize("more", LONGER)
@pytest.mark.quick
def test_targets_equal_a_direct_forward_over_teacher_prompt_and_completion(tmp_path, more):
    written = [text + "h" * more for text in TEXTS]
    trainer = make(tmp_path, [{"teacher_prompt": text} for text in written])
    same(targets(trainer), direct(trainer, trainer.processing_class(written)["input_ids"]))


@pytest.mark.parametrize("more", LONGER)
def test_targets_of_conversations_equal_a_direct_forward(tmp_path, more):
    secret = "s" + "h" * more
    trainer = make(tmp_path, [{"privileged_context": secret}] * 2, conversational=True)
    chats = [[{"role": "user", "content": f"{text}\n\n{secret}"}] for text in TEXTS]
    ids = trainer.processing_class.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    same(targets(trainer), direct(trainer, ids))


@pytest.mark.quick
def test_the_student_never_reads_the_privileged_context(tmp_path):
    plain = make(tmp_path, [{}, {}])
    told = make(tmp_path, [{"privileged_context": "it is 4"}] * 2)
    batches = [trainer.score(list(trainer.train_dataset)) for trainer in (plain, told)]
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        assert torch.equal(*(getattr(batch.rollout, name) for batch in batches))
    plain_rows, told_rows = (batch.targets.rows for batch in batches)
    assert not any(torch.equal(one.hidden, other.hidden) for one, other in zip(plain_rows, told_rows, strict=True))


def test_the_template_joins_prompt_and_context(tmp_path):
    template = "{{hint}} {privileged_context} | {prompt}"
    trainer = make(tmp_path, [{"privileged_context": 4}, {"privileged_context": 5}], teacher_prompt_template=template)
    ids = trainer.processing_class(["{hint} 4 | 2+2=", "{hint} 5 | The sky is"])["input_ids"]
    same(targets(trainer), direct(trainer, ids))


@pytest.mark.quick
def test_text_ending_with_an_answers_cue_stays_last(tmp_path):
    trainer = make(tmp_path, [{"privileged_context": "It is 4."}, {"privileged_context": "It is blue."}])
    ids = trainer.processing_class(["It is 4.\n\n2+2=", "It is blue.\n\nThe sky is"])["input_ids"]
    same(targets(trainer), direct(trainer, ids))


def test_the_context_is_added_to_the_last_user_message_only(tmp_path):
    prompt = [
        {"role": "user", "content": "first"},
        {"role": "user", "content": [{"type": "text", "text": "last"}]},
        {"role": "assistant", "content": "so"},
        {"role": "tool", "content": "on"},
    ]
    trainer = make(tmp_path, [{}, {}])
    row = {"prompt": prompt, "privileged_context": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}
    assert trainer.readers.intake.read(row, "it").of_teacher.value == [
        prompt[0],
        {"role": "user", "content": [{"type": "text", "text": "last\n\na\nb"}]},
        *prompt[2:],
    ]
    assert prompt[1]["content"][0]["text"] == "last"


def test_a_function_builds_the_prompt_from_row_and_completion(tmp_path):
    seen = []

    def hindsight(row, completion_text):
        seen.append((row["prompt"], completion_text))
        return f"{row['prompt']} Not {completion_text}. "

    trainer = make(tmp_path, [{}, {}], teacher_prompt_fn=hindsight)
    ours = targets(trainer)
    assert seen == [("2+2=", "4"), ("The sky is", " blue today")]
    ids = trainer.processing_class(["2+2= Not 4. ", "The sky is Not  blue today. "])["input_ids"]
    same(ours, direct(trainer, ids))


def test_the_chat_template_may_have_other_arguments_for_the_teacher(tmp_path):
    given = {"teacher_chat_template_kwargs": '{"enable_thinking": true}', "conversational": True}
    trainer = make(tmp_path, [{}, {}], **given)
    words = trainer.processing_class
    plain = words.apply_chat_template(CHATS, add_generation_prompt=True)["input_ids"]
    thinking = words.apply_chat_template(CHATS, add_generation_prompt=True, enable_thinking=True)["input_ids"]
    assert len(thinking[0]) == len(plain[0]) + len("<think>")
    same(targets(trainer), direct(trainer, thinking))
    assert trainer.tokenize(CHATS) == plain


def test_completion_ids_are_never_encoded_again(tmp_path):
    trainer = make(tmp_path, [{"privileged_context": "x"}] * 2)
    odd = [[200, 201, 202, 2], [130, 131, 2]]  # bytes that are no text
    prompts = map(tuple, trainer.processing_class(TEXTS)["input_ids"])
    trainer.rollout = FixedRollout(dict(zip(prompts, odd, strict=True)))
    read = []
    reading = trainer.teacher.targets
    trainer.teacher.targets = lambda rollout: read.append(rollout) or reading(rollout)
    trainer.score(list(trainer.train_dataset))
    assert [ids[ids != 0].tolist() for ids in read[0].completion_ids] == odd


def test_teacher_columns_survive_the_removal_of_unused_ones(tmp_path):
    rows = [{"privileged_context": "it is 4", "other": 1}] * 2
    losses = []
    for remove in (False, True):
        trainer = make(tmp_path, rows, remove_unused_columns=remove)
        trainer.train()
        losses.append(tiny.logged(trainer, "loss"))
    assert losses[0] == losses[1] != []


def test_the_privileged_context_is_not_logged(tmp_path, caplog, capsys):
    with caplog.at_level(logging.DEBUG):
        trainer = make(tmp_path, [{"privileged_context": "SECRET"}] * 2, log_completions=True)
        trainer.remove_callback(Banner)  # on standard output it shows the first prompt of each
        trainer.train()
    printed = capsys.readouterr()
    assert "SECRET" not in caplog.text + printed.out + printed.err + repr(trainer.state.log_history)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(b"SECRET" in content for content in files)


REFUSED = [
    ({"teacher_prompt": None}, TypeError, "The teacher_prompt in row 1 of train_dataset is None"),
    ({"teacher_prompt": ""}, ValueError, "The teacher_prompt in row 1 of train_dataset is empty"),
    (
        {"privileged_context": None},
        TypeError,
        "The privileged_context in row 1 of train_dataset is None",
    ),
    ({"privileged_context": ""}, ValueError, "The privileged_context in row 1 of train_dataset is empty"),
    (
        {"teacher_prompt": "x" * 240},
        ValueError,
        "The teacher_prompt in row 1 of train_dataset has 240 tokens",
    ),
]


@pytest.mark.refusal
@pytest.mark.parametrize(("row", "error", "message"), REFUSED, ids=[message[4:50] for *_, message in REFUSED])
def test_invalid_teacher_prompts_are_named_at_construction(tmp_path, row, error, message):
    with pytest.raises(error, match=message):
        make(tmp_path, [dict.fromkeys(row, "fine"), row])


@pytest.mark.refusal
def test_both_teacher_columns_at_once_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has both 'teacher_prompt' and 'privileged_context'"):
        make(tmp_path, [{"teacher_prompt": "a", "privileged_context": "b"}] * 2)


@pytest.mark.refusal
def test_a_wrong_value_is_not_shown_in_the_error(tmp_path):
    with pytest.raises((ValueError, TypeError)) as caught:
        make(tmp_path, [{"privileged_context": [{"role": "user", "content": {"SECRET": 1}}]}] * 2)
    assert "SECRET" not in str(caught.value)


@pytest.mark.refusal
def test_a_context_without_a_user_message_to_join_is_refused(tmp_path):
    trainer = make(tmp_path, [{}, {}])
    with pytest.raises(ValueError, match="row 7 has no user message to which `teacher_prompt_template` could add"):
        trainer.readers.intake.read(
            {"prompt": [{"role": "system", "content": "a"}], "privileged_context": "b"}, "row 7"
        )


def test_rows_too_long_for_the_teacher_are_dropped_on_request(tmp_path):
    rows = [{"prompt": "a", "teacher_prompt": "b" * length} for length in (5, 240, 7)]
    trainer = OPSDTrainer(
        model=tiny.qwen2(32, 0),
        teacher_model=tiny.qwen2(48, 1),
        args=tiny.config(tmp_path, overlong_prompts="drop"),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
    )
    assert [len(row["teacher_prompt"]) for row in trainer.train_dataset] == [5, 7]
    assert trainer.dropped_prompts["train_dataset"] == 1


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (None, TypeError, "What `teacher_prompt_fn` returned for row 0 of the batch of step 1 is None"),
        (
            "x" * 255,
            ValueError,
            "prompt for row 0 of the batch of step 1 has 255 tokens; with a completion of 2",
        ),
    ],
)
def test_the_prompt_built_by_a_function_is_checked(tmp_path, made, error, message):
    trainer = make(tmp_path, [{}, {}], teacher_prompt_fn=lambda row, text: made)
    with pytest.raises(error, match=message):
        trainer.score(list(trainer.train_dataset))


def test_with_a_function_teacher_columns_may_be_none(tmp_path):
    rows = [{"privileged_context": None}, {"privileged_context": None}]
    trainer = make(tmp_path, rows, teacher_prompt_fn=lambda row, text: f"{row['privileged_context']} {text}")
    ids = trainer.processing_class(["None 4", "None  blue today"])["input_ids"]
    same(targets(trainer), direct(trainer, ids))


@pytest.mark.refusal
@pytest.mark.before_loading
def test_removing_columns_that_a_function_may_need_is_refused(tmp_path):
    with pytest.raises(ValueError, match="its columns would be hidden"):
        make(tmp_path, [{}, {}], teacher_prompt_fn=lambda row, text: "a", remove_unused_columns=True)


@pytest.mark.refusal
def test_a_row_beyond_the_context_of_the_teacher_is_refused(tmp_path):
    """`evaluate` may be given rows the trainer has not seen before, without the teacher's columns of the others."""
    trainer = make(tmp_path, [{"privileged_context": "x"}] * 2, teacher=tiny.qwen2(48, 1, max_position_embeddings=64))
    trainer.rollout = FixedRollout({tuple([40] * 60): [50] * 10})
    with pytest.raises(
        ValueError, match=r"for row 0 .* has 60 tokens; with a completion of 10 .*the teacher \(64 tokens\)"
    ):
        trainer.score([{"prompt": trainer.processing_class.decode([40] * 60)}])


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"privileged_context": "x" * 60}, "^The teacher's prompt in row 0 of train_dataset has 66 tokens"),
        ({"teacher_prompt": "x" * 60}, "^The teacher_prompt in row 0 of train_dataset has 60 tokens"),
        ({"prompt": "x" * 60}, "^The prompt in row 0 of train_dataset has 60 tokens"),
    ],
)
def test_a_teacher_prompt_that_is_too_long_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=rf"{message}; .* exceeds the context of the teacher \(64 tokens\)"):
        make(tmp_path, [row] * 2, teacher=tiny.qwen2(48, 1, max_position_embeddings=64))


def test_an_error_of_the_prompt_function_names_its_row(tmp_path):
    trainer = make(tmp_path, [{"answer": 4}] * 2, teacher_prompt_fn=lambda row, text: row["solution"])
    with pytest.raises(KeyError, match="solution") as raised:
        trainer.train()
    (note,) = raised.value.__notes__
    assert note.startswith(
        "`teacher_prompt_fn` raised this for row 0 of the batch of step 1, which has the columns ['answer', "
    )


@pytest.mark.refusal
def test_a_stream_is_checked_row_by_row(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "a", "privileged_context": None}] * 4))
    trainer = OPSDTrainer(
        model=tiny.qwen2(32, 0),
        teacher_model=tiny.qwen2(48, 1),
        args=tiny.config(tmp_path),
        train_dataset=stream,
        processing_class=tiny.tokenizer(),
    )
    with pytest.raises(TypeError, match="The privileged_context in row 0 of train_dataset is None"):
        trainer.train()


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt}", r"has the placeholders \['prompt'\]: expected text with exactly"),
        ("{privileged_context}", r"has the placeholders \['privileged_context'\]"),
        ("{prompt} {privileged_context} {hint}", r"has the placeholders \['hint', .*\]"),
        ("{prompt} {privileged_context", r"is no template .*: expected text with exactly `{prompt}`"),
        ("{prompt.__class__} {prompt} {privileged_context}", "has the placeholders"),
        (7, "expected a valid string"),
    ],
)
def test_a_template_without_its_placeholders_is_refused(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, teacher_prompt_template=template)
