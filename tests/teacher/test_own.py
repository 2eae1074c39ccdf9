"""The student as its own teacher: without its adapter, averaged, or as it is now."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file
from support import tiny
from transformers import TrainerCallback

from trl_opsd import FixedRollout
from trl_opsd.options.rules import check_together
from trl_opsd.teacher.self_teacher import FILE, Average

LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)

ADAPTERS: dict[str, tuple[bool, Any]] = {
    "none": (False, None),
    "random": (False, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)),
    "dora": (False, LoraConfig(target_modules=["q_proj"], use_dora=True)),
    "parameters": (False, LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"])),
    "embedding": (True, LoraConfig(target_modules=["q_proj", "embed_tokens"])),
    "whole": (
        True,
        LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "tokens": (True, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[56, 110])),
    "head": (False, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "ia3": (False, IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "vera": (False, VeraConfig(target_modules=["q_proj"])),
}
"""And whether the student's head is tied."""
RARE = ("random", "dora", "parameters", "whole", "vera")


def privileged_rows() -> Dataset:
    return tiny.rows().map(lambda row, number: {"privileged_context": f"hint {number}"}, with_indices=True)


@pytest.fixture
def make_trainer(make_trainer):
    """Builds a trainer of a student that teaches itself, with a learning rate high enough to show."""

    def make(kind, **given):
        given = {"learning_rate": 1e-2, "max_grad_norm": 100.0, "train_dataset": privileged_rows(), **given}
        return make_trainer(**{"teacher_model": None, "teacher_model_kind": kind, **given})

    return make


IDS = torch.arange(20).reshape(2, 10) + 40


def read(teacher):
    """The logits of a teacher for two fixed rows."""
    rollout = tiny.rollout(IDS[:, :4], IDS[:, 4:], torch.ones(2, 6, dtype=torch.long))
    with torch.no_grad():
        return teacher.targets(rollout).hidden @ teacher.head.weight.T


def plain_logits(model):
    """The logits that `read` must return for this model in eval mode."""
    model.eval()
    with torch.no_grad():
        return model(IDS).logits[:, 3:-1]


