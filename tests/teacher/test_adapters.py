"""Adapters as teachers: the numbers of merged models, from one copy of their base."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support import tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trl_opsd.cli.main import app

NAMES = ["math", "code", "chat", "math", "chat", "code", "math", "math"]
LORA = {"r": 4, "target_modules": "all-linear"}
KINDS: dict[str, Any] = {
    "lora": {"math": LORA, "code": {"r": 2, "target_modules": ["q_proj", "down_proj"]}, "chat": LORA},
    "variants": {
        "math": {**LORA, "use_dora": True},
        "code": {**LORA, "use_rslora": True, "lora_alpha": 16},
        "chat": {**LORA, "modules_to_save": ["lm_head"]},
    },
    "heads": {
        "math": {**LORA, "modules_to_save": ["lm_head"]},
        "code": {**LORA, "modules_to_save": ["lm_head", "norm"]},
        "chat": {"r": 4, "target_modules": ["q_proj", "embed_tokens"]},
    },
    "types": {
        "math": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "code": VeraConfig(r=8, target_modules=["q_proj", "v_proj"], d_initial=0.5),
        "chat": {**LORA, "target_modules": ["q_proj"], "trainable_token_indices": [100, 101]},
    },
}
OFFLOADS = ["none", "cpu", "stream"]


@torch.no_grad()
def save_adapter(base: Path, folder: Path, config: Any, seed: int) -> None:
    """Saves an adapter that is far from its base, and beside it the model that it makes when merged."""
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spread = 0.3 if "lora_" in name else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(f"{folder}-merged")


def saved(folder: Path, kinds: dict[str, Any], **of_base: Any) -> tuple[Path, dict[str, str]]:
    """A base with its tokenizer, and adapters of it by name."""
    base = folder / "base"
    tiny.qwen2(48, 1, **of_base).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    paths = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        save_adapter(base, folder / name, LoraConfig(**kind) if isinstance(kind, dict) else kind, seed)
        paths[name] = str(folder / name)
    return base, paths


def merged(paths: dict[str, str]) -> dict[str, str]:
    return {name: f"{path}-merged" for name, path in paths.items()}


def given(teachers: dict[str, str]) -> dict[str, Any]:
    """One teacher, or several with rows that name them."""
    if len(teachers) == 1:
        return {"teacher_model": next(iter(teachers.values()))}
    names = [name if name in teachers else "math" for name in NAMES]
    return {"teacher_model": teachers, "train_dataset": tiny.rows().add_column("teacher", names)}


def step(trainer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all rows."""
    inputs = trainer.score(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(50.0))
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A base and adapters of a kind, saved once."""
    return cache(lambda kind: saved(tmp_path_factory.mktemp("experts"), KINDS[kind]))


EVERY = [*product([1, 3], KINDS, ["full", "lora", "lora of the base"], OFFLOADS)]
SHORT = [(3, "heads", "full", "stream"), (3, "heads", "lora of the base", "none")]


@pytest.mark.parametrize(
    ("number", "kind", "student", "offload"),
    [one if one in SHORT else pytest.param(*one, marks=pytest.mark.long) for one in EVERY],
)
def test_gradients_are_those_of_merged_teachers(make_trainer, experts, number, kind, student, offload):
    base, paths = experts(kind)
    paths = dict(list(paths.items())[:number])
    options: dict[str, Any] = {"per_device_train_batch_size": 8}
    options["peft_config"] = None if student == "full" else LoraConfig(**LORA)
    if student == "lora of the base":
        options["model"] = str(base)
    expected = step(make_trainer(**given(merged(paths)), **options))
    trainer = make_trainer(**given(paths), teacher_offload=offload, **options)
    assert_same(step(trainer), expected)


def storages(model: Any) -> dict[int, int]:
    """Bytes of each piece of memory of a model's weights."""
    return {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in model.parameters())}


