"""What tokenizers add to text and to messages, and the warnings about chat templates."""

from __future__ import annotations

import pytest
from datasets import Dataset, IterableDataset
from support import tiny
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from trl_opsd import HFRollout
from trl_opsd.data.tokenization import added_at_end

pytestmark = pytest.mark.quick

START, END = ("<|endoftext|>", 0), ("<|im_end|>", 2)


def adding(single: str, template: str = tiny.CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer that writes special tokens around text: Llama's and Gemma's before, T5's after, BERT's both."""
    words = tiny.tokenizer()
    words.bos_token, words.chat_template = START[0], template
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[START, END])
    return words


LLAMA, T5, BERT = "<|endoftext|> $A", "$A <|im_end|>", "<|endoftext|> $A <|im_end|>"


@pytest.mark.parametrize(("single", "added"), [(LLAMA, None), (T5, "<|im_end|>"), (BERT, "<|im_end|>")])
def test_token_that_a_tokenizer_adds_at_the_end_is_found(single, added):
    assert added_at_end(adding(single)) == added
    assert added_at_end(tiny.tokenizer()) is None


@pytest.mark.parametrize("single", [LLAMA, T5, BERT])
@pytest.mark.parametrize("start", ["", "{{ bos_token }}"])
def test_messages_get_what_the_chat_template_writes_and_nothing_else(make_trainer, single, start):
    words = adding(single, start + tiny.CHAT_TEMPLATE)
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]] * 4})
    trainer = make_trainer(processing_class=words, train_dataset=rows)
    (ids,) = trainer.tokenize(rows["prompt"][:1])
    assert words.decode(ids) == f"{start and START[0]}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


# ---- What a template makes of prompts --------------------------------------------------------------------------------

CHAT = "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PARTS = [{"type": "text", "text": "hi"}]
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>a greeting</think>ho"},
]


def chats(*talks) -> Dataset:
    return Dataset.from_list([{"prompt": talk} for talk in talks])


def user(content):
    return [{"role": "user", "content": content}]


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    words = tiny.tokenizer()
    words.chat_template = template
    return words


# The rows, the template, and whether it warns that they are text.
WARNED = {
    "text": (tiny.rows(), CHAT + ASKED, True),
    "text that is rendered": (Dataset.from_dict({"prompt": ["<|im_start|>user\nhi<|im_end|>\n"] * 2}), CHAT, False),
    "messages": (chats(user("hi"), user("hi")), CHAT + ASKED, False),
    "no template": (tiny.rows(), None, False),
    "answers that it shortens": (
        chats([*TALK, TALK[1]], [*TALK, TALK[1]]),
        CHAT.replace("one.content", "(one.content if one.role != 'assistant' else '')") + ASKED,
        False,
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_only_text_for_a_chat_model_warns_and_once(make_trainer, caplog, case):
    rows, template, warns = WARNED[case]
    make_trainer(train_dataset=rows, eval_dataset={"a": rows, "b": rows}, processing_class=with_template(template))
    found = [one for one in caplog.messages if "are text, so no chat template is applied" in one]
    assert ["train_dataset" in one for one in found] == [True] * warns


DROPS = CHAT.replace("in messages", "in messages[:-1]") + ASKED
OF_STUDENT = CHAT.replace("in messages", "in messages[:None if full is defined else -1]") + ASKED
OF_TEACHER = CHAT.replace("in messages", "in messages[:-1 if full is defined else None]") + ASKED


@pytest.mark.before_loading
@pytest.mark.refusal
@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (CHAT.replace("one.content", "one.text") + ASKED, TALK[1:2], "1 of 1 .role 'user'"),
        (DROPS, TALK[:2], "2 of 2 .role 'user'"),
        (CHAT.replace("in messages", "in messages[1:]") + ASKED, TALK[:2], "1 of 2 .role 'system'"),
        (CHAT.replace("in messages", "in messages[-1:]") + ASKED, [*TALK[1:3], TALK[1]], "1 of 3 .role 'user'"),
        (OF_STUDENT, TALK[:2], "2 of 2 .role 'user'"),
        (OF_TEACHER, TALK[:2], "2 of 2 .role 'user'"),
    ],
)
def test_a_template_that_leaves_a_message_out_is_refused(make_trainer, template, talk, message):
    given = {"teacher_chat_template_kwargs": {"full": True}} if "full" in template else {}
    with pytest.raises(ValueError, match=f"row 0 of train_dataset: .* drops message {message}"):
        make_trainer(train_dataset=chats(talk, talk), processing_class=with_template(template), **given)


@pytest.mark.before_loading
@pytest.mark.refusal
def test_content_parts_that_would_be_printed_are_refused(make_trainer):
    with pytest.raises(ValueError, match=r"row 0 of train_dataset has content in parts, .*as a Python list"):
        make_trainer(train_dataset=chats(user(PARTS), user(PARTS)))


@pytest.mark.refusal
@pytest.mark.parametrize("column", ["prompt", "teacher_prompt"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT + ASKED, "content in parts, .*as a Python list"),
        (CHAT.replace("{{ one.content }}", "{{ '' + one.content }}"), "tokenizer's chat template rejects it: can only"),
    ],
)
def test_content_parts_of_a_stream_are_refused_when_drawn(make_trainer, template, message, column):
    row = {"prompt": user("hi"), column: user(PARTS)}
    rows = IterableDataset.from_generator(lambda: iter([row, row]))
    with pytest.raises(ValueError, match=f"The {column} in row 0 .*{message}"):
        make_trainer(train_dataset=rows, processing_class=with_template(template), rollout=HFRollout()).train()


def test_content_parts_that_a_template_reads_are_accepted(make_trainer):
    reads = "{% for one in messages %}{% for part in one.content %}{{ part.text }}{% endfor %}{% endfor %}"
    trainer = make_trainer(train_dataset=chats(user(PARTS), user(PARTS)), processing_class=with_template(reads))
    assert trainer.processing_class.decode(trainer.tokenize([trainer.train_dataset[0]["prompt"]])[0]) == "hi"
