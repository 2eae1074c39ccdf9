"""Special tokens outside the vocabulary of the models are refused or replaced, at construction."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny
from transformers import PreTrainedTokenizerFast

from trl_opsd import HFRollout

ROWS = tiny.rows().add_column("privileged_context", ["It is 4.", "x", "blue sky", "y", "z", "q", "w", "once"])


def grown(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer with tokens outside the vocabulary of the models here."""
    words = tiny.tokenizer()
    words.add_special_tokens(special)
    return words


@pytest.mark.parametrize("teacher", ["another", "itself"])
def test_a_padding_token_outside_the_vocabulary_changes_no_number(trained, teacher):
    given: dict[str, Any] = {"train_dataset": ROWS, "eval_dataset": ROWS.select(range(3)), "max_completion_length": 4}
    if teacher == "itself":
        given |= {"teacher_model": None, "teacher_model_kind": "base"}
    plain, found = tiny.tokenizer(), []
    plain.pad_token = plain.eos_token
    for words in (plain, grown(pad_token="[PAD]")):
        trainer = trained(processing_class=words, rollout=HFRollout(), max_steps=2, **given)
        completions = trainer.complete(trainer.tokenize(tiny.PROMPTS))
        numbers = tiny.logged(trainer, "loss"), trainer.evaluate()["eval_loss"], tiny.weights(trainer).tolist()
        found.append((completions, *numbers))
    assert found[0] == found[1]
    assert trainer.model.config.pad_token_id == trainer.model.generation_config.pad_token_id == plain.eos_token_id


def test_special_tokens_saved_with_the_student_are_checked(make_trainer, tmp_path):
    student = tiny.qwen2()
    student.generation_config.eos_token_id = [2, 999, -1]
    student.save_pretrained(tmp_path / "student")
    grown(pad_token="[PAD]").save_pretrained(tmp_path / "student")
    trainer = make_trainer(model=str(tmp_path / "student"), processing_class=None, rollout=HFRollout())
    assert trainer.eos_token_ids == trainer.generation_kwargs["eos_token_id"] == [2]
    assert (trainer.generation_config.eos_token_id, trainer.generation_config.pad_token_id) == ([2], 2)
    assert trainer.generation_kwargs["pad_token_id"] == trainer.model.generation_config.pad_token_id == 2


@pytest.mark.before_loading
def test_an_end_token_outside_the_vocabulary_is_refused_before_loading(make_trainer):
    with pytest.raises(ValueError, match=r"'\[END\]' has the id 259.*resize_token_embeddings\(len\(tokenizer\)\)"):
        make_trainer(processing_class=grown(eos_token="[END]"))


def test_a_chat_template_with_unknown_tokens_is_refused(make_trainer):
    words = grown(additional_special_tokens=["<|turn|>"])
    words.chat_template = "<|turn|>" + tiny.CHAT_TEMPLATE
    rows = tiny.rows().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    with pytest.raises(ValueError, match=r"row 0 .*contains the token id 259, but the models have 259 ids"):
        make_trainer(processing_class=words, train_dataset=rows)


def test_models_resized_for_new_tokens_are_accepted(make_trainer):
    words = grown(pad_token="[PAD]", eos_token="[END]")
    student, teacher = tiny.qwen2(), tiny.qwen2(48, 1)
    for model in (student, teacher):
        model.resize_token_embeddings(len(words), mean_resizing=False)
    given = {"model": student, "processing_class": words, "rollout": HFRollout(), "max_completion_length": 4}
    trainer = make_trainer(**given, teacher_model=teacher, max_steps=1)
    assert (trainer.generation_config.pad_token_id, trainer.eos_token_ids[0]) == (259, 260)
    trainer.train()
    with pytest.raises(ValueError, match="The head of the teacher has 259 rows, but the tokenizer has 261 tokens"):
        make_trainer(**given)
