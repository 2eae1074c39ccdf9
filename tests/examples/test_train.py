"""The training script, and the accelerate configs to launch it with."""

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
from peft import PeftModel
from support import tiny
from transformers import AutoModelForCausalLM

import trl_opsd

CONFIGS = Path(trl_opsd.__file__).parent / "accelerate_configs"
STRATEGIES = {
    "single": ("NO", 1),
    "ddp": ("MULTI_GPU", 8),
    "zero2": ("DEEPSPEED", 8),
    "zero3": ("DEEPSPEED", 8),
    "zero3_offload": ("DEEPSPEED", 8),
    "fsdp2": ("FSDP", 8),
    "hsdp": ("FSDP", 16),
    "sp": ("DEEPSPEED", 8),
    "zero2_cpu": ("DEEPSPEED", 2),
    "zero3_cpu": ("DEEPSPEED", 2),
    "fsdp2_cpu": ("FSDP", 2),
    "hsdp_cpu": ("FSDP", 4),
    "sp_cpu": ("DEEPSPEED", 2),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_accelerate_reads_each_config_as_its_name_says(name):
    path = CONFIGS / f"{name}.yaml"
    config = load_config_from_file(str(path))  # refuses keys it does not know
    assert (config.distributed_type, config.num_processes) == STRATEGIES[name]
    assert config.use_cpu == name.endswith("_cpu")
    assert config.mixed_precision == ("no" if config.use_cpu else "bf16")
    deepspeed = yaml.safe_load(path.read_text()).get("deepspeed_config", {})
    assert "gradient_accumulation_steps" not in deepspeed, "it belongs to the options of the run"
    assert deepspeed.get("zero_stage", 0) == {"zero2": 2, "zero3": 3, "sp": 3, "sp_cp": 3}.get(name[:5], 0)
    offload = "cpu" if name == "zero3_offload" else "none"
    if deepspeed:
        assert deepspeed["offload_param_device"] == deepspeed["offload_optimizer_device"] == offload


@pytest.mark.parametrize("name", [name for name, (kind, _) in STRATEGIES.items() if kind == "DEEPSPEED"])
def test_the_keys_of_the_shipped_files_are_known(name):
    """accelerate ignores others without a word."""
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert config["deepspeed_config"].keys() <= vars(launch_command_parser().parse_args(["script"])).keys()


OPTIONS = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--logging_steps", "1"]


def test_the_built_in_task_is_trained_when_it_is_named(tmp_path, capsys):
    trainer = train.main(
        ["--task", "arithmetic", *OPTIONS, "--output_dir", str(tmp_path), "--use_peft", "--lora_r", "4"]
    )
    results = [line for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    after = f"step 2: {score.result(score.main(str(tmp_path)))}"
    assert results == ["step 0: 54 of 200 held-out problems right (0.270)", after]
    assert trainer.state.global_step == 2
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
    assert trainer.state.global_step == 2
    assert repr(trainer.divergence) == "GeneralizedJSD(beta=0.3)"
    assert trainer.args.temperature == 0.7
    assert trainer.args.resume_with_changes == ["seed", "top_k"]
    assert trainer.args.teacher_template_kwargs == {"enable_thinking": True}
    assert trainer.teacher.model.config.hidden_size == 48
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(trained.lm_head.weight, trainer.model.lm_head.weight)
    assert not torch.equal(trained.lm_head.weight, tiny.qwen2(32, seed=0).lm_head.weight)

    again = ["--temperature", "0.7", "--max_steps", "3", "--resume_from_checkpoint", "true"]
    resumed = train.main(["--config", str(tmp_path / "run.yaml"), *again])
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [1, 2, 3]
    losses = [row["loss"] for each in (trainer, resumed) for row in each.state.log_history[:2]]
    assert losses[:2] == losses[2:], "steps 1 and 2 come from the checkpoint"
