"""`trl-opsd plan` counts what published models have, predicts what was measured here, and prints options that exist."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from support import tiny, vision_language
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trl_opsd._compat.versions import CACHE
from trl_opsd.cli.main import app
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.plan import (
    SHARE,
    Choice,
    Load,
    considered,
    host_bytes,
    loss,
    of_engine,
    options,
    phases,
    shape_of,
)
from trl_opsd.models.weights import cached_numbers, cached_per_token

SHAPES = Path(__file__).with_name("shapes")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEEING = ("gemma3", "gemma4", "qwen3_vl")
LOAD = Load(gpus=1, batch=8, prompt=512, length=512, half=True, checkpointing=True)
ON_80_GB = replace(LOAD, memory=80 * 10**9)


def of(name: str):
    return shape_of(str(SHAPES / f"qwen2.5-{name}.json"))


_SHORT = ("--batch", 1, "--prompt", 16, "--length", 16)
_IN_FLOAT32 = (*map(str, _SHORT), "--no-bf16", "--engine", "transformers")


def a_gigabyte(rows: int, products: str) -> int:
    """Activations of a row, where they need not be traced."""
    return rows * 10**9


@pytest.fixture
def planned(tmp_path):
    """Runs the command on two layers of a student, which it traces, and on a whole teacher."""

    def planned(*arguments, student="0.5b", teacher="7b"):
        config = json.loads((SHAPES / f"qwen2.5-{student}.json").read_text())
        (tmp_path / "student.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
        models = [str(tmp_path / "student.json"), str(SHAPES / f"qwen2.5-{teacher}.json")]
        return CliRunner().invoke(app, ["plan", *models, *map(str, arguments)])

    return planned


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "parameters", "beside_embeddings"),
    [("0.5b", 0.49, 0.36), ("1.5b", 1.54, 1.31), ("7b", 7.61, 6.53), ("32b", 32.5, 31.0), ("72b", 72.7, 70.0)],
)
def test_parameter_counts_match_model_cards(name, parameters, beside_embeddings):
    """Figures of the models' cards, in billions."""
    shape = of(name)
    assert shape.parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    assert (shape.parameters - shape.head - shape.embeddings) / 1e9 == pytest.approx(beside_embeddings, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [("single", "none", 4, 64, 64, 1), ("zero3", "none", 4, 64, 64, 0)],
    ids=["single", "zero3"],
)
def test_peak_of_each_phase_is_predicted_within_15_percent(case, monkeypatch):
    """`benchmarks/plan.py` has more of them. Measured in processes of their own, by their resident memory."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = importlib.import_module("plan").compared(*case)
    assert list(found) == ["rollout", "scoring", "training"]
    for phase, (predicted, measured) in found.items():
        assert predicted == pytest.approx(measured, rel=0.15), (phase, found)
        assert measured > 400e6


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "tokens", "of_token"),
    [
        ({}, 246, 16 + 2),
        ({"memory": 24 * 10**9}, 240, 16 + 2),
        ({"memory": 80 * 10**9}, 480, 16 + 2),
    ],
)
def test_loss_tiles_are_planned_as_the_loss_makes_them(given, tokens, of_token):
    """`test_cost.py` has the loss itself."""
    assert loss(of("1.5b"), of("7b"), 9999, replace(LOAD, **given))[0] == 151936 * tokens * of_token


BY_HAND = {
    "1.5B and 7B on one device": (
        ("1.5b", "7b", Choice("single", "none", 16), replace(LOAD, batch=16, length=1024), 0, 8.7),
        [
            6.2 + 12.4 + 15.2 + 3.1 + 0.9,
            6.2 + 12.4 + 15.2 + 3.1,
            6.2 + 12.4 + 6.2 + 15.2 + 0.47 + 8.7 + 0.6 + 1.0 + 0.1,
        ],
    ),
    "with an engine": (
        ("1.5b", "7b", Choice("single", "none", 16, "vllm"), replace(LOAD, batch=16, length=1024), 8.0, 8.7),
        [6.2 + 12.4 + 15.2 + 3.1 + 0.2 + 8, 36.9 + 8, 50.9 + 8],
    ),
    "1.5B that teaches itself, DDP": (
        ("1.5b", "1.5b", Choice("ddp", "itself", 8), replace(LOAD, gpus=2), 0, 4.4),
        [6.2 + 12.4 + 3.1 + 0.3 + 6.2, 6.2 + 12.4 + 0.7 + 6.2, 6.2 + 12.4 + 6.2 + 6.2 + 0.5 + 4.4 + 0.7 + 0.9],
    ),
    "an adapter that the base teaches, DDP": (
        ("7b", "7b", Choice("ddp", "itself", 8), replace(LOAD, gpus=2, lora=64), 0, 4.4),
        [15.9 + 1.3 + 0.7 + 0.6, 15.9 + 1.3 + 1.5 + 0.6, 15.9 + 1.3 + 0.6 + 0.6 + 4.4 + 0.7],
    ),
    "7B and 72B on eight": (
        ("7b", "72b", Choice("zero3", "zero3", 8), replace(LOAD, gpus=8), 0, 4.4),
        [1.9 + 11.4 + 3.8 + 1 + 15.2 + 0.7, 18.1 + 5.3 + 2.9, 18.1 + 1.1 + 3.1 + 4.4 + 0.6 + 2.2 + 0.1],
    ),
    "the same with FSDP2": (
        ("7b", "72b", Choice("fsdp2", "stream", 8), replace(LOAD, gpus=8), 0, 4.4),
        [
            3.8 + 7.6 + 2.5 + 2 * (2 * 0.233 + 0.545) + 0.7,
            3.8 + 7.6 + 8.5 + 2.9,
            3.8 + 7.6 + 3.8 + 2.5 + 2.0 + (1.1 + 1.1 + 2.2 + 0.3) + 4.4 + 0.7 + 2.2 + 0.1,
        ],
    ),
}
"""Models, placement, load, GB of an engine and of activations; and GB of each phase: weights, optimizer, gradients,
teacher, copies of weights (of the head alone while the student learns), the proof of a sync, activations, loss tile,
the rest.
"""


@pytest.mark.quick
@pytest.mark.parametrize("name", BY_HAND)
def test_phases_add_up_to_sums_by_hand(name):
    (student, teacher, choice, load, engine, activations), expected = BY_HAND[name]
    found = phases(of(student), of(teacher), load, choice, lambda *_: int(activations * 1e9), int(engine * 1e9))
    assert [sum(parts.values()) / 1e9 for parts in found.values()] == pytest.approx(expected, abs=0.2)


def test_host_memory_is_that_of_the_pinned_weights():
    student, teacher = of("7b"), of("72b")
    load = replace(LOAD, gpus=8)
    kept = {name: host_bytes(student, teacher, load, Choice("zero3", name, 1)) for name in ("none", "stream", "zero3")}
    layer = 3 * 2**26 + 2 * 2**24 + 2 * 2**21  # an eighth of each product, in bytes, up to a power of two
    assert kept == {
        "none": 0,
        "stream": 8 * 2 * teacher.parameters,
        "zero3": pytest.approx(8 * (80 * layer + 2 * 2**29), rel=1e-3),
    }
    offloaded = [
        host_bytes(student, teacher, replace(load, lora=r), Choice("zero3_offload", "none", 1)) for r in (None, 16)
    ]
    adapter = 16 * student.linear
    assert offloaded == [22 * student.parameters, 2 * student.parameters + 22 * adapter]


ORDERS = {
    "one copy before eight": (
        ("7b", "72b", 8, "transformers"),
        [("zero3", "zero3", "transformers", 162, 0), ("zero2", "stream", "transformers", 1163, 0)],
    ),
    "asleep only where it must": (
        ("7b", "72b", 8, "vllm"),
        [("zero3", "zero3", "vllm", 162, 0), ("zero2", "stream", "vllm, sleeping", 1163, 0)],
    ),
    "on the devices before the host": (("1.5b", "7b", 8, "server"), [("ddp", "none", "server", 0, 1)]),
    "an offloaded student, then a server": (
        ("7b", "72b", 1, "server"),
        [("zero3_offload", "stream", "server", 313, 1), ("zero3_offload", "served", "server", 168, 1 + 4)],
    ),
}
"""Models, devices and engine; and the first placements, GB of host memory and devices of servers.