class TestBase:
    @pytest.mark.quick
    def test_lora_teacher_is_the_frozen_model_under_the_adapter(self, make_trainer):
        before = plain_logits(tiny.qwen2(32, seed=0))
        trainer = make_trainer("base", peft_config=LORA)
        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        trainer.train()
        moved = [name for name, tensor in trainer.model.state_dict().items() if not torch.equal(weights[name], tensor)]
        assert moved
        assert all("lora_" in name for name in moved)
        torch.testing.assert_close(read(trainer.teacher), before, rtol=1e-5, atol=1e-5)
        assert trainer.teacher.model is trainer.model
        assert trainer.model.training
        assert (plain_logits(trainer.model) - before).abs().max() > 0.1

    @pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one in RARE)) for one in ADAPTERS])
    def test_with_any_adapter_the_teacher_is_the_student_as_given(self, make_trainer, name):
        tied, adapter = ADAPTERS[name]
        before = plain_logits(tiny.qwen2(32, seed=0, tie_word_embeddings=tied))
        student = tiny.qwen2(32, seed=0, tie_word_embeddings=tied)
        trainer = make_trainer("base", model=student, peft_config=adapter, save_strategy="steps", save_steps=3)
        trainer.train()
        with torch.no_grad():  # some kinds learn slowly
            for parameter in filter(lambda one: one.requires_grad, trainer.model.parameters()):
                parameter.add_(torch.linspace(0, 1, parameter.numel()).view_as(parameter))
        torch.testing.assert_close(read(trainer.teacher), before, rtol=1e-5, atol=1e-5)
        assert (plain_logits(trainer.model) - before).abs().max() > 1e-2

    @pytest.mark.refusal
    @pytest.mark.parametrize(
        ("init", "given"), [("pissa", "object"), ("pissa", "path"), ("pissa", "adapter"), ("olora", "object")]
    )
    def test_an_adapter_that_rewrites_base_weights_is_refused(self, make_trainer, tmp_path, init, given):
        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
        student: Any = tiny.qwen2(32, seed=0)
        if given == "path":
            student.save_pretrained(tmp_path / "student")
            student = str(tmp_path / "student")
        made = {"model": get_peft_model(student, lora)} if given == "adapter" else {"model": student}
        with pytest.raises(ValueError, match=f"init_lora_weights='{init}'.* is another model now"):
            make_trainer("base", **made, **({} if given == "adapter" else {"peft_config": lora}))

    @pytest.mark.refusal
    @pytest.mark.parametrize("bias", ["all", "lora_only"])
    def test_an_adapter_that_trains_base_biases_is_refused(self, make_trainer, bias):
        lora = LoraConfig(r=4, target_modules=["q_proj"], bias=bias)
        with pytest.raises(ValueError, match=r"q_proj.base_layer.bias' is trainable and shared by both"):
            make_trainer("base", peft_config=lora)

    @pytest.mark.refusal
    def test_changed_base_weight_is_error_at_the_next_checkpoint(self, make_trainer):
        class Drift(TrainerCallback):
            def on_step_end(self, args, state, control, model, **kwargs):
                if state.global_step == 3:
                    model.get_base_model().model.norm.weight.data.mul_(1.01)

        trainer = make_trainer("base", peft_config=LORA, callbacks=[Drift()], save_strategy="steps", save_steps=1)
        with pytest.raises(ValueError, match=r"model\.norm\.weight has changed since the student was passed"):
            trainer.train()
        assert trainer.state.global_step == 3

    def test_frozen_parts_of_the_adapter_stay_frozen(self, trained):
        student = get_peft_model(tiny.qwen2(32, 0), LoraConfig(r=4, target_modules="all-linear"))
        student.get_base_model().model.layers[0].requires_grad_(False)
        trainer = trained("base", model=student)
        names = {name for name, one in trainer.model.named_parameters() if one.requires_grad}
        assert names
        assert not [name for name in names if "layers.0" in name]

    def test_a_student_given_with_an_adapter_needs_no_privileged_context(self, trained):
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        trainer = trained("base", model=get_peft_model(tiny.qwen2(32, 0), lora), train_dataset=tiny.rows())
        assert trainer.state.log_history[0]["loss"] > 0.01


class TestLive:
    @pytest.mark.parametrize("lora", [None, LORA])
    @pytest.mark.quick
    def test_the_teacher_is_the_current_student(self, trained, lora):
        trainer = trained("live", peft_config=lora)
        assert trainer.model.training
        found, graphs = read(trainer.teacher), []
        hook = trainer.model.get_input_embeddings().register_forward_hook(
            lambda *_: graphs.append(torch.is_grad_enabled())
        )
        assert torch.equal(found, read(trainer.teacher)), "without dropout"
        trainer.teacher.targets(tiny.rollout(*torch.full((3, 1, 4), 7)))
        hook.remove()
        assert graphs == [False, False], "no activations are kept, although gradients are on"
        torch.testing.assert_close(found, plain_logits(trainer.model), rtol=1e-5, atol=1e-5)
        assert trainer.state.log_history[0]["loss"] > 0, "it scores after a prompt of its own"


def averaged(weights, rate, every):
    """The average after each optimizer step, given the student's weights before the first and after each step."""
    average = weights[0]
    for step, student in enumerate(weights[1:], start=1):
        if step % every == 0:
            average = {name: (1 - rate) * average[name] + rate * student[name] for name in average}
    return average


class Recording(FixedRollout):
    def bind(self, trainer):
        self.trainer, self.weights = trainer, []

    def complete(self, prompt_ids, step):
        self.weights.append(copy.deepcopy(self.trainer.model.state_dict()))
        return super().complete(prompt_ids, step)


