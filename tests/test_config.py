"""Options: the values they allow, their warnings, defaults and meaning, and conflicts with the launch."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import ParallelismConfig
from support import tiny
from transformers import HfArgumentParser, Qwen2ForCausalLM
from trl import DistillationConfig

from trl_opsd import OPSDConfig
from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.options.rules import check_together
from trl_opsd.options.table import table

TABLE = table(OPSDConfig)


def test_both_names_of_gradient_checkpointing_are_one_option(tmp_path):
    [option] = (one for one in fields(OPSDConfig) if one.name == CHECKPOINTING)
    assert "Deprecated" not in option.metadata["help"]
    args = tiny.config(tmp_path, **{CHECKPOINTING: True})
    assert args.gradient_checkpointing is True
    args.gradient_checkpointing = False
    assert getattr(args, CHECKPOINTING) is False
    setattr(args, f"{CHECKPOINTING}_kwargs", {"use_reentrant": False})
    args.gradient_checkpointing_kwargs["use_reentrant"] = True  # as TRL does, for an adapter under ZeRO-3
    assert getattr(args, f"{CHECKPOINTING}_kwargs") == {"use_reentrant": True}


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
        ({"divergence": "skewed_forward_kl"}, "SkewedForwardKL(skew=0.1)"),
        ({"divergence": {"skewed_reverse_kl": {"skew": 0.3}}}, "SkewedReverseKL(skew=0.3)"),
        ({"divergence": "total_variation"}, "TotalVariation()"),
        ({"divergence": '{"skewed_reverse_kl": {"skew": 0.2}}'}, "SkewedReverseKL(skew=0.2)"),
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
    loaded, load = {}, Qwen2ForCausalLM.from_pretrained
    monkeypatch.setattr(
        Qwen2ForCausalLM, "from_pretrained", lambda path, **kwargs: loaded.update(kwargs) or load(path, **kwargs)
    )
    tiny.save_pair(tmp_path)
    for option, trusts in (("trust_remote_code", False), ("teacher_trust_remote_code", True)):
        make_trainer(teacher_model=str(tmp_path / "teacher"), **{option: True})
        assert (loaded["trust_remote_code"], loaded["use_safetensors"]) == (trusts, True)


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name, hint in TABLE.items() if re.search(r"G[et]\(|Literal", str(hint))])
def test_values_that_do_not_fit_are_refused_for_each_option(tmp_path, name):
    for wrong in (-7, math.nan):
        with pytest.raises(ValueError, match=f"^`{name}={wrong}`: expected "):
            tiny.config(tmp_path, **{name: wrong})


@pytest.mark.parametrize(
    ("name", "value"), [("split_batches", True), ("dispatch_batches", True), ("even_batches", False)]
)
def test_accelerator_options_that_break_sharding_are_refused(tmp_path, monkeypatch, name, value):
    args = tiny.config(tmp_path)
    monkeypatch.setattr(OPSDConfig, "world_size", 2)
    monkeypatch.setattr(args.accelerator_config, name, value)
    with pytest.raises(ValueError, match=f"`{name}`.* in `accelerator_config`"):
        check_together(args)


def test_launch_counted_as_one_process_is_refused(tmp_path, monkeypatch):
    args = tiny.config(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="`use_cpu=True`"):
        check_together(args)


def test_compiled_layers_are_refused_where_zero3_gathers_inside_of_them(tmp_path, monkeypatch):
    args = tiny.config(tmp_path, torch_compile_backend="eager")
    monkeypatch.setattr("trl_opsd.options.rules.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="`torch_compile=True` with DeepSpeed ZeRO-3"):
        check_together(args)


STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (STAGE_2, None),
        ({}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage"),
        ({**STAGE_2, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None),
        ({**STAGE_2, "torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        (
            {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype",
        ),
    ],
)
def test_overlap_is_refused_where_deepspeed_cannot_rescale(tmp_path, config, setting):
    args = tiny.config(tmp_path, overlap="step")
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config=config)
    said = f"`overlap='step'` with DeepSpeed's '{setting}'"
    with pytest.raises(ValueError, match=said) if setting else nullcontext():
        check_together(args)


@pytest.mark.parametrize("given", ["TP_SIZE", "CP_SIZE", "SP_SIZE"])
@pytest.mark.parametrize("as_option", [True, False])
def test_other_kinds_of_parallelism_are_refused(tmp_path, monkeypatch, given, as_option):
    options = {}
    if as_option:
        options["parallelism_config"] = ParallelismConfig(**{given.lower(): 2})
    else:
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{given}", "2")
    with pytest.raises(ValueError, match=f"`{given.lower()}"):
        tiny.config(tmp_path, **options)


NOT_SHARED = {"torch_compile": True, "padding_free": True, "pad_to_multiple_of": 8}


@pytest.mark.parametrize(
    ("launch", "options", "named"),
    [
        ({"WORLD_SIZE": "3"}, {}, "3 processes"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, {}, "data parallel size of 2"),
        (
            {f"PARALLELISM_CONFIG_SP_SEQ_LENGTH{end}": to for end, to in (("", "64"), ("_IS_VARIABLE", "False"))},
            {},
            "sp_seq_length",
        ),
        *(({}, {name: value}, name) for name, value in NOT_SHARED.items()),
    ],
)
def test_shared_rows_that_cannot_work_are_refused(tmp_path, monkeypatch, launch, options, named):
    shared = {f"ACCELERATE_USE_{what}": "true" for what in ("PARALLELISM_CONFIG", "DEEPSPEED")}
    for name, value in {**shared, "PARALLELISM_CONFIG_SP_SIZE": "2", "WORLD_SIZE": "2", **launch}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"`sp_size=2` .*{named}"):
        tiny.config(tmp_path, **options)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"learning_rate": "1e-5"}, 1e-5),  # what PyYAML makes of `1e-5`
        ({"num_train_epochs": "3"}, 3.0),
        ({"max_steps": "4"}, 4),
        ({"max_steps": 1e3}, 1000),
        ({"per_device_train_batch_size": np.int64(4)}, 4),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"teacher_update_rate": " 0.1 "}, 0.1),
        ({"top_k": "0"}, 0),
        ({"use_vllm": "False"}, False),
        ({"shuffle_dataset": "no"}, False),
        ({"log_completions": "True"}, True),
        ({"min_p": None}, None),
        ({"report_to": "none"}, []),
        ({"model_init_kwargs": '{"revision": "main"}'}, {"revision": "main"}),
    ],
)
def test_text_is_converted_to_the_type_of_the_option(tmp_path, option, expected):
    ((name, _),) = option.items()
    value = getattr(tiny.config(tmp_path, **option), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.quick
def test_yaml_values_1e_5_and_no_are_read_as_meant(tmp_path):
    (tmp_path / "options.yaml").write_text("output_dir: out\nlearning_rate: 1e-5\nsave_strategy: no\nuse_cpu: true\n")
    (config,) = HfArgumentParser(OPSDConfig).parse_yaml_file(str(tmp_path / "options.yaml"))
    assert (config.learning_rate, config.save_strategy) == (1e-5, "no")


@dataclass
class _Extended(OPSDConfig):
    margin: float = 0.5


class _Taking(OPSDConfig):
    def __init__(self, *args, margin=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.margin = margin


@pytest.mark.quick
def test_a_config_that_checks_names_is_still_a_dataclass(tmp_path):
    config = tiny.config(tmp_path, learning_rate=3e-6)
    for copied in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
        assert (type(copied), copied.learning_rate) == (OPSDConfig, 3e-6)
    assert replace(config, learning_rate=1e-6).learning_rate == 1e-6
    assert list(inspect.signature(OPSDConfig).parameters) == [one.name for one in fields(OPSDConfig)]
    (parsed,) = HfArgumentParser(_Extended).parse_args_into_dataclasses(["--margin", "2", "--use_cpu"])
    assert parsed.margin == 2.0
    assert _Extended(**tiny.options(tmp_path), margin="3").margin == 3.0
    assert _Taking(**tiny.options(tmp_path), margin=4).margin == 4
    with pytest.raises(TypeError, match=r"`_Extended` has no option 'margn': did you mean 'margin'"):
        _Extended(**tiny.options(tmp_path), margn=1)


@pytest.mark.parametrize(
    ("accelerated", "option", "bf16"),
    [
        *[(False, {}, False), (False, {"use_cpu": True, "bf16": True}, True)],
        *[(True, {}, True), (True, {"bf16": False}, False)],
    ],
)
@pytest.mark.quick
@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_bf16_is_on_by_default_with_accelerator_alone(tmp_path, monkeypatch, accelerated, option, bf16):
    if accelerated:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    config = OPSDConfig(str(tmp_path), **option)
    found = config.bf16, config.mixed_precision, config.dataloader_pin_memory
    assert found == (bf16, "bf16" if bf16 else "no", accelerated)
