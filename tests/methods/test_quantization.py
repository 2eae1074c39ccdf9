"""A student that computes with quantised weights: its loss, gradient, engines and saved model, against float64.

O output features · I input features
"""

from __future__ import annotations

import copy
import faulthandler
import json
import re
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel
from support import forks, fsdp_on_cpu, tiny, vision_language
from support.number_formats import quantised
from support.rollouts import Apart
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    PhimoeConfig,
    Qwen2ForCausalLM,
)

from trl_opsd import OPSDTrainer
from trl_opsd._compat.peft import base_name
from trl_opsd._compat.sharding import trained_parameters, whole
from trl_opsd._compat.torchao import fake_quantized, save_quantized
from trl_opsd.rollout.weight_sync import weights_of

WORDS = tiny.tokenizer()
PROMPTS = WORDS(tiny.PROMPTS)["input_ids"]
TEXTS = ["4<|im_end|>", " blue, as it is", "no", "three four", "1", " b c", "x", "and white<|im_end|>"]
IDS: list[list[int]] = WORDS(TEXTS)["input_ids"]
BOTH = QATConfig(Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))
FORMATS = ("int4", "int8", "fp8", "nvfp4")


def models() -> tuple[Any, Any]:
    return tiny.qwen2(64, seed=0), tiny.qwen2(48, seed=1)


def inside(model: Any) -> dict[str, nn.Linear]:
    return {name: one for name, one in model.model.named_modules() if isinstance(one, nn.Linear)}


def loaded(folder: Any, saved_in: Any = torch.float32, **given: Any) -> Any:
    """The student as from a path, beside which adapters may be saved."""
    tiny.qwen2(64, seed=0).to(saved_in).save_pretrained(folder / "base")
    return AutoModelForCausalLM.from_pretrained(folder / "base", **given)


def compared(student: Any, teacher: Any) -> tuple[Tensor, float]:
    """In float64, row by row: the mean reverse KL, with a graph, and the share of tokens at which both agree on the
    likeliest.
    """
    values, same = [], []
    for prompt, ids in zip(PROMPTS, IDS, strict=True):
        read, at = torch.tensor([[*prompt, *ids]]), slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        log = student.double()(read).logits[0, at].log_softmax(-1)
        target = teacher.double()(read).logits[0, at].detach().log_softmax(-1)
        values.append((log.exp() * (log - target)).sum(-1))
        same.append((log.argmax(-1) == target.argmax(-1)).double())
    return torch.cat(values).mean(), float(torch.cat(same).mean())


@cache
def expected(kind: str) -> tuple[float, Tensor, float]:
    """The loss of a step, its gradient, and the agreement with the teacher before it."""
    student, teacher = models()
    for layer in inside(student).values():
        layer.weight.data = quantised(layer.weight.data, kind).float()
    loss, agreement = compared(student, teacher)
    loss.backward()
    gradient = torch.cat([one.grad.flatten() for one in student.parameters()])
    return float(loss.detach()), gradient, agreement


def trainer_of(folder: Any, kind: Any, of: Any = None, peft_config: Any = None, **given: Any) -> Any:
    student, teacher = of or models()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1, "optim": "sgd"}
    options |= {"divergence": "reverse_kl", "learning_rate": 1.0, "max_grad_norm": 0.0, "shuffle_dataset": False}
    options |= {"eval_on_start": True, "max_completion_length": 60, **given}
    rows = tiny.rows(8)
    fsdp_on_cpu.allow()
    return OPSDTrainer(
        model=student,
        teacher_model=teacher,
        args=tiny.config(folder, student_quantization=kind, **options),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=WORDS,
        peft_config=peft_config,
        rollout=Apart(dict(zip(map(tuple, PROMPTS), IDS, strict=True))),
    )


def run(folder: Any, kind: str, of: Any, **given: Any) -> tuple[Any, Any, Any]:
    """The logs of a step, how far it moved the latent weights at a rate of 1, and what is synced before it."""
    before = torch.cat([one.detach().flatten() for one in of[0].parameters()])
    trainer = trainer_of(folder, kind, of=of, **given)
    trainer.train()
    parameters = trained_parameters(trainer.accelerator.unwrap_model(trainer.model)).values()
    after = torch.cat([whole(one).detach().flatten() for one in parameters])
    return trainer.state.log_history, (before - after).numpy(), trainer


def check(where: str, kind: str, logs: Any, moved: Any) -> None:
    loss, gradient, agreement = expected(kind)
    off = float((torch.from_numpy(moved) - gradient).abs().max() / gradient.abs().max())
    first, step = logs[0], logs[1]
    print(f"{where}, {kind}: {abs(step['loss'] / loss - 1):.1e} {off:.1e}")
    assert step["loss"] == pytest.approx(loss, rel=1e-5)
    assert off < 1e-5
    # Before the first step: what quantising alone has cost.
    found = [first[f"eval_{name}"] for name in ("divergence/mean", "agreement/first")]
    assert [first["step"], *found] == pytest.approx([0, loss, agreement], rel=1e-5)