def test_a_student_on_the_same_base_lends_its_weights(make_trainer, experts):
    base, paths = experts("variants")
    student = {"model": str(base), "peft_config": LoraConfig(**LORA)}
    trainer = make_trainer(**given(paths), **student, learning_rate=1e-2, save_strategy="steps", save_steps=3)
    teacher, mine = storages(trainer.teachers["math"].model), storages(trainer.model)
    assert all(one.model is trainer.teachers["math"].model for one in trainer.teachers.values())
    of_base = sum(storages(tiny.qwen2(48, 1)).values())
    assert sum(teacher[place] for place in teacher.keys() & mine.keys()) == of_base, "the base is there once"
    adapters = [load_file(f"{path}/adapter_model.safetensors").values() for path in paths.values()]
    own = sum(tensor.nbytes for weights in adapters for tensor in weights)
    assert sum(teacher[place] for place in teacher.keys() - mine.keys()) == own, "and no more than the adapters"
    batch = list(trainer.train_dataset)[:3]
    before = [row.hidden.clone() for row in trainer.score(batch).targets.rows]
    trainer.train()
    after = [row.hidden for row in trainer.score(batch).targets.rows]
    assert all(map(torch.equal, before, after)), "the teacher moved"
    assert not any(parameter.requires_grad for parameter in trainer.teachers["math"].model.parameters())
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-3"
    saved_names = load_file(checkpoint / "adapter_model.safetensors").keys()
    assert len(saved_names) == 2 * 7 * 2, "the student's own adapter alone"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == LORA["r"]


def edited(path: str, **values: Any) -> str:
    file = Path(path) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return path


def rewritten(path: str, change: Any) -> str:
    file = Path(path) / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights, next(name for name in weights if name.endswith("0.self_attn.q_proj.lora_A.weight")))
    save_file(weights, file)
    return path


def other_base(folder: Path, path: str, **sizes: Any) -> str:
    tiny.qwen2(**{"width": 48, **sizes}).save_pretrained(folder / "other")
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return edited(path, base_model_name_or_path=str(folder / "other"), target_modules=layers)


def words_added(folder: Path, path: str) -> str:
    words = tiny.tokenizer()
    words.add_tokens(["new"])
    words.save_pretrained(folder / "base")
    return path


REFUSED: dict[str, tuple[Any, str]] = {
    "a base that is gone": (
        lambda _, path: edited(path, base_model_name_or_path="gone/base"),
        r"math/adapter_config.json: base_model_name_or_path='gone/base'` is neither a folder",
    ),
    "PiSSA": (lambda _, path: edited(path, init_lora_weights="pissa"), "it changes its base, which others share"),
    "a base with fewer layers": (
        lambda folder, path: other_base(folder, path, num_hidden_layers=1),
        r"its file has too much: base_model.model.model.layers.1.* and \d+ more",
    ),
    "a base with more layers": (
        lambda folder, path: other_base(folder, path, num_hidden_layers=3),
        r"its file lacks base_model.model.model.layers.2.* and \d+ more",
    ),
    "a weight that is missing": (
        lambda _, path: rewritten(path, lambda weights, name: weights.pop(name)),
        r"its file lacks base_model.*layers.0.self_attn.q_proj.lora_A",
    ),
    "embeddings that were trained": (
        lambda _, path: rewritten(
            path,
            lambda weights, _: weights.update({"base_model.model.model.embed_tokens.weight": torch.zeros(261, 48)}),
        ),
        r"base_model.model.model.embed_tokens.weight of the base",
    ),
    "pickled weights": (
        lambda _, path: str((Path(path) / "adapter_model.safetensors").rename(Path(path) / "adapter_model.bin").parent),
        r"The adapter '.*math', on its base '.*base': .* a file named adapter_model.safetensors",
    ),
    "another tokenizer": (words_added, "id 259 is 'new' for the teacher and None for the student"),
}
CHEAP = ("a base that is gone", "a weight that is missing")


