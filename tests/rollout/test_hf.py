"""Rollouts by `transformers`, as a trainer asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from transformers import CompileConfig

from trl_opsd import HFRollout
from trl_opsd.rollout.base import cut_after_end

PROMPTS = ["2+2=", "The sky is", "a", "Count: one two"]


@pytest.fixture
def make_writing(make_trainer):
    """A trainer of a student with many end tokens, so that rows leave at different times."""

    def make(rollout: HFRollout | None = None, **given):
        student = given.pop("model", None) or tiny.qwen2()
        student.generation_config.eos_token_id = list(range(2, tiny.VOCABULARY, 12))
        return make_trainer(model=student, rollout=rollout or HFRollout(), **given)

    return make


def trls(trainer, prompt_ids: list[list[int]]) -> list[list[int]]:
    """What TRL would write: one padded batch, its own generation config."""
    inputs = trainer.pad_prompts(prompt_ids)
    with trainer.student_for_generation() as student:
        written = student.generate(**inputs, generation_config=trainer.generation_config)
    return [cut_after_end(ids, trainer.eos_token_ids) for ids in written[:, inputs["input_ids"].size(1) :].tolist()]


class TestTokens:
    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.7, "top_k": 40},
            {"top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
            {"generation_kwargs": {"no_repeat_ngram_size": 2}, "cache_implementation": "static"},
            {"generation_kwargs": {"do_sample": False, "num_beams": 2}},
        ],
        ids=["temperature", "nucleus", "static", "beams"],
    )
    def test_trls_options_mean_what_they_mean_to_trl(self, make_writing, options):
        trainer = make_writing(max_completion_length=32, **options)
        prompt_ids = trainer.tokenize(PROMPTS * 3)
        torch.manual_seed(0)
        expected = trls(trainer, prompt_ids)
        assert len({len(ids) for ids in expected}) >= 3
        torch.manual_seed(0)
        assert trainer.complete(prompt_ids) == expected

    @pytest.mark.parametrize("generation_kwargs", [{}, {"do_sample": False}, {"num_beams": 2}])
    def test_an_id_that_no_tokenizer_knows_is_never_written(self, make_writing, generation_kwargs):
        trainer = make_writing(generation_kwargs=generation_kwargs)
        assert trainer.limits.vocabulary == tiny.VOCABULARY
        trainer.readers = replace(
            trainer.readers, student_limits=replace(trainer.limits, vocabulary=130)
        )  # as if the head were padded with 129 rows
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight[130:] *= 3
        written = [token for ids in trainer.rollout.complete([[5], [6, 7], [8]] * 4, 0) for token in ids]
        assert len(written) > 30
        assert max(written) < 130

    def test_a_row_whose_context_is_full_shortens_no_other(self, make_trainer):
        trainer = make_trainer(
            model=tiny.gpt2(),
            teacher_model=tiny.gpt2(48, 1),
            rollout=HFRollout(),
            generation_kwargs={"min_new_tokens": 24},
        )
        written = trainer.complete([list(range(3, 253)), [5], list(range(3, 254))])
        assert [len(ids) for ids in written] == [6, 24, 5]


class TestFallback:
    def test_plain_generate_is_announced_once_with_its_reason(self, make_writing, caplog):
        trainer = make_writing(generation_kwargs={"use_cache": False})
        for _ in range(2):
            trainer.complete(trainer.tokenize(PROMPTS))
        announced = [record.getMessage() for record in caplog.records if "plain `generate`" in record.getMessage()]
        assert len(announced) == 1
        assert "`use_cache=False` leaves nothing to go on from" in announced[0]

    def test_nothing_is_announced_otherwise(self, make_writing, caplog):
        trainer = make_writing()
        trainer.complete(trainer.tokenize(PROMPTS))
        assert not [record for record in caplog.records if record.name.startswith("trl_opsd")]


class TestCompile:
    def test_a_compiled_rollout_writes_the_same_tokens(self, make_writing):
        torch._dynamo.reset()
        plain, compiled = make_writing(), make_writing(HFRollout(compile=CompileConfig(backend="eager")))
        prompt_ids = plain.tokenize(PROMPTS)
        calls = []
        original = compiled.model.get_compiled_call
        compiled.model.get_compiled_call = lambda config: calls.append(config.backend) or original(config)
        torch.manual_seed(0)
        expected = plain.complete(prompt_ids)
        torch.manual_seed(0)
        assert compiled.complete(prompt_ids) == expected
        assert calls == ["eager"]

    def test_nothing_is_compiled_unasked(self, make_writing, monkeypatch):
        trainer = make_writing()
        monkeypatch.setattr(trainer.model, "get_compiled_call", lambda config: pytest.fail("compiled"))
        trainer.complete(trainer.tokenize(PROMPTS))

    def test_compilation_that_cannot_be_is_refused_at_construction(self, make_writing):
        with pytest.raises(ValueError, match=r"HFRollout\(compile=True\).*'dynamic'` is not static: leave `compile`"):
            make_writing(HFRollout(compile=True), cache_implementation="dynamic")
        student = tiny.qwen2()
        student._can_compile_fullgraph = False
        with pytest.raises(ValueError, match="Qwen2ForCausalLM does not support it"):
            make_writing(HFRollout(compile=True), model=student)
