"""With `bf16=True` all products are in bfloat16, and nothing else is; dtypes that cannot be right are refused."""

from __future__ import annotations

import contextlib
import copy
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LNTuningConfig, LoraConfig
from support import tiny
from support.product_dtypes import PHASES, WatchedTrainer
from transformers import get_linear_schedule_with_warmup
from transformers.utils.import_utils import enable_tf32

from trl_opsd import HFRollout
from trl_opsd.models.padding import agree
from trl_opsd.parallel.precision import autocast, cast_weights, rounds_float32, warn_of_lost_updates

BF16 = ["bfloat16"]
KINDS = {
    "another": {},
    "base": {"teacher_model_kind": "base"},
    "live": {"teacher_model_kind": "live"},
    "ema": {"teacher_model_kind": "ema"},
    "several": {"teachers": 2},
}


@pytest.fixture
def watched(make_trainer):
    """Builds a trainer that generates its completions, evaluates, and records the dtypes of its products."""

    def make(kind: str = "another", lora: bool = False, **options):
        options = {"max_completion_length": 8, **KINDS[kind], **options}
        rows = tiny.rows()
        if options.pop("teachers", 1) > 1:
            options["teacher_model"] = {"a": tiny.qwen2(48, seed=1), "b": tiny.llama(64, seed=2)}
            rows = rows.add_column("teacher", ["a", "b"] * 4)
        elif kind != "another":
            options["teacher_model"] = None
            rows = rows.add_column("privileged_context", ["hint"] * 8)
        if lora:
            options |= adapter()
        return make_trainer(
            WatchedTrainer, rollout=HFRollout(), train_dataset=rows, eval_dataset=rows, max_steps=1, **options
        )

    return make


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("another", False), ("several", True), ("base", True), ("live", False), ("ema", True)],
)
def test_all_products_are_in_bfloat16_and_all_weights_stay_float32(watched, kind, lora):
    trainer = watched(kind, lora, bf16=True)
    trainer.train()
    assert trainer.dtypes() == dict.fromkeys(PHASES, BF16)
    trainer.evaluate()
    assert trainer.dtypes() == {phase: BF16 for phase in PHASES if phase != "backward"}
    assert {str(parameter.dtype) for parameter in trainer.model.parameters()} == {"torch.float32"}


def adapter(**given):
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", **given)}