@pytest.mark.parametrize(
    "kind", ["int4", "nvfp4", *(pytest.param(one, marks=pytest.mark.long) for one in FORMATS[1:3])]
)
def test_loss_gradient_and_evaluation_equal_float64(tmp_path, kind, monkeypatch):
    if kind == "nvfp4":  # a family that has no decoder of its own
        monkeypatch.setattr(Qwen2ForCausalLM, "get_decoder", lambda self: self)
    check("one", kind, *run(tmp_path, kind, models())[:2])


@pytest.mark.long
@pytest.mark.parametrize("given", [{"gradient_checkpointing": True}, {"padding_free": True}, {"overlap": "step"}])
def test_recomputed_and_packed_rows_equal_float64(tmp_path, given):
    check(str(given), "nvfp4", *run(tmp_path, "nvfp4", models(), **given)[:2])


def in_two(folder: Any, kinds: list[str]) -> list[Any]:
    faulthandler.dump_traceback_later(290, exit=True)
    made, found = [models() for _ in kinds], []  # before there is a DeepSpeed config, which would split them
    for kind, of in zip(kinds, made, strict=True):
        logs, moved, trainer = run(folder / kind, kind, of, gradient_accumulation_steps=2)
        trainer.save_model(folder / kind)
        with_sync = {}
        for one in weights_of(trainer.model):
            with trainer.gathered([part for part in one.parts if hasattr(part, "ds_id")]):
                with_sync[one.name] = whole(one.materialize()).clone().float().numpy()
        found.append((logs, moved, with_sync))
    faulthandler.cancel_dump_traceback_later()
    return found


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
@pytest.mark.parametrize("strategy", ["ddp", "zero2_cpu", "zero3_cpu", "fsdp2_cpu"])
def test_two_processes_take_the_step_of_float64(tmp_path, strategy):
    for kind, (logs, moved, sent) in zip(
        FORMATS, forks.results(strategy, in_two, tmp_path, list(FORMATS))[0], strict=True
    ):
        check(strategy, kind, logs, moved)
        student = AutoModelForCausalLM.from_pretrained(tmp_path / kind / "quantized")
        latent = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        student(torch.tensor([PROMPTS[0]]))  # compressed-tensors unpacks weights when they are first needed
        for name, layer in inside(student).items():
            saved = layer.weight.dequantize() if hasattr(layer.weight, "qdata") else layer.weight.detach()
            torch.testing.assert_close(torch.from_numpy(sent[f"model.{name}.weight"]), saved, atol=0, rtol=0)
            torch.testing.assert_close(
                saved.double(), quantised(latent.model.get_submodule(name).weight.data, kind), atol=1e-6, rtol=1e-5
            )


@pytest.mark.parametrize("kind", ["int4", *(pytest.param(one, marks=pytest.mark.long) for one in (*FORMATS[1:], BOTH))])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("tuned", ["all", "lora"])
def test_saved_student_loads_with_its_logits(tmp_path, kind, dtype, tuned):
    student, teacher = loaded(tmp_path, getattr(torch, dtype)), models()[1]
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False) if tuned == "lora" else None
    trainer = trainer_of(tmp_path, kind, (student, teacher), lora, learning_rate=0.05)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "quantized")
    bits = 4 if kind == "nvfp4" or (kind, tuned) == ("int4", "all") else 8
    sizes = [
        sum(one.stat().st_size for one in (tmp_path / at).glob("*.safetensors")) for at in ("base", "final/quantized")
    ]
    layers = sum(one.weight.numel() for one in fake_quantized(trainer.model).values())
    spared = layers * ({"float32": 32, "bfloat16": 16}[dtype] - bits) / 8
    assert sizes[0] - sizes[1] > 0.7 * spared, "beside scales and names, bits of weights alone"
    if tuned == "lora":
        saved = PeftModel.from_pretrained(saved, tmp_path / "final")
    trainer.model.eval()
    ids = torch.tensor([PROMPTS[-1]])
    with torch.no_grad():
        own, theirs = trainer.model(ids).logits.float(), saved(ids).logits.float()
    # In bfloat16 kernels that multiply before they scale round otherwise.
    assert float((own - theirs).abs().max()) <= (1e-4 if dtype == "float32" else 0.05) * float(own.abs().max())
    assert float((own - teacher(ids).logits).abs().max()) > 0.1


