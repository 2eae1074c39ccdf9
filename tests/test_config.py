"""Options: the values they allow, their warnings, defaults and meaning, and conflicts with the launch."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields

import pytest
import tiny
from transformers import Qwen2ForCausalLM
from trl import DistillationConfig

from trl_opsd import OPSDConfig


@pytest.mark.parametrize(
    "option",
    [
        {"top_k": None},
        {"top_p": None},
        {"repetition_penalty": None},
        {"top_k": 0},
        {"min_p": 0.0},
        {"top_p": 1.0},
        {"beta": 0},
        {"generation_kwargs": {"do_sample": False}},
    ],
)
def test_boundary_values_are_accepted(tmp_path, option):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # TRL's own default, under its old name
        warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
        tiny.config(tmp_path, **option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"beta": 0.02}, "`beta=0.02` is close to an end"),
        ({"beta": 0.97}, "generalised JSD and its gradient vanish"),
        ({"divergence": "forward_kl", "beta": 0.5}, "`beta=0.5` is ignored"),
    ],
)
def test_options_with_surprising_effects_are_warned_about(tmp_path, option, message):
    with pytest.warns(UserWarning, match=message):
        tiny.config(tmp_path, **option)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({}, "ReverseKL()"),
        ({"beta": 0.0}, "ForwardKL()"),
        ({"beta": 0.3}, "GeneralizedJSD(beta=0.3)"),
        ({"divergence": "jsd"}, "GeneralizedJSD(beta=0.5)"),
        ({"divergence": "jsd", "beta": 0.2}, "GeneralizedJSD(beta=0.2)"),
        ({"divergence": "forward_kl"}, "ForwardKL()"),
        ({"divergence": "reverse_kl"}, "ReverseKL()"),
    ],
)
@pytest.mark.quick
def test_the_divergence_is_chosen_by_name_or_else_by_beta(tmp_path, option, expected):
    assert repr(tiny.config(tmp_path, **option).build_divergence()) == expected


@pytest.mark.quick
def test_only_the_two_safety_defaults_differ_from_trl(tmp_path):
    ours, trls = tiny.config(tmp_path), DistillationConfig(**tiny.options(tmp_path))
    differing = {name for name in vars(trls) if getattr(ours, name) != getattr(trls, name)} - {"distributed_state"}
    assert differing == {"vllm_server_host"}
    assert ours.vllm_server_host == "127.0.0.1"
    assert ours.teacher_trust_remote_code is False


def test_remote_code_of_the_teacher_needs_its_own_option(make_trainer, monkeypatch, tmp_path):
    loaded = {}

    load = Qwen2ForCausalLM.from_pretrained
    monkeypatch.setattr(
        Qwen2ForCausalLM, "from_pretrained", lambda path, **kwargs: loaded.update(kwargs) or load(path, **kwargs)
    )
    path = tmp_path / "teacher"
    tiny.qwen2(48, 1).save_pretrained(path)
    make_trainer(teacher_model=str(path), trust_remote_code=True)
    assert loaded["trust_remote_code"] is False
    assert loaded["use_safetensors"] is True
    make_trainer(teacher_model=str(path), teacher_trust_remote_code=True)
    assert loaded["trust_remote_code"] is True


@pytest.mark.quick
def test_every_new_option_is_documented():
    ours, trls = ({field.name for field in fields(config)} for config in (OPSDConfig, DistillationConfig))
    new = ours - trls
    documented = inspect.getdoc(OPSDConfig) or ""  # Python 3.13 dedents docstrings
    assert {name for name in new if f"\n    {name} (" in documented} == new != set()


def test_accumulation_steps_that_contradict_the_launch_are_refused(tmp_path, monkeypatch):
    launch = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    for name, value in {**launch, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert tiny.config(tmp_path, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    with pytest.raises(
        ValueError, match=r"^`gradient_accumulation_steps` is 4 in the accelerate .* 2 in `OPSDConfig`: r"
    ):
        tiny.config(tmp_path, gradient_accumulation_steps=2)


def test_fsdp1_is_refused(make_trainer):
    trainer = make_trainer()
    trainer._dist.fsdp_version = 1
    with pytest.raises(ValueError, match=r"`fsdp_version: 1`.* set `fsdp_version: 2` in the accelerate file"):
        trainer._check_fsdp()


def test_fsdp_that_shards_nothing_is_warned_about(make_trainer, monkeypatch, caplog):
    make_trainer()
    assert "FSDP" not in caplog.text
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    make_trainer()
    assert "nothing is sharded, this is plain data parallelism" in caplog.text
