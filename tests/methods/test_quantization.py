"""A student that computes with quantised weights: its loss, gradient, engines and saved model, against float64.

O output features · I input features
"""

from __future__ import annotations

import copy
import faulthandler
import json
import re
from functools import cache
from typing import Any

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
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, PhimoeConfig

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd._compat.peft import base_name, without_peft
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


@cache
def expected(kind: str) -> tuple[float, Tensor, tuple[float, float]]:
    """In float64, row by row: the loss of a step, its gradient, and KL and agreement with the teacher."""
    student, teacher = models()
    for layer in inside(student).values():
        layer.weight.data = quantised(layer.weight.data, kind).float()
    values, kls, same = [], [], []
    for prompt, ids in zip(PROMPTS, IDS, strict=True):
        read, at = torch.tensor([[*prompt, *ids]]), slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        log = student.double()(read).logits[0, at].log_softmax(-1)
        target = teacher.double()(read).logits[0, at].detach().log_softmax(-1)
        values.append((log.exp() * (log - target)).sum(-1))
        kls.append((target.exp() * (target - log.detach())).sum(-1))
        same.append((log.argmax(-1) == target.argmax(-1)).double())
    loss = torch.cat(values).mean()
    loss.backward()
    gradient = torch.cat([one.grad.flatten() for one in student.parameters()])
    return float(loss.detach()), gradient, (float(torch.cat(kls).mean()), float(torch.cat(same).mean()))


def trainer_of(folder: Any, kind: Any, of: Any = None, peft_config: Any = None, **given: Any) -> Any:
    student, teacher = of or models()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1, "optim": "sgd"}
    options |= {"divergence": "reverse_kl", "learning_rate": 1.0, "max_grad_norm": 0.0, "shuffle_dataset": False}
    options |= {"student_quantization": kind, "certificate": True, "eval_on_start": True, **given}
    options |= {"max_completion_length": 60}
    rows = tiny.rows(8)
    fsdp_on_cpu.allow()
    return OPSDTrainer(
        model=student,
        teacher_model=teacher,
        args=tiny.config(folder, **options),
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
    loss, gradient, certificate = expected(kind)
    off = float((torch.from_numpy(moved) - gradient).abs().max() / gradient.abs().max())
    first, step = logs[0], logs[1]
    print(f"{where}, {kind}: {abs(step['loss'] / loss - 1):.1e} {off:.1e}")
    assert step["loss"] == pytest.approx(loss, rel=1e-5)
    assert off < 1e-5
    # Before the first step: what quantising alone has cost.
    found = [first[f"eval_certificate/{name}"] for name in ("kl", "agreement")]
    assert [first["step"], *found] == pytest.approx([0, *certificate], rel=1e-5)


@pytest.mark.parametrize(
    "kind", ["int4", "nvfp4", *(pytest.param(one, marks=pytest.mark.long) for one in ("int8", "fp8"))]
)
def test_layer_computes_with_the_weight_of_its_format(kind, monkeypatch):
    model = tiny.qwen2(64, seed=0)
    if kind == "nvfp4":  # a family that has no decoder of its own
        monkeypatch.setattr(type(model), "get_decoder", lambda self: self)
    expected_of = {name: quantised(one.weight.data, kind) for name, one in inside(model).items()}
    trainer_of("out", kind, of=(model, models()[1]))
    layers = {name.removeprefix("model."): one for name, one in fake_quantized(model).items()}
    assert layers.keys() == expected_of.keys()
    assert type(model.lm_head) is nn.Linear
    for name, layer in layers.items():
        torch.testing.assert_close(
            layer.quantizer.of_weight(layer.weight).double(), expected_of[name], atol=1e-7, rtol=1e-5
        )


@pytest.mark.parametrize("kind", ["int4", *(pytest.param(one, marks=pytest.mark.long) for one in FORMATS[1:])])
def test_loss_gradient_and_certificate_equal_float64(tmp_path, kind):
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
    student, teacher = models()
    student.to(getattr(torch, dtype)).save_pretrained(tmp_path / "base")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False) if tuned == "lora" else None
    trainer = trainer_of(tmp_path, kind, (student, teacher), lora, learning_rate=0.05, certificate=False)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "quantized")
    bits = 4 if kind == "nvfp4" or (kind, tuned) == ("int4", "all") else 8
    sizes = [
        sum(one.stat().st_size for one in (tmp_path / at).glob("*.safetensors")) for at in ("base", "final/quantized")
    ]
    layers = sum(one.weight.numel() for one in fake_quantized(trainer.model).values())
    spared = layers * ({"float32": 32, "bfloat16": 16}[dtype] - bits) / 8
    assert sizes[0] - sizes[1] > 0.7 * spared, "beside scales and names, bits of weights alone"
    if tuned == "lora":
        loaded = PeftModel.from_pretrained(loaded, tmp_path / "final")
    trainer.model.eval()
    ids = torch.tensor([PROMPTS[-1]])
    with torch.no_grad():
        own, theirs = trainer.model(ids).logits.float(), loaded(ids).logits.float()
    # In bfloat16 kernels that multiply before they scale round otherwise.
    assert float((own - theirs).abs().max()) <= (1e-4 if dtype == "float32" else 0.05) * float(own.abs().max())
    assert float((own - teacher(ids).logits).abs().max()) > 0.1


