"""What `train.py` trains is what its user asked for; anything it does not know or cannot find is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
import train
import yaml
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from small_methods import Discounted
from support import tiny
from transformers import AutoModelForCausalLM
from trl import DatasetMixtureConfig, ScriptArguments

from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import loaded
from trl_opsd.methods import Anchor, made


@pytest.fixture
def options(tmp_path):
    """One quick step, as on a command line."""
    given = tiny.options(tmp_path / "out", max_steps=1, max_completion_length=8)
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def models(disk):
    return ["--model_name_or_path", disk.student, "--teacher_model_name_or_path", disk.teacher]


@pytest.fixture
def config(tmp_path, disk):
    """The arguments for a YAML file of these options, added to both models."""

    def config(**given):
        both = {"model_name_or_path": disk.student, "teacher_model_name_or_path": disk.teacher}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**both, **given}))
        return ["--config", str(tmp_path / "run.yaml")]

    return config


@pytest.fixture
def refused(capsys):
    """The message with which the script ends, before any model is loaded."""

    def refused(*arguments):
        with pytest.raises((SystemExit, ValueError)) as caught:
            train.main(arguments)
        if caught.type is SystemExit:
            assert caught.value.code == 2
            return capsys.readouterr().err
        return str(caught.value)

    return refused


def check_trained(trainer, disk):
    """Asserts that the models on disk were trained on some of the 16 chats, and not the built-in ones."""
    assert trainer.state.global_step == 1
    assert trainer.model.config._name_or_path == disk.student
    assert trainer.teacher.model.config._name_or_path == disk.teacher
    chats = {row["prompt"][0]["content"] for row in trainer.train_dataset}
    assert chats
    assert chats <= set(tiny.PROMPTS)


def test_options_with_dashes_train_named_models_on_named_data(disk, options):
    dashed = ["--model-name-or-path", disk.student, "--teacher-model-name-or-path", disk.teacher]
    check_trained(train.main([*dashed, "--dataset-name", disk.data, *options]), disk)


def test_each_of_several_teachers_reads_its_own_rows(disk, options, tmp_path):
    rows = [{"prompt": row["prompt"], "teacher": f"t{place % 2}"} for place, row in enumerate(tiny.rows(4))]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    teachers = {"t0": disk.teacher, "t1": disk.student}
    file = {"model_name_or_path": disk.student, "per_device_train_batch_size": 4, "teacher_models": teachers}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    assert OptionParser().given(["--teacher_models", json.dumps(teachers)]).extra.teacher_models == teachers
    at = options.index("--per_device_train_batch_size")
    trainer = train.main(
        [
            *("--config", str(tmp_path / "run.yaml"), "--dataset_name", str(tmp_path / "rows.jsonl")),
            *(*options[:at], *options[at + 2 :], "--dtype", "bfloat16", "--teacher_dtype", "float32"),
        ]
    )
    dtypes = {name: next(one.model.parameters()).dtype for name, one in trainer.teachers.items()}
    assert dtypes == dict.fromkeys(teachers, torch.float32), "each is loaded as the options of a teacher say"
    logged = trainer.state.log_history[0]
    assert logged["divergence/teacher/t1"] == pytest.approx(0, abs=1e-3), "the student itself"
    assert logged["divergence/teacher/t0"] > 0.1


@pytest.mark.parametrize("written", [1e-5, "1e-5"], ids=["a number", "what YAML reads as text"])
def test_a_learning_rate_from_a_file_is_a_number(config, written):
    assert OptionParser().given(config(learning_rate=written)).config.learning_rate == 1e-5


def test_methods_of_file_and_command_line_get_their_settings(config):
    methods = {"small_methods.Discounted": {"factor": 0.5}, "anchor": {"weight": 1}}
    for given in (lambda: config(methods=methods), lambda: [*config(), "--methods", json.dumps(methods)]):
        found = made(OptionParser().given(given()).config.methods)  # YAML is dumped in the order of names
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


def test_an_adapter_teaches_and_is_no_student(models, disk, options, refused, tmp_path):
    given, path, folder = [*models, "--dataset_name", disk.data], str(tmp_path / "adapter"), str(tmp_path / "whole")
    base = AutoModelForCausalLM.from_pretrained(disk.student)
    get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(path)
    assert "An adapter alone is no student" in refused(*given, "--model_name_or_path", path)
    AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    roles = ["--model_name_or_path", folder, "--teacher_model_name_or_path", path]
    trainer = train.main([*given, *roles, *options])
    assert trainer.state.global_step == 1
    assert path in str(trainer.teacher)


def test_mixture_is_loaded_and_split_as_in_trl(config, disk, options):
    mixture = {"datasets": [{"path": disk.data}, {"path": "parquet", "data_files": disk.parquet}]}
    mixture |= {"test_split_size": 0.25, "dataset_name": "nobody/nothing"}
    trainer = train.main([*config(**mixture, eval_strategy="steps", eval_steps=1), *options])
    check_trained(trainer, disk)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (24, 8)
    assert any("eval_loss" in row for row in trainer.state.log_history)


def test_the_named_split_is_evaluated(models, disk, options):
    splits = ["--dataset_name", disk.splits_saved, "--dataset_test_split", "validation"]
    trainer = train.main([*models, *splits, "--eval_strategy", "steps", "--eval_steps", "1", *options])
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (16, 4)
    assert any("eval_loss" in row for row in trainer.state.log_history)


BFLOAT16 = {"learning_rate": "1e-2"}
"""Large enough for a student in bfloat16."""
LOADING = {
    "by default": ({}, ["float32", "bfloat16"], ["sdpa", "sdpa"]),
    "the checkpoint's, and given": (
        {"dtype": "auto", "teacher_dtype": "float32", "attn_implementation": "eager"} | BFLOAT16,
        ["bfloat16", "float32"],
        ["eager", "eager"],
    ),
    "as JSON": (
        {
            "model_init_kwargs": '{"dtype": "bfloat16"}',
            "teacher_model_init_kwargs": '{"dtype": "float32"}',
            "attn_implementation": "sdpa",
            "teacher_attn_implementation": "eager",
        }
        | BFLOAT16,
        ["bfloat16", "float32"],
        ["sdpa", "eager"],
    ),
    "as JSON, older name": (
        {
            "model_init_kwargs": '{"torch_dtype": "bfloat16"}',
            "teacher_model_init_kwargs": '{"torch_dtype": "float32"}',
        }
        | BFLOAT16,
        ["bfloat16", "float32"],
        ["sdpa", "sdpa"],
    ),
    "in host memory": ({"teacher_offload": "stream"}, ["float32", "bfloat16"], ["sdpa", "sdpa"]),
}
"""Options, and what they make of the student and of the teacher."""


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.long if one == "in host memory" else ()) for one in LOADING]
)
def test_each_model_is_loaded_with_its_own_dtype_and_attention(models, disk, options, case):
    given, dtypes, attention = LOADING[case]
    listed = [part for name, value in given.items() for part in (f"--{name}", value)]
    trainer = train.main([*models, "--dataset_name", disk.data, *options, "--bf16", "True", *listed])
    teacher = trainer.teacher.model
    for model, dtype, implementation in zip((trainer.model, teacher), dtypes, attention, strict=True):
        assert {one.dtype for one in model.parameters()} == {getattr(torch, dtype)}
        assert model.config._attn_implementation == implementation
    size = sum(one.nbytes for one in teacher.parameters())
    assert teacher.get_memory_footprint() == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("given", "frozen"),
    [([], torch.bfloat16), pytest.param(["--dtype", "float32"], torch.float32, marks=pytest.mark.long)],
)
def test_weights_under_adapters_are_half_precision_unless_dtype_is_set(models, disk, options, given, frozen):
    adapter = ["--use_peft", "True", "--lora_target_modules", "all-linear", "--learning_rate", "1e-3"]
    trainer = train.main([*models, "--dataset_name", disk.data, *options, "--bf16", "True", *adapter, *given])
    found = {(one.requires_grad, one.dtype) for one in trainer.model.parameters()}
    assert found == {(False, frozen), (True, torch.float32)}
