"""What `train.py` trains is what its user asked for; and the accelerate configs to launch it with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import score
import torch
import train
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from small_methods import Discounted
from support import tiny
from transformers import AutoModelForCausalLM
from trl import DatasetMixtureConfig, ScriptArguments

import trl_opsd
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import loaded
from trl_opsd.methods import Anchor, made

CONFIGS = Path(trl_opsd.__file__).parent / "accelerate_configs"
STRATEGIES = {"single": ("NO", 1), "ddp": ("MULTI_GPU", 8), "fsdp2": ("FSDP", 8), "hsdp": ("FSDP", 16)}
STRATEGIES |= dict.fromkeys(("zero2", "zero3", "zero3_offload", "sp"), ("DEEPSPEED", 8))
STRATEGIES |= dict.fromkeys(("zero2_cpu", "zero3_cpu", "sp_cpu"), ("DEEPSPEED", 2))
STRATEGIES |= {"fsdp2_cpu": ("FSDP", 2), "hsdp_cpu": ("FSDP", 4)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_accelerate_reads_each_config_as_its_name_says(name):
    path = CONFIGS / f"{name}.yaml"
    config = load_config_from_file(str(path))  # refuses keys it does not know
    assert (config.distributed_type, config.num_processes) == STRATEGIES[name]
    assert config.use_cpu == name.endswith("_cpu")
    assert config.mixed_precision == ("no" if config.use_cpu else "bf16")
    deepspeed = yaml.safe_load(path.read_text()).get("deepspeed_config", {})
    assert deepspeed.keys() <= vars(launch_command_parser().parse_args(["script"])).keys(), "others are ignored"
    assert "gradient_accumulation_steps" not in deepspeed, "it belongs to the options of the run"
    assert deepspeed.get("zero_stage", 0) == {"zero2": 2, "zero3": 3, "sp": 3, "sp_cp": 3}.get(name[:5], 0)
    offload = "cpu" if name == "zero3_offload" else "none"
    if deepspeed:
        assert deepspeed["offload_param_device"] == deepspeed["offload_optimizer_device"] == offload


@pytest.fixture
def run(disk, tmp_path):
    """Trains for a quick step by options of a command line, `None` takes one out, and by a file."""

    def run(file=None, **given):
        named = tiny.options(tmp_path / "out", max_steps=1, max_completion_length=8)
        named |= {"model_name_or_path": disk.student, "teacher_model_name_or_path": disk.teacher}
        named |= {"dataset_name": disk.data, **given}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(file or {}))
        listed = [f"--{name}={value}" for name, value in named.items() if value is not None]
        return train.main(["--config", str(tmp_path / "run.yaml"), *listed])

    return run


def test_the_built_in_task_is_trained_when_it_is_named(tmp_path, capsys):
    options = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--use_peft", "--lora_r", "4"]
    trainer = train.main(["--task", "arithmetic", *options, "--output_dir", str(tmp_path)])
    results = [line for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    after = f"step 2: {score.result(score.main(str(tmp_path)))}"
    assert results == ["step 0: 54 of 200 held-out problems right (0.270)", after]
    assert trainer.args.per_device_train_batch_size == 4, "the command line overrides the file"
    assert trainer.args.max_completion_length == 40
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    student = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(train.STUDENT), tmp_path)
    assert any(parameter.abs().max() > 0 for name, parameter in student.named_parameters() if "lora_B" in name)


def test_models_data_and_all_options_come_from_yaml(disk, tmp_path):
    options = {
        **tiny.options(
            tmp_path / "out", max_steps=2, divergence="jsd", beta=0.3, resume_with_changes=["seed", "top_k"]
        ),
        "save_strategy": "steps",
        "save_steps": 2,
        "model_name_or_path": disk.student,
        "teacher_model_name_or_path": disk.teacher,
        "teacher_chat_template_kwargs": '{"enable_thinking": true}',
        "dataset_name": disk.data,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
    trainer = train.main(["--config", str(tmp_path / "run.yaml"), "--temperature", "0.7"])
    assert repr(trainer.divergence) == "GeneralizedJSD(beta=0.3)"
    assert trainer.args.temperature == 0.7
    assert trainer.args.resume_with_changes == ["seed", "top_k"]
    assert trainer.args.teacher_template_kwargs == {"enable_thinking": True}
    assert trainer.teacher.model.config.hidden_size == 48
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(trained.lm_head.weight, trainer.model.lm_head.weight)
    assert not torch.equal(trained.lm_head.weight, tiny.qwen2(32, seed=0).lm_head.weight)

    again = ["--temperature", "0.7", "--max-steps", "3", "--resume-from-checkpoint", "true"]  # dashes are as good
    resumed = train.main(["--config", str(tmp_path / "run.yaml"), *again])
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [1, 2, 3]
    losses = [row["loss"] for each in (trainer, resumed) for row in each.state.log_history[:2]]
    assert losses[:2] == losses[2:], "steps 1 and 2 come from the checkpoint"


def test_each_of_several_teachers_reads_its_own_rows(run, disk, tmp_path):
    rows = [{"prompt": row["prompt"], "teacher": f"t{place % 2}"} for place, row in enumerate(tiny.rows(4))]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    teachers = {"t0": disk.teacher, "t1": disk.student}
    assert OptionParser().given(["--teacher_models", json.dumps(teachers)]).extra.teacher_models == teachers
    loading = {"dtype": "bfloat16", "teacher_model_init_kwargs": '{"dtype": "float32"}'}
    loading["teacher_model_name_or_path"] = None
    rows = {"dataset_name": tmp_path / "rows.jsonl", "per_device_train_batch_size": 4}
    trainer = run({"teacher_models": teachers}, **rows, **loading)
    dtypes = {name: next(one.model.parameters()).dtype for name, one in trainer.teachers.items()}
    assert dtypes == dict.fromkeys(teachers, torch.float32), "each is loaded as the options of a teacher say"
    logged = trainer.state.log_history[0]
    assert logged["divergence/teacher/t1"] == pytest.approx(0, abs=1e-3), "the student itself"
    assert logged["divergence/teacher/t0"] > 0.1


def test_methods_and_numbers_of_file_and_command_line_are_read(tmp_path):
    methods = {"small_methods.Discounted": {"factor": 0.5}, "anchor": {"weight": 1}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"methods": methods, "learning_rate": "1e-5"}))  # YAML reads it as text
    assert OptionParser().given(["--config", str(file)]).config.learning_rate == 1e-5
    for given in (["--config", str(file)], ["--methods", json.dumps(methods)]):
        found = made(OptionParser().given([*given, "--use_cpu"]).config.methods)  # YAML is dumped in the order of names
        assert sorted(found, key=repr) == [Anchor(1), Discounted(0.5)]
    for name in ("small_methods.Discount", "nowhere.Discounted", "Discounted"):
        with pytest.raises(ValueError, match=f"^`methods`: '{name}'"):
            made({name: {}})


@pytest.mark.parametrize("form", ["data", "jsonl", "parquet", "one_saved", "splits_saved"])
@pytest.mark.parametrize("streaming", [False, True], ids=["rows", "a stream"])
def test_a_local_dataset_is_read_in_every_form(disk, form, streaming):
    script = ScriptArguments(dataset_name=getattr(disk, form), dataset_streaming=streaming)
    splits = loaded(script, DatasetMixtureConfig())
    assert set(splits) == ({"train", "validation"} if form == "splits_saved" else {"train"})
    assert [row["prompt"][0]["content"] for row in splits["train"]] == tiny.rows(16)["prompt"]


def test_an_adapter_teaches_and_is_no_student(run, disk, tmp_path):
    path = str(tmp_path / "adapter")
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(disk.student), adapter).save_pretrained(path)
    with pytest.raises(ValueError, match="An adapter alone is no student"):
        run(model_name_or_path=path)
    assert path in str(run(teacher_model_name_or_path=path).teacher)


def test_mixture_and_named_split_are_loaded_as_in_trl(run, disk):
    mixture = {"datasets": [{"path": disk.data}, {"path": "parquet", "data_files": disk.parquet}]}
    mixture |= {"test_split_size": 0.25, "dataset_name": "nobody/nothing"}
    splits = {"dataset_name": disk.splits_saved, "dataset_test_split": "validation"}
    for trainer, sizes in (
        (run(mixture, dataset_name=None, eval_strategy="steps", eval_steps=1), (24, 8)),
        (run(**splits, eval_on_start="true"), (16, 4)),
    ):
        assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == sizes
        assert {row["prompt"][0]["content"] for row in trainer.train_dataset} <= set(tiny.PROMPTS)
        assert any("eval_loss" in row for row in trainer.state.log_history)


GIVEN = {"dtype": "auto", "teacher_model_init_kwargs": '{"dtype": "float32"}', "attn_implementation": "eager"}
AS_JSON = {"model_init_kwargs": '{"dtype": "bfloat16"}', "attn_implementation": "sdpa"}
AS_JSON |= {"teacher_model_init_kwargs": '{"torch_dtype": "float32", "attn_implementation": "eager"}'}  # older name
LOADING = {
    "by default": ({}, ["float32", "bfloat16"], ["sdpa", "sdpa"]),
    "the checkpoint's, and given": (GIVEN, ["bfloat16", "float32"], ["eager", "eager"]),
    "as JSON": (AS_JSON, ["bfloat16", "float32"], ["sdpa", "eager"]),
    "in host memory": ({"teacher_offload": "stream"}, ["float32", "bfloat16"], ["sdpa", "sdpa"]),
}
"""Options, and what they make of the student and of the teacher."""


@pytest.mark.parametrize("case", LOADING)
def test_each_model_is_loaded_with_its_own_dtype_and_attention(run, disk, case):
    given, dtypes, attention = LOADING[case]
    trainer = run(bf16=True, learning_rate=1e-2, **given)  # large enough for a student in bfloat16
    teacher = trainer.teacher.model
    assert (trainer.model.config._name_or_path, teacher.config._name_or_path) == (disk.student, disk.teacher)
    for model, dtype, implementation in zip((trainer.model, teacher), dtypes, attention, strict=True):
        assert {one.dtype for one in model.parameters()} == {getattr(torch, dtype)}
        assert model.config._attn_implementation == implementation
    size = sum(one.nbytes for one in teacher.parameters())
    assert teacher.get_memory_footprint() == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(("dtype", "frozen"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_weights_under_adapters_are_half_precision_unless_dtype_is_set(run, dtype, frozen):
    adapter = {"use_peft": True, "lora_target_modules": "all-linear", "learning_rate": 1e-3}
    trainer = run(bf16=True, dtype=dtype, **adapter)
    assert {(one.requires_grad, one.dtype) for one in trainer.model.parameters()} == {
        (False, frozen),
        (True, torch.float32),
    }
