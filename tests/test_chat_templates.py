"""What tokenizers add to text and to messages, and the warnings about chat templates."""

from __future__ import annotations

import pytest
import tiny
from datasets import Dataset
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from trl_opsd.data.chat_templates import added_at_end, check_template_arguments

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
def test_what_a_tokenizer_adds_at_the_end_is_known(single, added):
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


TEXT = "are text, which is read as it is: no chat template is applied"


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if TEXT in record.getMessage()]


def test_text_for_a_chat_model_is_warned_of_once(make_trainer, caplog):
    make_trainer(eval_dataset={"a": tiny.rows(), "b": tiny.rows()})
    (warning,) = warnings(caplog)
    assert "The prompts of train_dataset are text" in warning
    assert "[{'role': 'user', 'content': '...'}]" in warning


def test_text_that_is_meant_is_not_warned_of(make_trainer, caplog):
    templated = Dataset.from_dict({"prompt": ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"] * 4})
    make_trainer(train_dataset=templated)
    make_trainer(train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]] * 4}))
    words = tiny.tokenizer()
    words.chat_template = None
    make_trainer(processing_class=words)
    assert warnings(caplog) == []


def test_a_chat_template_argument_that_is_not_read_is_warned_of(make_trainer, caplog):
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]] * 4})
    make_trainer(train_dataset=rows, chat_template_kwargs={"enable_thinking": False})
    assert (
        "`chat_template_kwargs` sets 'enable_thinking', which the chat template of the tokenizer never" in caplog.text
    )


def test_arguments_that_any_template_may_read_are_found():
    words = tiny.tokenizer()
    words.chat_template = {"default": tiny.CHAT_TEMPLATE, "tool_use": "{% if enable_thinking is defined %}{% endif %}"}
    assert check_template_arguments(words, "option", ["enable_thinking", "documents", "messages"]) is None
    assert "did you mean 'enable_thinking'?" in (check_template_arguments(words, "option", ["enable_thinkin"]) or "")
    words.chat_template = None
    assert check_template_arguments(words, "option", ["enable_thinkin"]) is None