def test_saved_student_teaches_and_the_card_names_its_folder(tmp_path):
    trainer = trainer_of(tmp_path, "int4")
    trainer.save_model(tmp_path / "final")
    # Its weights are unpacked only when the whole model computes, which a teacher's backbone alone does not.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "quantized")
    teacher = trainer_of(tmp_path, None, (models()[0], loaded)).teacher.model
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


class Counting:
    """Counts how often weights are quantised."""

    activation = None

    def __init__(self, quantizer: Any) -> None:
        self.of, self.calls = quantizer, 0

    def of_weight(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return self.of.of_weight(weight)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_weight_is_quantised_once_a_step(tmp_path, checkpointing):
    given = {"certificate": False, "eval_on_start": False, "max_steps": 3, "gradient_checkpointing": checkpointing}
    trainer = trainer_of(tmp_path, "int4", **given)
    for layer in (layers := fake_quantized(trainer.model).values()):
        layer.quantizer = Counting(layer.quantizer)
    trainer.train()
    assert {layer.quantizer.calls for layer in layers} == {3}
    assert all(layer.kept is None for layer in layers)


@pytest.mark.parametrize("kind", ["int4", pytest.param(BOTH, marks=pytest.mark.long)])
def test_resumed_training_goes_on_bit_for_bit(tmp_path, kind):
    given = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    given["certificate"] = False
    one = trainer_of(tmp_path / "a", kind, **given)
    one.train()
    two = trainer_of(tmp_path / "b", kind, **{**given, "max_steps": 2, "lr_scheduler_type": "constant"})
    two.train()
    two = trainer_of(tmp_path / "b", kind, **given)
    two.train(resume_from_checkpoint=True)
    assert torch.equal(tiny.weights(one), tiny.weights(two))
    with pytest.raises(ValueError, match="methods: "):
        trainer_of(tmp_path / "b", "int8", **{**given, "max_steps": 6}).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("tuned", ["all", "lora"])
def test_base_teacher_is_the_student_before_it_was_quantised(tmp_path, tuned):
    student = tiny.qwen2(64, seed=0)
    student.save_pretrained(tmp_path / "base")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = tiny.qwen2(64, seed=0)
    lora = LoraConfig(r=4, target_modules=["q_proj"]) if tuned == "lora" else None
    trainer = trainer_of(tmp_path, "int4", (student, None), lora, teacher_model_kind="base", learning_rate=0.05)
    trainer.train()
    with trainer.teacher.lent() if tuned == "lora" else _itself(trainer.teacher.model) as teacher:
        ids = torch.tensor([PROMPTS[-1]])
        assert torch.equal(teacher(ids).logits, plain(ids).logits)
    assert trainer.state.log_history[0]["eval_certificate/kl"] > 1e-3
    assert trainer.state.log_history[1]["loss"] > 1e-3
    assert all(one.is_on for one in fake_quantized(trainer.model).values())


class _itself:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: Any) -> None:
        pass


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
    student, teacher = models()
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no `nn.Linear` in its decoder"):
        trainer_of(tmp_path, "int4", (tiny.gpt2(64), teacher))
    with pytest.raises(ValueError, match="the model has no path, but beside an adapter"):
        trainer_of(tmp_path, "int4", (student, teacher), LoraConfig(target_modules=["q_proj"]))
    models()[0].save_pretrained(tmp_path / "base")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="the adapter is a variant of LoRA such as DoRA"):
        trainer_of(tmp_path, "int4", (student, teacher), LoraConfig(target_modules=["q_proj"], use_dora=True))
    student, _ = models()
    trainer_of(tmp_path, "int4", (student, teacher))
    with pytest.raises(ValueError, match="`model` computes with the quantised weights of an earlier training"):
        trainer_of(tmp_path, None, (student, teacher))
    student, _ = models()
    student.save_pretrained(tmp_path / "base")
    save_quantized(type(student), tmp_path / "base", tmp_path / "q", BOTH.base_config, ["lm_head"], torch.device("cpu"))
    for one in (str(tmp_path / "q"), AutoModelForCausalLM.from_pretrained(tmp_path / "q")):
        with pytest.raises(ValueError, match="`StudentQuantization` with a student that is quantised already"):
            trainer_of(tmp_path, "int4", (one, teacher))


def test_a_quantised_student_is_refused_as_teacher(tmp_path):
    student, teacher = models()
    trainer_of(tmp_path, "int4", (student, teacher))
    average = trainer_of(tmp_path, "int4", (tiny.qwen2(64, seed=0), None), teacher_model_kind="ema", **_CONTEXT).teacher
    of_lora = tiny.qwen2(64, seed=0)
    of_lora.save_pretrained(tmp_path / "base")
    of_lora = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    unloaded = trainer_of(tmp_path, "int4", (of_lora, teacher), lora).model.unload()
    for kind in (None, "int4"):
        for one in (student, copy.deepcopy(student), unloaded, average):
            with pytest.raises(ValueError, match="`teacher_model` computes with the quantised weights of an earlier"):
                trainer_of(tmp_path, kind, (tiny.qwen2(64, seed=2), one))
    with pytest.raises(ValueError, match=re.escape("`teacher_model['b']` computes with the quantised weights of")):
        trainer_of(tmp_path, None, (tiny.qwen2(64, seed=2), {"a": teacher, "b": student}))


