"""With `seq_kd` the rows that the student does not write are written by their own teacher, from its own prompt."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from support import tiny
from test_off_policy import OPTIONS, Recording

from trl_opsd import HFRollout

WORDS = tiny.tokenizer()
LENGTH = 6
GREEDY = {**OPTIONS, "cls": Recording, "top_k": 1, "seq_kd": True, "max_completion_length": LENGTH, "max_steps": 2}
SECRETS = tiny.rows().add_column("privileged_context", [f"It is {number}." for number in range(8)])


def greedy(model, prompt, vocabulary=None):
    """What a model writes after a prompt, one token after the other, without `generate`."""
    ids, start = list(prompt), len(prompt)
    while len(ids) < start + LENGTH and (len(ids) == start or ids[-1] != WORDS.eos_token_id):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1, :vocabulary].argmax().item())
    return ids[start:]


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_teacher_writes_and_the_student_does_not(trained, offload):
    trainer = trained(**GREEDY, lmbda=0.0, teacher_offload=offload)
    assert trainer.asked == []
    assert len(trainer.taught) == 8
    for _, prompt, completion in trainer.taught:
        assert completion == greedy(trainer.teacher_model, prompt)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert {row["off_policy/share"] for row in logs} == {1.0}
    assert not trainer.teacher_model.training


def test_lmbda_divides_rows_between_writers_and_evaluates_the_student(trained):
    trainer = trained(**{**GREEDY, "max_steps": 4}, lmbda=0.5, learning_rate=1e-12, eval_dataset=tiny.rows(4))
    by_student = [ids == greedy(trainer.model, prompt) for _, prompt, ids in trainer.taught]
    by_teacher = [ids == greedy(trainer.teacher_model, prompt) for _, prompt, ids in trainer.taught]
    assert all(one != other for one, other in zip(by_student, by_teacher, strict=True))
    assert 4 <= sum(by_teacher) <= 12, "of 16"
    assert len(trainer.asked) == sum(by_student)
    trainer.evaluate()
    assert len(trainer.asked) == sum(by_student) + 4


@pytest.mark.parametrize("kind", [None, "base", "live", "ema"])
def test_the_teacher_writes_from_its_own_prompt(trained, kind):
    own = {} if kind is None else {"teacher_model": None, "teacher_model_kind": kind}
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if kind == "base" else {}
    trainer = trained(**GREEDY, lmbda=0.0, learning_rate=1e-12, train_dataset=SECRETS, **own, **lora)
    writes = trainer.model if kind else trainer.teacher_model
    for row, prompt, completion in trainer.taught:
        secret = WORDS(f"{row['privileged_context']}\n\n{row['prompt']}")["input_ids"]
        assert completion == greedy(writes, secret)
        assert WORDS.decode(prompt) == row["prompt"], "the student learns to write it without"
    assert any(completion != greedy(writes, prompt) for _, prompt, completion in trainer.taught)


def test_base_teacher_writes_without_the_adapter(trained):
    trainer = trained(
        **GREEDY,
        lmbda=0.0,
        train_dataset=SECRETS,
        teacher_model=None,
        teacher_model_kind="base",
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    secrets = [WORDS(f"{row['privileged_context']}\n\n{row['prompt']}")["input_ids"] for row, _, _ in trainer.taught]
    with trainer.model.disable_adapter():
        assert [ids for *_, ids in trainer.taught] == [greedy(trainer.model, secret) for secret in secrets]
    assert [ids for *_, ids in trainer.taught] != [greedy(trainer.model, secret) for secret in secrets]


def test_each_of_several_teachers_writes_its_rows(trained):
    teachers = {"wide": tiny.qwen2(48, seed=1), "narrow": tiny.qwen2(16, seed=2)}
    dataset = tiny.rows().add_column("teacher", ["wide", "narrow", "narrow", "wide"] * 2)
    trainer = trained(**GREEDY, lmbda=0.0, teacher_model=teachers, train_dataset=dataset)
    assert {row["teacher"] for row, _, _ in trainer.taught} == set(teachers)
    for row, prompt, completion in trainer.taught:
        assert completion == greedy(teachers[row["teacher"]], prompt)


def test_a_resumed_run_has_the_same_samples(make_trainer, trained, tmp_path):
    sampled = {
        **OPTIONS,
        "cls": Recording,
        "seq_kd": True,
        "lmbda": 0.5,
        "rollout": HFRollout(),
        "max_completion_length": LENGTH,
    }
    whole = trained(**sampled, save_strategy="steps", save_steps=2)
    resumed = make_trainer(**sampled)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.taught == whole.taught[8:]
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))
    with pytest.raises(ValueError, match="seq_kd: True in the checkpoint, False now"):
        make_trainer(
            **{**sampled, "seq_kd": False}, train_dataset=tiny.rows().add_column("completion", ["a"] * 8)
        ).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
