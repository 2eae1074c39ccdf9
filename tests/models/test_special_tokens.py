"""Special tokens outside the vocabulary of the models are refused or replaced, at construction."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny
from transformers import PreTrainedTokenizerFast

from trl_opsd import HFRollout
from trl_opsd.models.tokenizers import ensure_special_tokens, known_end_tokens

ROWS = tiny.rows().add_column("privileged_context", ["It is 4.", "x", "blue sky", "y", "z", "q", "w", "once"])


def grown(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer with tokens outside the vocabulary of the models here."""
    words = tiny.tokenizer()
    words.add_special_tokens(special)
    return words


def run(make_trainer: Any, words: PreTrainedTokenizerFast | None, **given: Any) -> tuple[list[Any], Any]:
    """Completions, losses and weights of two steps with an evaluation."""
    trainer = make_trainer(
        processing_class=words, rollout=HFRollout(), max_steps=2, eval_dataset=ROWS.select(range(3)),
        max_completion_length=4, **given,
    )  # fmt: skip
    completions = trainer.complete(trainer.tokenize(tiny.PROMPTS))
    trainer.train()
    losses = tiny.logged(trainer, "loss")
    weights = tiny.weights(trainer)
    return [completions, losses, trainer.evaluate()["eval_loss"], weights.tolist()], trainer


@pytest.mark.parametrize("teacher", ["another", "itself"])
def test_a_padding_token_outside_the_vocabulary_changes_no_number(make_trainer, teacher):
    given: dict[str, Any] = {"train_dataset": ROWS}
    if teacher == "itself":
        given |= {"teacher_model": None, "teacher_model_kind": "base"}
    plain = tiny.tokenizer()
    plain.pad_token = plain.eos_token
    expected, _ = run(make_trainer, plain, **given)
    padded, trainer = run(make_trainer, grown(pad_token="[PAD]"), **given)
    assert padded == expected
    assert trainer.model.config.pad_token_id == trainer.model.generation_config.pad_token_id == plain.eos_token_id


def test_special_tokens_saved_with_the_student_are_checked(make_trainer, tmp_path):
    student = tiny.qwen2()
    student.generation_config.eos_token_id = [2, 999, -1]
    student.save_pretrained(tmp_path / "student")
    grown(pad_token="[PAD]").save_pretrained(tmp_path / "student")
    trainer = make_trainer(model=str(tmp_path / "student"), processing_class=None, rollout=HFRollout())
    assert trainer.eos_token_ids == trainer.generation_kwargs["eos_token_id"] == [2]
    ends = (trainer.generation_config.eos_token_id, trainer.generation_config.pad_token_id)
    assert ends == ([2], 2)
    assert trainer.generation_kwargs["pad_token_id"] == trainer.model.generation_config.pad_token_id == 2
    assert {len(ids) for ids in trainer.complete(trainer.tokenize(tiny.PROMPTS))}

    grown(eos_token="[END]").save_pretrained(tmp_path / "student")
    with pytest.raises(ValueError, match=r"The end token '\[END\]' has the id 259, but the student has 259 ids"):
        make_trainer(model=str(tmp_path / "student"), processing_class=None)


@pytest.mark.before_loading
def test_an_end_token_outside_the_vocabulary_is_refused_before_loading(make_trainer):
    with pytest.raises(ValueError, match=r"'\[END\]' has the id 259.*resize_token_embeddings\(len\(tokenizer\)\)"):
        make_trainer(processing_class=grown(eos_token="[END]"))


def test_special_tokens_in_the_vocabulary_are_kept():
    words = tiny.tokenizer()
    ensure_special_tokens(words, 259)
    assert words.pad_token == "<|endoftext|>"
    ensure_special_tokens(None, 259)
    ensure_special_tokens(grown(eos_token="[END]"), None)
    assert known_end_tokens([2, 0], 259) == [2, 0]


def test_a_chat_template_with_unknown_tokens_is_refused(make_trainer):
    words = grown(additional_special_tokens=["<|turn|>"])
    words.chat_template = "<|turn|>" + tiny.CHAT_TEMPLATE
    rows = tiny.rows().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    with pytest.raises(
        ValueError, match=r"row 0 .*contains the token id 259, but the models have 259 ids.*resize_token"
    ):
        make_trainer(processing_class=words, train_dataset=rows)
    make_trainer(processing_class=words, rollout=HFRollout(), max_completion_length=4, max_steps=1).train()


def test_models_resized_for_new_tokens_are_accepted(make_trainer):
    words = grown(pad_token="[PAD]", eos_token="[END]")
    student, teacher = tiny.qwen2(), tiny.qwen2(48, 1)
    for model in (student, teacher):
        model.resize_token_embeddings(len(words), mean_resizing=False)
    trainer = make_trainer(
        model=student, teacher_model=teacher, processing_class=words, rollout=HFRollout(), max_completion_length=4,
        max_steps=1,
    )  # fmt: skip
    assert (trainer.generation_config.pad_token_id, trainer.eos_token_ids[0]) == (259, 260)
    trainer.train()
    with pytest.raises(ValueError, match="The head of the teacher has 259 rows, but the tokenizer has 261 tokens"):
        make_trainer(model=student, processing_class=words)