def test_saved_student_teaches(tmp_path):
    trainer = trainer_of(tmp_path, "int4")
    trainer.save_model(tmp_path / "final")
    # Its weights are unpacked only when the whole model computes, which a teacher's backbone alone does not.
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "quantized")
    teacher = trainer_of(tmp_path, None, (models()[0], saved)).teacher.model
    ids = torch.tensor([PROMPTS[-1]])
    torch.testing.assert_close(teacher(ids).logits, trainer.model.eval()(ids).logits)


def test_generation_keeps_quantised_weights_and_forgets_them(tmp_path):
    trainer = trainer_of(tmp_path, "int4")
    model, ids = trainer.model, torch.tensor([PROMPTS[-1]])
    how = {"max_new_tokens": 20, "do_sample": False}
    slow = model.eval().generate(ids, **how)
    with trainer.student_for_generation() as student:
        assert all(one.kept is not None for one in fake_quantized(student).values())
        assert torch.equal(student.generate(ids, **how), slow)
    assert all(one.kept is None for one in fake_quantized(model).values())
    for layer in fake_quantized(model).values():
        layer.is_on = False
    assert not torch.equal(model.generate(ids, **how), slow)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_weight_is_quantised_once_a_step(tmp_path, checkpointing):
    given = {"eval_on_start": False, "max_steps": 3, "gradient_checkpointing": checkpointing}
    trainer = trainer_of(tmp_path, "int4", **given)
    for layer in (layers := fake_quantized(trainer.model).values()):
        layer.quantizer = SimpleNamespace(activation=None, of_weight=Mock(side_effect=layer.quantizer.of_weight))
    trainer.train()
    assert {layer.quantizer.of_weight.call_count for layer in layers} == {3}
    assert all(layer.kept is None for layer in layers)


@pytest.mark.parametrize("kind", ["int4", pytest.param(BOTH, marks=pytest.mark.long)])
def test_resumed_training_goes_on_bit_for_bit(tmp_path, kind):
    given = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    whole, resumed = (trainer_of(tmp_path, kind, **given) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(tiny.weights(whole), tiny.weights(resumed))
    with pytest.raises(ValueError, match="methods: "):
        trainer_of(tmp_path, "int8", **given).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("tuned", ["all", "lora"])
def test_base_teacher_is_the_student_before_it_was_quantised(tmp_path, tuned):
    lora = LoraConfig(r=4, target_modules=["q_proj"]) if tuned == "lora" else None
    given = {"teacher_model_kind": "base", "learning_rate": 0.05}
    trainer = trainer_of(tmp_path, "int4", (loaded(tmp_path), None), lora, **given)
    trainer.train()
    ids = torch.tensor([PROMPTS[-1]])
    with trainer.teacher.lent() if lora else nullcontext(getattr(trainer.teacher, "model", None)) as teacher:
        assert torch.equal(teacher(ids).logits, models()[0](ids).logits)
    assert trainer.state.log_history[0]["eval_divergence/mean"] > 1e-3
    assert trainer.state.log_history[1]["loss"] > 1e-3
    assert all(one.is_on for one in fake_quantized(trainer.model).values())


def test_average_and_live_teachers_are_quantised_too(tmp_path):
    for kind in ("ema", "live"):
        trainer = trainer_of(tmp_path, "int4", (tiny.qwen2(64, seed=0), None), teacher_model_kind=kind, **_CONTEXT)
        assert fake_quantized(trainer.teacher.model).keys() == fake_quantized(trainer.model).keys()


_CONTEXT = {"teacher_temperature": 0.7}
"""Without a difference a student has nothing to learn from itself."""


UNBASED = QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32))


@pytest.mark.parametrize("given", ["int5", 4, UNBASED])
def test_formats_that_mean_nothing_are_refused(tmp_path, given):
    with pytest.raises(ValueError, match=r"StudentQuantization\.format"):
        trainer_of(tmp_path, given)


def test_students_that_cannot_be_quantised_are_refused(tmp_path):
    def refused(named: str, kind: Any, student: Any, lora: Any = None) -> None:
        with pytest.raises(ValueError, match=named):
            trainer_of(tmp_path, kind, (student, models()[1]), lora)

    dora = LoraConfig(target_modules=["q_proj"], use_dora=True)
    refused(r"GPT2LMHeadModel has no `nn.Linear` in its decoder", "int4", tiny.gpt2(64))
    refused("the model has no path, but with an adapter", "int4", models()[0], LoraConfig(target_modules=["q_proj"]))
    refused("the adapter is a variant of LoRA such as DoRA", "int4", loaded(tmp_path), dora)
    student = models()[0]
    trainer_of(tmp_path, "int4", (student, models()[1]))
    refused("`model` computes with the quantised weights of an earlier training", None, student)
    of = BOTH.base_config, ["lm_head"], torch.device("cpu")
    save_quantized(type(student), tmp_path / "base", tmp_path / "q", *of)
    for one in (str(tmp_path / "q"), AutoModelForCausalLM.from_pretrained(tmp_path / "q")):
        refused("`StudentQuantization` with a student that is quantised already", "int4", one)