@pytest.mark.refusal
@pytest.mark.parametrize(
    "fault", [one if one in CHEAP else pytest.param(one, marks=pytest.mark.long) for one in REFUSED]
)
def test_an_adapter_that_cannot_teach_is_refused(make_trainer, tmp_path, fault):
    _, paths = saved(tmp_path, {"math": LORA})
    break_it, message = REFUSED[fault]
    with pytest.raises(ValueError, match=message):
        make_trainer(teacher_model=break_it(tmp_path, paths["math"]))


@pytest.mark.refusal
@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), "it changes the output head"),
        (LoraConfig(**LORA, bias="all"), "it changes its base, which others share"),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "it acts through prompts"),
    ],
)
def test_an_adapter_that_is_more_than_its_layers_is_refused(make_trainer, tmp_path, config, message):
    base = tmp_path / "base"
    tiny.qwen2(48, 1).save_pretrained(base)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "math")
    before = sum(storages(student := AutoModelForCausalLM.from_pretrained(base)).values())
    with pytest.raises(ValueError, match=message):
        make_trainer(model=student, peft_config=LoraConfig(**LORA), teacher_model=str(tmp_path / "math"))
    assert sum(storages(student.base_model).values()) <= before, "and the student's weights are untouched"


@pytest.mark.refusal
@pytest.mark.before_loading
def test_an_adapter_behind_a_server_is_refused(make_trainer, tmp_path):
    (tmp_path / "math").mkdir()
    LoraConfig(base_model_name_or_path=str(tmp_path / "base"), **LORA).save_pretrained(tmp_path / "math")
    tiny.qwen2(48, 1).config.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="`teacher_model`, an adapter, on a server"):
        make_trainer(teacher_model=str(tmp_path / "math"), teacher_server_url="http://127.0.0.1:1")


@pytest.mark.long
def test_a_run_with_adapters_resumes_bit_for_bit(trained, experts):
    _, paths = experts("lora")
    options = {**given(paths), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(**options)
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    assert torch.equal(tiny.weights(trained(**options, resume=str(checkpoint))), tiny.weights(whole))
    prints = json.loads((checkpoint / "opsd_fingerprint.json").read_text())
    assert [prints["teachers"][name].split()[0] for name in paths] == list(paths)
    assert len({prints["teacher_weights"][name] for name in paths}) == 3, "the adapter's weights count"
    swapped = {**options, "teacher_model": {**paths, "math": paths["chat"]}}
    with pytest.raises(ValueError, match=r"teachers: .*'chat"):
        trained(**swapped, resume=str(checkpoint))


@pytest.mark.long
def test_a_teacher_that_generates_is_its_adapter(make_trainer, experts):
    _, paths = experts("lora")
    written = []
    for teachers in (paths, merged(paths)):
        trainer = make_trainer(**given(teachers), lmbda=0.0, seq_kd=True, top_k=1, per_device_train_batch_size=8)
        written.append(trainer.score(list(trainer.train_dataset)).rollout.completion_ids.tolist())
    assert written[0] == written[1]
    assert len(set(map(tuple, written[0]))) > 3


@pytest.mark.long
def test_a_change_of_the_weights_that_are_lent_is_noticed(make_trainer, tmp_path):
    base, paths = saved(tmp_path, {"math": LORA})
    trainer = make_trainer(teacher_model=paths["math"], model=str(base), peft_config=LoraConfig(**LORA))
    trainer.teachers.check()
    trainer.train()
    trainer.model.merge_adapter()
    with pytest.raises(ValueError, match=r"q_proj.weight has changed since the student was passed, but a teacher"):
        trainer.teachers.check()


@pytest.mark.long
def test_plan_and_doctor_read_the_base(experts):
    base, paths = experts("lora")
    given = ["plan", str(base), paths["math"], "--no-bf16", "--prompt", "16", "--length", "16"]
    planned = yaml.safe_load(CliRunner().invoke(app, given).stdout)
    assert planned["placements"][0]["teacher"] == "none"
    assert planned["options"]["teacher_model_name_or_path"] == paths["math"]
    done = CliRunner().invoke(app, ["doctor", str(base), paths["math"]])
    assert yaml.safe_load(done.stdout)["ready"], done.output