145 GB of a teacher take four of 80 GB, 15 GB of a student that a server generates with one.
"""


@pytest.mark.quick
@pytest.mark.parametrize("case", ORDERS)
def test_placements_are_in_order(case):
    (student, teacher, gpus, engine), first = ORDERS[case]
    load = replace(ON_80_GB, gpus=gpus)
    plans = considered(of(student), of(teacher), load, 2000e9, activations=a_gigabyte, engine=engine)
    found = [(one.choice.sharding, one.choice.teacher, one.choice.engine, one.host, one.servers) for one in plans]
    assert found[: len(first)] == [(*rest, pytest.approx(host * 1e9, abs=1e9), more) for *rest, host, more in first]
    assert all(one.peak[1] <= SHARE * 80e9 for one in plans if one.fits)
    ranks = [2 * (not one.fits) + (one.choice.teacher == "served") for one in plans]
    assert ranks == sorted(ranks)
    too_large = [one for one in plans if not one.fits and one.choice.teacher != "served"]
    assert [one.peak[1] for one in too_large] == sorted(one.peak[1] for one in too_large)
    assert {one.choice.micro for one in too_large} <= {1}, "not with one row either"


@pytest.mark.quick
@pytest.mark.parametrize(("memory", "student", "engine"), [(4, "0.5b", "transformers"), (24, "7b", "vllm, sleeping")])
def test_an_offloaded_student_is_launched_on_all_devices(planned, memory, student, engine):
    given = (*_SHORT, "--gpu-memory", memory, "--host-memory", 999)
    found = yaml.safe_load(planned(*given, student=student).stdout)
    best, *others = found["placements"]
    assert (best["sharding"], best["engine"], len(others)) == ("zero3_offload", engine, 4)
    assert found["command"].endswith("--accelerate_config zero3_offload --num_processes 1")


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments",
    [(), ("--gpu-memory", 16), ("--gpus", 8), ("--lora", 16), ("--no-bf16",), ("--engine", "transformers")],
    ids=["80 GB", "16 GB", "8 devices", "LoRA", "float32", "transformers"],
)
def test_printed_options_are_read_by_train(planned, arguments, tmp_path):
    done = planned(*arguments, "--batch", 2, "--prompt", 64, "--length", 64)
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(done.stdout)
    written, launched = found["options"], "ddp --num_processes 8" if "--gpus" in arguments else "single"
    assert found["command"] == f"trl-opsd train --config run.yaml --accelerate_config {launched}"
    assert found["verdict"].startswith("Fits")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**written, "output_dir": str(tmp_path), "bf16": False}))
    given = OptionParser().given(["--config", str(file)])
    assert given.config.max_completion_length == 64
    assert given.config.per_device_train_batch_size * given.config.gradient_accumulation_steps == 2
    assert given.config.teacher_offload == written["teacher_offload"]
    assert given.model.use_peft == ("--lora" in arguments)
    assert given.config.use_vllm == ("transformers" not in arguments)


@pytest.mark.parametrize(("lora", "resting"), [(None, 0), (16, 2)])
def test_engine_takes_its_share_unless_it_sleeps(lora, resting):
    student, teacher = (shape_of(str(SHAPES / f"measured-{role}.json")) for role in ("student", "teacher"))
    load = replace(ON_80_GB, batch=2, prompt=64, length=64, lora=lora)
    needed = of_engine(student, load)
    assert needed > 2 * student.parameters + 2 * 2 * student.cached(128), "weights, and keys and values of 2 rows"
    for one in considered(student, teacher, load, None, a_gigabyte, engine="vllm"):
        share = int(one.engine_share * 80e9)
        assert needed <= share < needed + 0.05 * 80e9
        alone = replace(one.choice, engine="transformers")
        without = phases(student, teacher, load, alone, a_gigabyte)["training"]
        for engine, held in (("vllm", [share] * 3), ("vllm, sleeping", [share, 0, 0])):
            choice = replace(one.choice, engine=engine)
            parts = phases(student, teacher, load, choice, a_gigabyte, share)
            assert [each.get("engine", 0) for each in parts.values()] == held
            assert sum(parts["training"].values()) == sum(without.values()) + held[2]
            assert "KV cache" not in parts["rollout"]
            hosts = [host_bytes(student, teacher, load, each) for each in (choice, alone)]
            assert hosts[0] - hosts[1] == resting * student.parameters * (engine != "vllm")
            told = options(replace(one, choice=choice), "a", "b", load)
            assert told["vllm_gpu_memory_utilization"] == one.engine_share
            assert told.get("vllm_enable_sleep_mode", False) is (engine != "vllm")


@pytest.mark.parametrize(
    "family",
    [
        *("gpt2", "qwen3_moe"),
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ("llama", "gemma2", "qwen3_next", "deepseek_v3", "gemma3n_text", "gpt_oss", "mamba", *SEEING)
        ),
    ],
)
def test_other_families_are_planned(family, tmp_path, monkeypatch):
    """Mixtures of experts, layers of several kinds, states instead of a cache, and models that also see."""
    monkeypatch.syspath_prepend(BENCHMARKS.with_name("tools"))
    sees = family in SEEING
    model = vision_language.model(family, 32, 0) if sees else importlib.import_module("toys").toy(family, 259)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["plan", str(tmp_path), str(tmp_path), *_IN_FLOAT32])
    assert done.exit_code == 0, done.output
    parts = yaml.safe_load(done.stdout)["phases"]
    weights = 4 * sum(one.numel() for one in model.parameters())
    assert parts["training"]["weights"] == pytest.approx(weights / 1e9, rel=1e-3)
    assert 0 < parts["training"]["activations"] < 0.1
    with torch.no_grad():
        cache = model.eval()(input_ids=torch.arange(3, 35)[None], use_cache=True)
    if family != "mamba":
        layers = tree_leaves([vars(layer) for layer in getattr(cache, CACHE).layers])
        held = sum(one.nbytes for one in layers if isinstance(one, torch.Tensor) and one.dim() > 1)
        assert parts["rollout"]["KV cache"] == pytest.approx(held / 1e9, rel=1e-3)
        assert held > 0


def test_a_vision_tower_is_outside_of_the_layers():
    student = of("vl-7b")
    block = 4 * 1280**2 + 4 * 1280 + 2 * 1280 + 3 * 1280 * 3420 + 2 * 3420 + 1280
    merger = 1280 + 5120**2 + 5120 + 5120 * 3584 + 3584
    tower = 3 * 2 * 14**2 * 1280 + 32 * block + merger
    assert student.parameters == 7_615_616_512 + tower == 8_292_166_656, "as published"
    assert student.rest == tower + 3584, "and the last norm"


def test_a_window_bounds_the_cache():
    config = tiny.gemma2(32, sliding_window=16).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    numbers = [cached_numbers(model, tokens) for tokens in (16, 64)]
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert cached_per_token(config) * 64 > numbers[1] > numbers[0]
    assert numbers[1] - numbers[0] <= 48 * cached_per_token(config) // 2


def test_plan_of_a_self_teacher_sets_its_kind_for_an_adapter(tmp_path):
    tiny.qwen2(32).config.save_pretrained(tmp_path)
    given = ["plan", str(tmp_path), *_IN_FLOAT32]
    whole, adapter = (yaml.safe_load(CliRunner().invoke(app, [*given, *more]).stdout) for more in ([], ["--lora", "4"]))
    assert whole["options"]["teacher_model_name_or_path"] == str(tmp_path)
    assert (adapter["placements"][0]["teacher"], adapter["options"]["teacher_model_kind"]) == ("itself", "base")
