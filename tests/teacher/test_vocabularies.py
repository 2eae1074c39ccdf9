"""One tokenizer, heads of two sizes: only ids that both models know are compared and sampled."""

from __future__ import annotations

import pytest
import torch
from support import tiny

from trl_opsd import HFRollout
from trl_opsd.data.tokenization import shared_vocabulary

PADDED = tiny.VOCABULARY + 13


def padded(model, rows=PADDED):
    """The same model with rows for unused ids, to which it gives high logits."""
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[tiny.VOCABULARY :] = 3.0
    return model


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("larger", ["model", "teacher_model"])
def test_padding_of_either_head_changes_neither_losses_nor_weights(trained, larger, divergence):
    plain = trained(divergence=divergence)
    models = {"model": tiny.qwen2(32, seed=0), "teacher_model": tiny.qwen2(48, seed=1)}
    trainer = trained(**{**models, larger: padded(models[larger])}, divergence=divergence)
    assert tiny.logged(trainer, "loss") == pytest.approx(tiny.logged(plain, "loss"), abs=1e-6)
    for name, expected in plain.model.state_dict().items():
        found = trainer.model.state_dict()[name][: len(expected)]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert trainer.limits.vocabulary == tiny.VOCABULARY


def test_heads_that_are_padded_alike_are_compared_in_full(make_trainer):
    models = {"model": padded(tiny.qwen2(32)), "teacher_model": padded(tiny.qwen2(48, 1))}
    assert make_trainer(**models).limits.vocabulary > tiny.VOCABULARY


def test_a_sampled_id_beyond_the_shared_vocabulary_is_refused(make_trainer):
    class Careless(HFRollout):
        def complete(self, prompt_ids, step):
            return [[5, tiny.VOCABULARY]] * len(prompt_ids)

    trainer = make_trainer(model=padded(tiny.qwen2(32, 0)), rollout=Careless())
    with pytest.raises(ValueError, match="of Careless contains the token id 259, but the models have 259 ids"):
        trainer.train()


@pytest.fixture
def loaded_from():
    """A teacher as `from_pretrained` leaves it, but for the weights."""

    def loaded_from(path):
        teacher = padded(tiny.qwen2(48, 1), tiny.VOCABULARY + 1)
        teacher.config._name_or_path = str(path)
        return teacher

    return loaded_from


def test_tokens_added_since_the_teacher_was_loaded_are_accepted(make_trainer, loaded_from, tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "teacher")
    words = tiny.tokenizer()
    words.add_tokens(["extra"])
    student = padded(tiny.qwen2(32, 0), tiny.VOCABULARY + 1)
    make_trainer(model=student, teacher_model=loaded_from(tmp_path / "teacher"), processing_class=words).train()


@pytest.mark.parametrize("path", ["", ".", "no/where", "/no/where", "not: an id", "a/b/c"])
def test_a_teacher_whose_tokenizer_is_not_here_is_accepted(make_trainer, loaded_from, path, caplog):
    make_trainer(teacher_model=loaded_from(path))
    assert "not compared" not in caplog.text


@pytest.mark.refusal
@pytest.mark.before_loading
def test_tokenizer_for_a_missing_teacher_is_refused(make_trainer):
    with pytest.raises(ValueError, match=r"has \['tutor'\]: the teachers are \['teacher'\]"):
        make_trainer(teacher_processing_class={"tutor": tiny.tokenizer()})


@pytest.mark.parametrize(
    ("student", "teacher", "shared"), [(259, 259, None), (300, 300, None), (259, 300, 259), (320, 300, 259)]
)
def test_only_heads_of_one_size_share_ids_beyond_tokenizers(student, teacher, shared):
    assert shared_vocabulary(student, {"teacher": teacher}, tiny.tokenizer()) == shared


@pytest.mark.refusal
def test_head_with_fewer_rows_than_tokens_is_refused():
    with pytest.raises(ValueError, match=r"head of the big one has 258 rows, .* 259 tokens \(rows of all heads: stud"):
        shared_vocabulary(300, {"big one": 258}, tiny.tokenizer())