FLOAT32 = {"model_init_kwargs": {"dtype": "float32"}}
NORMS = {"peft_config": LNTuningConfig(target_modules=["norm"], task_type="CAUSAL_LM")}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (adapter(), "bfloat16"),
        (adapter(use_dora=True), "bfloat16"),
        ({"bf16": False, **adapter()}, "float32"),
        ({}, "float32"),
        ({**adapter(), **FLOAT32}, "float32"),
        (adapter(modules_to_save=["lm_head"]), "float32"),
        (adapter(bias="lora_only"), "float32"),
        (adapter(init_lora_weights="pissa"), "float32"),
        (NORMS, "float32"),
    ],
    ids=["LoRA", "DoRA", "no bf16", "all trained", "asked for", "a trained head", "trained biases", "PiSSA", "norms"],
)
def test_frozen_base_is_loaded_in_its_compute_dtype(make_trainer, tmp_path, given, expected):
    tiny.qwen2().save_pretrained(tmp_path / "student")
    options = {"bf16": True, "max_completion_length": 4, "max_steps": 1, **given}
    trainer = make_trainer(model=str(tmp_path / "student"), rollout=HFRollout(), **options)
    weights = list(trainer.model.parameters())
    assert {str(one.dtype) for one in weights if not one.requires_grad} <= {f"torch.{expected}"}
    assert {one.dtype for one in weights if one.requires_grad} == {torch.float32}
    assert trainer.args.model_init_kwargs == given.get("model_init_kwargs")
    before = [one.detach().clone() for one in weights]
    trainer.train()
    moved = [not torch.equal(*pair) for pair in zip(before, weights, strict=True)]
    assert not any(moves and not one.requires_grad for moves, one in zip(moved, weights, strict=True))
    assert any(moved)
    with torch.no_grad():  # also outside of autocast, as after a training
        assert trainer.model.eval()(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_passed_model_keeps_its_dtype(make_trainer):
    student = tiny.qwen2()
    make_trainer(model=student, bf16=True, **adapter())
    assert {one.dtype for one in student.parameters()} == {torch.float32}


def test_a_run_resumes_with_its_base_in_another_dtype(trained, tmp_path):
    tiny.qwen2().save_pretrained(tmp_path / "student")
    given = {"model": str(tmp_path / "student"), "bf16": True, **adapter()}
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trained(**given, **saving, **FLOAT32)
    assert trained(**given, **saving, resume=str(tmp_path / "checkpoint-2")).state.global_step == 4


@pytest.mark.parametrize(("lora", "by_path"), [(False, False), (True, False), (True, True)])
def test_each_weight_is_rounded_once_per_generation(watched, tmp_path, lora, by_path):
    """But those of a frozen base that was loaded in bfloat16."""
    tiny.qwen2().save_pretrained(tmp_path / "student")
    trainer = watched(bf16=True, lora=lora, model=str(tmp_path / "student") if by_path else tiny.qwen2())
    trainer.rollout.prove()
    with trainer.products:
        written = trainer.complete(trainer.tokenize(tiny.PROMPTS[:2]))
    assert max(map(len, written)) > 4
    weights = [one for one in trainer.model.parameters() if one.dim() > 1 and (one.requires_grad or not by_path)]
    assert trainer.products.rounded_weights == len(weights) - (not by_path)  # the embedding


@pytest.mark.parametrize("given", [{}, {"generation_kwargs": {"num_beams": 2}}], ids=["rows leave", "beams"])
def test_a_static_cache_generates_the_same_tokens_under_autocast(make_trainer, given):
    def completions(**more):
        trainer = make_trainer(rollout=HFRollout(), bf16=True, max_completion_length=6, **given, **more)
        torch.manual_seed(0)
        return trainer.complete(trainer.tokenize(tiny.PROMPTS[:2]))

    assert completions(cache_implementation="static") == completions()


def test_weights_with_a_scale_are_not_replaced_by_rounded_copies():
    class Quantised(torch.nn.Linear):  # as FP8Linear of transformers
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states @ (self.weight.float() / 100).T if self.weight.itemsize == 1 else super().forward(states)

    layer = Quantised(8, 8).requires_grad_(False)
    layer.weight.data = (100 * layer.weight).to(torch.float8_e4m3fn)
    states = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(states)
        with cast_weights(layer, "cpu"):
            assert torch.equal(layer(states), expected)


@pytest.mark.parametrize("enable", [lambda: torch.set_float32_matmul_precision("high"), lambda: enable_tf32(True)])
def test_tf32_is_detected_however_enabled(enable):
    """`tf32=True` sets them by backend, after which torch answers no question about all of them."""
    assert not rounds_float32()
    enable()
    try:
        assert rounds_float32()
        assert agree(torch.full((3, 2), 1.01), torch.ones(3, 2))
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            backend.fp32_precision = "none"
    assert not agree(torch.full((3, 2), 1.01), torch.ones(3, 2))


@pytest.mark.parametrize(("mixed", "dtype"), [("bf16", torch.bfloat16), ("no", None)])
def test_a_launcher_that_casts_weights_alone_has_autocast_too(mixed, dtype):
    """As DeepSpeed, with which accelerate's own context does nothing."""
    accelerator = SimpleNamespace(mixed_precision=mixed, native_amp=False, device=torch.device("cpu"))
    accelerator.autocast = contextlib.nullcontext
    with autocast(accelerator):
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        assert dtype in (None, torch.get_autocast_dtype("cpu"))


def test_loss_and_gradient_are_as_accurate_as_with_naive_autocast(make_trainer):
    trainer = make_trainer(bf16=True, beta=0.0)
    student, teacher = trainer.model.eval(), trainer.teacher.model
    ids = torch.randint(3, tiny.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    rollout = tiny.rollout(ids[:, :8], ids[:, 8:], torch.ones_like(ids[:, 8:]))

    def naive(student, teacher):
        theirs, ours = (
            model(ids, use_cache=False).logits[:, 7:-1].to(wide).log_softmax(-1) for model in (teacher, student)
        )
        return (theirs.exp() * (theirs - ours)).sum(-1).mean()

    with autocast(trainer.accelerator):
        wide = torch.float32
        rounded = gradients(naive(student, teacher), student)
        loss = trainer.compare(student, rollout, trainer.teacher.targets(rollout), None).loss
    found = gradients(loss, student)
    wide, exact = torch.float64, copy.deepcopy(student).double()
    truth = gradients(naive(exact, copy.deepcopy(teacher).double()), exact)
    errors = [[float((a.double() - b).norm()) for a, b in zip(those, truth, strict=True)] for those in (found, rounded)]
    print("error of loss and gradient:", *errors)
    assert all(mine <= naives for mine, naives in zip(*errors, strict=True))
    assert errors[0][1] > 1e-4 * float(truth[1].norm()), "nothing was rounded"


def gradients(loss, model):
    """The loss, and its gradient in one piece."""
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert {one.dtype for one in found} == {next(model.parameters()).dtype}
    return loss.detach(), torch.cat([one.flatten() for one in found])


def mixed(change):
    """A model in bfloat16, except for one module."""
    model = tiny.qwen2(48, seed=1).bfloat16()
    MIXED[change](model)
    return model


MIXED = {
    "head": lambda model: model.lm_head.float(),
    "norms": lambda model: [one.float() for one in model.modules() if type(one).__name__ == "Qwen2RMSNorm"],
    "a layer in float16": lambda model: model.model.layers[0].half(),
}


@pytest.mark.parametrize(
    ("role", "change"), [("model", "norms"), ("teacher_model", "head"), ("teacher_model", "a layer in float16")]
)
def test_mixed_weight_dtypes_are_refused_unless_autocast_is_on(make_trainer, trained, role, change):
    called = {"model": "student", "teacher_model": "teacher"}[role]
    with pytest.raises(ValueError, match=rf"The {called} .* cannot run on eight tokens, RuntimeError: .*dtype"):
        make_trainer(**{role: mixed(change)})
    given = {"rollout": HFRollout(), "bf16": True, "max_steps": 1, "max_completion_length": 8}
    trainer = trained(WatchedTrainer, **{role: mixed(change)}, **given)
    assert trainer.dtypes() == dict.fromkeys(PHASES, BF16)


def test_a_float32_head_is_multiplied_in_float32_without_autocast(trained):
    """Without autocast, only a model that widens its hidden states itself can have such a head."""
    teacher = mixed("head")
    teacher.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    trainer = trained(WatchedTrainer, teacher_model=teacher, max_steps=1)
    assert trainer.dtypes()["loss"] == ["bfloat16", "float32"]  # the teacher's hidden states; all else


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_loss_hardly_depends_on_the_dtype_of_the_teacher(trained, dtype):
    (exact,), (rounded,) = (
        tiny.logged(trained(teacher_model=tiny.qwen2(48, seed=1).to(one), max_steps=1), "loss")
        for one in (torch.float32, dtype)
    )
    spacing = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert exact == pytest.approx(rounded, rel=4 * spacing)


@pytest.mark.refusal
@pytest.mark.before_loading
def test_float16_without_a_loss_scaler_is_refused(make_trainer):
    with pytest.raises(ValueError, match="`fp16=True` on a CPU: it has no float16 loss scaler"):
        make_trainer(fp16=True)


@pytest.mark.refusal
@pytest.mark.parametrize("bf16", [False, True])
def test_trained_float16_weights_are_refused(make_trainer, bf16):
    with pytest.raises(ValueError, match=r"\d+ trainable parameters of the student are float16"):
        make_trainer(model=tiny.qwen2().half(), bf16=bf16)


def test_an_adapter_on_float16_weights_learns(trained):
    trainer = trained(model=tiny.qwen2().half(), learning_rate=1e-2, **adapter())
    losses = tiny.logged(trainer, "loss")
    assert losses[-1] == losses[-1] != losses[0]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


LOST = r"(\d+)% of the student's trainable weights would not change in a step of .*, the learning rate: in bfloat16"


@pytest.mark.quick
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4])
def test_learning_rate_lost_in_bfloat16_warns_with_the_share(make_trainer, rate):
    with pytest.warns(UserWarning, match=LOST) as warned:
        trainer = make_trainer(model=tiny.qwen2().bfloat16(), learning_rate=rate, weight_decay=0.0, max_steps=1)
    (said,) = (int(found[1]) for one in warned if (found := re.match(LOST, str(one.message))))
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    trainer.train()
    learned = [(before[name], now) for name, now in trainer.model.named_parameters() if "embed_tokens" not in name]
    stayed = sum(int((was == now).sum()) for was, now in learned) / sum(now.numel() for _, now in learned)
    assert said / 100 == pytest.approx(stayed, abs=0.1)  # the tried weights include the embeddings