def loads_with_its_logits(trainer: Any, folder: Any, kind: Any = AutoModelForCausalLM) -> bool:
    trainer.save_model(folder)
    own, ids = trainer.model.eval(), torch.tensor([[5, 6, 7, 8]])
    loaded = kind.from_pretrained(folder / "quantized").eval()
    with torch.no_grad():
        return torch.allclose(own(input_ids=ids).logits, loaded(input_ids=ids).logits, atol=1e-5)


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
    tiny.qwen2(64, seed=0).bfloat16().save_pretrained(tmp_path / "base")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    if changed:
        student.model.layers[1].mlp.up_proj.weight.data *= 1.1  # as by an adapter that was merged into it
    trainer = trainer_of(tmp_path, "int4", (student, models()[1]), LoraConfig(r=4, target_modules=["q_proj"]))
    trainer.save_model(tmp_path / "final")
    folder = tmp_path / "final" / "quantized"
    assert folder.exists() != changed
    assert changed == ("up_proj.weight of" in caplog.text)
    if not changed:
        loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_modules())
        for name, layer in fake_quantized(trainer.model).items():
            saved = loaded[base_name(name)].weight.dequantize()
            torch.testing.assert_close(layer.quantizer.of_weight(layer.weight), saved, atol=0, rtol=0)


def test_student_with_an_adapter_is_synced_quantised(tmp_path):
    student, teacher = models()
    student.save_pretrained(tmp_path / "base")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trainer = trainer_of(tmp_path, "int4", (student, teacher), lora)
    plain = tiny.qwen2(64, seed=0)
    plain.load_state_dict({one.name: one.materialize() for one in weights_of(trainer.model)})
    ids = torch.tensor([PROMPTS[-1]])
    with torch.no_grad():
        torch.testing.assert_close(trainer.model.eval()(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
    assert without_peft(trainer.model).config._name_or_path


# ---- Certificates ---------------------------------------------------------------------------------------------------


def certified(folder: Any, **given: Any) -> Any:
    rows = tiny.rows(8)
    return OPSDTrainer(
        model=tiny.qwen2(32, seed=0),
        teacher_model=tiny.qwen2(48, seed=1),
        args=tiny.config(folder, **{"certificate": True, **given}),
        train_dataset=rows,
        eval_dataset=rows.select(range(5)),
        processing_class=WORDS,
        rollout=FixedRollout(tiny.recorded(WORDS)),
    )


def certificate_of(number: int) -> tuple[float, float, float]:
    """In float64, row by row; the last is the mean over rows of their mean KL."""
    student, teacher = tiny.qwen2(32, seed=0).double(), tiny.qwen2(48, seed=1).double()
    kls, same = [], []
    for prompt, ids in list(tiny.recorded(WORDS).items())[:number]:
        read, at = torch.tensor([[*prompt, *ids]]), slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        with torch.no_grad():
            own, target = (one(read).logits[0, at].log_softmax(-1) for one in (student, teacher))
        kls.append((target.exp() * (target - own)).sum(-1))
        same.append((own.argmax(-1) == target.argmax(-1)).double())
    of_rows = sum(float(one.mean()) for one in kls) / len(kls)
    return float(torch.cat(kls).mean()), float(torch.cat(same).mean()), of_rows


def certificate_in(folder: Any) -> list[float]:
    faulthandler.dump_traceback_later(forks.SECONDS, exit=True)
    trainer = certified(folder, per_device_eval_batch_size=2, student_temperature=0.7, teacher_temperature=1.3)
    found = trainer.evaluate()
    faulthandler.cancel_dump_traceback_later()
    return [found[f"eval_certificate/{name}"] for name in ("kl", "agreement")]


@pytest.mark.parametrize(
    "strategy",
    [
        "alone",
        pytest.param("ddp", marks=[pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]),
    ],
)
def test_rows_that_only_fill_a_batch_are_not_certified(tmp_path, strategy):
    found = certificate_in(tmp_path) if strategy == "alone" else forks.results(strategy, certificate_in, tmp_path)[0]
    assert found == pytest.approx(certificate_of(5)[:2], rel=1e-5)


def test_each_token_counts_alike_whatever_counts_alike_in_the_loss(tmp_path):
    options = {"loss_aggregation": "rows", "divergence": "forward_kl", "per_device_eval_batch_size": 2}
    found = certified(tmp_path, **options).evaluate()
    kl, agreement, of_rows = certificate_of(5)
    assert abs(kl - of_rows) > 1e-3
    assert found["eval_certificate/kl"] == pytest.approx(kl, rel=1e-5)
    assert found["eval_certificate/agreement"] == pytest.approx(agreement, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(of_rows, rel=1e-5)
    assert found["eval_divergence/mean"] == found["eval_loss"]