class TestEma:
    @pytest.mark.parametrize(
        ("rate", "every", "lora"),
        [
            (0.25, 1, None),
            (0.5, 2, LORA),
            pytest.param(0.25, 1, LORA, marks=pytest.mark.long),
            pytest.param(0.5, 2, None, marks=pytest.mark.long),
            pytest.param(1.0, 3, None, marks=pytest.mark.long),
            pytest.param(1.0, 3, LORA, marks=pytest.mark.long),
        ],
    )
    def test_the_teacher_is_the_moving_average_of_the_student(self, make_trainer, rate, every, lora):
        recording = Recording(tiny.recorded(tiny.tokenizer()))
        options = {"teacher_update_rate": rate, "teacher_sync_steps": every, "rollout": recording, "max_steps": 4}
        trainer = make_trainer("ema", peft_config=lora, **options)
        trainer.train()
        expected = averaged([*recording.weights, trainer.model.state_dict()], rate, every)
        after = plain_logits(trainer.model)
        ours = read(trainer.teacher)
        trainer.model.load_state_dict(expected)
        torch.testing.assert_close(ours, plain_logits(trainer.model), rtol=1e-4, atol=1e-4)
        assert (ours - after).abs().max() > 1e-2

    @pytest.mark.parametrize(
        "lora", [pytest.param(None, marks=pytest.mark.long, id="full"), pytest.param(LORA, id="lora")]
    )
    def test_resumed_run_continues_the_average_of_what_is_trained(self, trained, lora, tmp_path):
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "peft_config": lora}
        whole = trained("ema", **saving, teacher_update_rate=0.3)
        names = {name for name, parameter in whole.model.named_parameters() if parameter.requires_grad}
        assert set(load_file(tmp_path / "checkpoint-2" / FILE)) == names, "nothing else is saved"
        again = trained("ema", **saving, teacher_update_rate=0.3, resume=str(tmp_path / "checkpoint-2"))
        assert torch.equal(read(whole.teacher), read(again.teacher))
        assert torch.equal(tiny.weights(whole), tiny.weights(again))

    @pytest.mark.refusal
    def test_a_checkpoint_without_an_average_is_refused(self, trained, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "peft_config": LORA}
        trained("base", **options)
        known = ["teachers", "teacher_model_kind", "teacher_update_rate", "teacher_sync_steps"]
        with pytest.raises(FileNotFoundError, match="ema_teacher"):
            trained("ema", **options, resume_with_changes=known, resume=str(tmp_path / "checkpoint-2"))

    def test_an_average_in_half_precision_keeps_moving(self):
        student = {"w": torch.full((4,), 1.0078125, dtype=torch.bfloat16)}  # the next number after 1
        teacher = {"w": torch.ones(4, dtype=torch.bfloat16)}
        average = Average(lambda: student, teacher, rate=0.05, every=1)
        for _ in range(100):
            average.update()
        assert torch.equal(teacher["w"], student["w"])

    @pytest.mark.parametrize("offload", [pytest.param("cpu", marks=pytest.mark.long), "stream"])
    def test_an_average_in_host_memory_gives_the_same_numbers(self, trained, offload):
        near, far = (trained("ema", teacher_update_rate=0.3, teacher_offload=one) for one in ("none", offload))
        assert torch.equal(read(near.teacher), read(far.teacher))
        assert torch.equal(tiny.weights(near), tiny.weights(far))

    @pytest.mark.refusal
    def test_an_average_of_more_than_lora_weights_is_refused(self, make_trainer):
        lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
        with pytest.raises(ValueError, match=r"averages LoRA weights only, but '.*lm_head.*' is trainable too"):
            make_trainer("ema", peft_config=lora)


@pytest.mark.refusal
def test_a_sharded_average_is_refused(tmp_path):
    args = tiny.config(tmp_path, teacher_model_kind="ema")
    args.teacher_offload = "zero3"  # set afterwards: the config refuses it where nothing is sharded
    with pytest.raises(ValueError, match="each process keeps the whole average"):
        check_together(args)


@pytest.mark.refusal
@pytest.mark.before_loading
def test_two_teachers_are_refused(make_trainer):
    with pytest.raises(ValueError, match=r"There are two teachers, .* `teacher_model_kind='base'`: remove one"):
        make_trainer("base", teacher_model=tiny.qwen2(48, 1))
