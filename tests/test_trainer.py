"""Guarantees of a run beyond its loss: the teacher stays frozen, evaluation has no side effects, modes are restored."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from support import tiny

from trl_opsd import FixedRollout, HFRollout, OPSDConfig, RolloutBackend
from trl_opsd.loop.batch import Batch


def fingerprint(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_training_without_a_train_dataset_is_refused(make_trainer):
    trainer = make_trainer(train_dataset=None, eval_dataset=tiny.rows(2))
    assert "eval_loss" in trainer.evaluate()
    with pytest.raises(ValueError, match="without a `train_dataset`: this trainer was built only to evaluate"):
        trainer.train()


@pytest.mark.quick
class TestTeacher:
    def test_training_does_not_change_the_teacher(self, make_trainer):
        trainer = make_trainer()
        before = fingerprint(trainer.teacher.model)
        trainer.train()
        assert same(before, fingerprint(trainer.teacher.model))
        assert not trainer.teacher.model.training
        assert not any(parameter.requires_grad for parameter in trainer.teacher.model.parameters())

    def test_targets_are_freed_after_their_last_micro_batch(self, make_trainer):
        class Watching(FixedRollout):
            def complete(self, prompt_ids, step):
                held.append(any(isinstance(one, Batch) for one in gc.get_objects()))
                return super().complete(prompt_ids, step)

        held: list = []
        trainer = make_trainer(rollout=Watching(tiny.recorded(tiny.tokenizer())), gradient_accumulation_steps=2)
        trainer.train()
        assert held == [False] * 3


@pytest.mark.quick
class TestRollout:
    def test_dropout_is_off_during_generation_and_on_again_afterwards(self, make_trainer):
        student = tiny.gpt2(dropout=0.5)
        trainer = make_trainer(
            model=student, teacher_model=tiny.gpt2(48, 1), rollout=HFRollout(), generation_kwargs={"do_sample": False}
        )
        student.train()
        prompt_ids = trainer.tokenize(["The sky is", "2+2="])
        first, second = trainer.complete(prompt_ids), trainer.complete(prompt_ids)
        assert first == second
        assert student.training

        student.eval()
        for prompt, written in zip(prompt_ids, first, strict=True):
            plain = student.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=2)
            assert written == plain[0, len(prompt) :].tolist()

    def test_a_failed_generation_restores_the_modes_of_the_student(self, make_trainer, monkeypatch):
        trainer = make_trainer(rollout=HFRollout(), gradient_checkpointing=True)
        trainer.model.gradient_checkpointing_enable()
        trainer.model.train()

        def fail(*args, **kwargs):
            assert (trainer.model.training, trainer.model.is_gradient_checkpointing) == (False, False)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(trainer.model, "generate", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.complete(trainer.tokenize(["2+2="]))
        assert trainer.model.training
        assert trainer.model.is_gradient_checkpointing

    def test_custom_backend_is_bound_once_called_per_generation_batch(self, trained):
        class Echo(RolloutBackend):
            def __init__(self):
                self.calls = []

            def bind(self, trainer):
                self.calls.append(trainer)

            def complete(self, prompt_ids, step):
                self.calls.append(step)
                return [ids[:3] for ids in prompt_ids]

        trainer = trained(rollout=(echo := Echo()), gradient_accumulation_steps=2)
        assert echo.calls == [trainer, 0, 1, 2]


class TestEvaluation:
    def test_evaluation_is_reproducible_and_preserves_random_states(self, make_trainer):
        trainer = make_trainer(rollout=HFRollout(), eval_dataset=tiny.rows(4))
        states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        first = trainer.evaluate()
        assert torch.equal(states[0], torch.get_rng_state())
        assert (states[1] == np.random.get_state()[1]).all()
        assert states[2] == random.getstate()
        torch.rand(7)
        assert trainer.evaluate()["eval_loss"] == first["eval_loss"]

    def test_training_is_the_same_with_and_without_evaluation(self, trained):
        short = {"rollout": HFRollout(), "max_completion_length": 8}
        alone = trained(**short)
        watched = trained(**short, eval_dataset=tiny.rows(4), eval_strategy="steps", eval_steps=1)
        assert tiny.logged(alone, "loss") == tiny.logged(watched, "loss")
        assert len(tiny.logged(watched, "eval_loss")) == 3

    @pytest.mark.quick
    def test_evaluation_loss_is_the_mean_over_tokens(self, make_trainer):
        trainer = make_trainer(eval_dataset=tiny.rows(3), per_device_eval_batch_size=2)
        loss = trainer.evaluate()["eval_loss"]
        trainer.model.eval()
        total = tokens = 0.0
        for prompt in tiny.PROMPTS[:3]:
            batch = trainer.score([{"prompt": prompt}])
            mean, count = trainer.compute_loss(trainer.model, batch).item(), batch.rollout.weights.sum().item()
            total, tokens = total + mean * count, tokens + count
        assert loss == pytest.approx(total / tokens, rel=1e-5)
        assert tiny.logged(trainer, "eval_divergence/mean") == [pytest.approx(loss)]


@pytest.mark.quick
class TestLogs:
    def test_means_are_over_all_tokens_since_the_last_log(self, trained):
        every, twice = trained(max_steps=2), trained(max_steps=2, logging_steps=2)
        tokens = np.array(tiny.logged(every, "completions/mean_length"))  # of two rows each, so lengths weigh as tokens
        expected = (np.array(tiny.logged(every, "divergence/mean")) * tokens).sum() / tokens.sum()
        assert tiny.logged(twice, "divergence/mean") == [pytest.approx(expected, rel=1e-5)]


def test_default_config_is_ours_and_named_after_the_student(make_trainer, tmp_path, monkeypatch):
    # The default is bf16, for which transformers wants an accelerator or `use_cpu=True`.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    tiny.qwen2(max_position_embeddings=1024).save_pretrained("student")
    teacher = tiny.qwen2(48, 1, max_position_embeddings=1024)
    trainer = make_trainer(model="student", teacher_model=teacher, args=None, train_dataset=tiny.rows(64))
    assert type(trainer.args) is OPSDConfig
    assert trainer.args.output_dir == "student-OPSD"


def test_evaluation_does_not_read_rows_of_the_one_before(make_trainer):
    kept = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "per_device_eval_batch_size": 2}
    trainer = make_trainer(eval_dataset=tiny.rows(), **kept)
    whole, again, one_row = (trainer.evaluate(rows)["eval_loss"] for rows in (None, None, tiny.rows(1)))
    assert whole == again != one_row
    predicted = trainer.predict(tiny.rows(1).to_iterable_dataset()).metrics
    assert predicted["test_loss"] == one_row
    assert predicted["test_samples_per_second"] > 0