def test_a_quantised_student_is_refused_as_teacher(tmp_path):
    student, teacher = models()
    trainer_of(tmp_path, "int4", (student, teacher))
    average = trainer_of(tmp_path, "int4", (tiny.qwen2(64, seed=0), None), teacher_model_kind="ema", **_CONTEXT).teacher
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    unloaded = trainer_of(tmp_path, "int4", (loaded(tmp_path), teacher), lora).model.unload()
    for kind in (None, "int4"):
        for one in (student, copy.deepcopy(student), unloaded, average):
            with pytest.raises(ValueError, match="`teacher_model` computes with the quantised weights of an earlier"):
                trainer_of(tmp_path, kind, (tiny.qwen2(64, seed=2), one))
    with pytest.raises(ValueError, match=re.escape("`teacher_model['b']` computes with the quantised weights of")):
        trainer_of(tmp_path, None, (tiny.qwen2(64, seed=2), {"a": teacher, "b": student}))


def loads_with_its_logits(trainer: Any, folder: Any, kind: Any = AutoModelForCausalLM) -> bool:
    trainer.save_model(folder)
    own, ids = trainer.model.eval(), torch.tensor([[5, 6, 7, 8]])
    saved = kind.from_pretrained(folder / "quantized").eval()
    with torch.no_grad():
        return torch.allclose(own(input_ids=ids).logits, saved(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize("kind", ["int4", *(pytest.param(one, marks=pytest.mark.long) for one in FORMATS[1:])])
def test_experts_and_routers_stay_and_are_saved(tmp_path, kind):
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    config = PhimoeConfig(vocab_size=259, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, **sizes)
    trainer = trainer_of(tmp_path, kind, (tiny.model(config), models()[1]))  # its router is a subclass of `nn.Linear`
    assert {name.split(".")[-1] for name in fake_quantized(trainer.model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert loads_with_its_logits(trainer, tmp_path / "final")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("family", ["gemma3", "llava"])  # the first has another subclass in its vision tower
def test_student_that_sees_is_saved_with_its_processor(tmp_path, family, kind):
    given = {**vision_language.arguments(family), "model": vision_language.model(family, 64, 0, sees=True)}
    args, rows = tiny.config(tmp_path, student_quantization=kind), vision_language.rows([1, 1])
    trainer = OPSDTrainer(**given, args=args, train_dataset=rows, rollout=Apart({}))
    assert not any("vision" in name or "visual" in name for name in fake_quantized(trainer.model))
    assert loads_with_its_logits(trainer, tmp_path / "final", AutoModelForImageTextToText)
    AutoProcessor.from_pretrained(tmp_path / "final" / "quantized")


def test_groups_as_wide_as_the_last_layer_are_groups(tmp_path):
    student = tiny.qwen2(128, seed=0, intermediate_size=64)
    trainer = trainer_of(tmp_path, IntxWeightOnlyConfig(torch.int4, PerGroup(64)), (student, models()[1]))
    trainer.save_model(tmp_path / "final")
    said = json.loads((tmp_path / "final" / "quantized" / "config.json").read_text())["quantization_config"]
    weights = said["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["group_size"]) == ("group", 64)


@pytest.mark.parametrize("changed", [False, True])
def test_base_of_an_adapter_is_saved_as_trained(tmp_path, changed, caplog):
    student = loaded(tmp_path, torch.bfloat16, dtype=torch.float32)
    if changed:
        student.model.layers[1].mlp.up_proj.weight.data *= 1.1  # as by an adapter that was merged into it
    trainer = trainer_of(tmp_path, "int4", (student, models()[1]), LoraConfig(r=4, target_modules=["q_proj"]))
    trainer.save_model(tmp_path / "final")
    folder = tmp_path / "final" / "quantized"
    assert folder.exists() != changed
    assert changed == ("up_proj.weight of" in caplog.text)
    if not changed:
        layers = dict(AutoModelForCausalLM.from_pretrained(folder).named_modules())
        for name, layer in fake_quantized(trainer.model).items():
            saved = layers[base_name(name)].weight.dequantize()
            torch.testing.assert_close(layer.quantizer.of_weight(layer.weight), saved, atol=0, rtol=0)


def test_student_with_an_adapter_is_synced_quantised(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trainer = trainer_of(tmp_path, "int4", (loaded(tmp_path), models()[1]), lora)
    plain = tiny.qwen2(64, seed=0)
    plain.load_state_dict({one.name: one.materialize() for one in weights_of(trainer.model)})
    ids = torch.tensor([PROMPTS[-1]])
    with torch.no_grad():
        torch.testing.assert_close(trainer.model.eval()(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