LOW = {"model": torch.bfloat16, "learning_rate": 1e-6}


@pytest.mark.parametrize(
    "given",
    [
        {"model": torch.float32, "learning_rate": 1e-8, "bf16": True},
        {"model": torch.bfloat16, "learning_rate": 1e-2},
        {**LOW, **adapter()},  # in float32
        {**LOW, "train_dataset": None, "eval_dataset": tiny.rows()},
        {**LOW, "rate of an optimizer": 1e-2},
        {**LOW, "rate of an optimizer": 1e-2, "warmup": 3},  # from 0
        {"teacher_model": torch.bfloat16, "learning_rate": 1e-8},
    ],
    ids=", ".join,
)
def test_kept_updates_do_not_warn(make_trainer, recwarn, given):
    given = dict(given)
    models = {role: tiny.qwen2().to(given[role]) for role in ("model", "teacher_model") if role in given}
    if rate := given.pop("rate of an optimizer", None):
        optimizer = torch.optim.AdamW(models["model"].parameters(), lr=rate)
        warmup = given.pop("warmup", None)
        given["optimizers"] = (optimizer, warmup and get_linear_schedule_with_warmup(optimizer, warmup, 9))
    make_trainer(**{**given, **models})
    assert [str(one.message) for one in recwarn if re.match(LOST, str(one.message))] == []


@pytest.mark.parametrize(
    ("kind", "mixed_precision", "is_main_process", "warns"),
    [
        ("DEEPSPEED", "bf16", True, False),
        ("FSDP", "bf16", True, False),  # widens them
        ("FSDP", "no", True, True),
        ("MULTI_CPU", "bf16", True, True),
        ("MULTI_CPU", "no", False, False),
    ],
)
def test_lost_updates_warn_only_without_float32_copies(kind, mixed_precision, is_main_process, warns):
    accelerator = SimpleNamespace(
        distributed_type=DistributedType(kind), mixed_precision=mixed_precision, is_main_process=is_main_process
    )
    with pytest.warns(UserWarning, match=LOST) if warns else contextlib.nullcontext():
        warn_of_lost_updates(tiny.qwen2().bfloat16(), accelerator, 1e-6)
