"""What `train.py` trains is what its user asked for; anything it does not know or cannot find is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
import tiny
import torch
import train
import yaml
from accelerate import PartialState
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import DatasetMixtureConfig, ScriptArguments

from trl_opsd.cli.train.data import loaded
from trl_opsd.cli.train.effects import warn_of_options
from trl_opsd.cli.train.options import GROUPS, HERE, OptionParser


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


def test_options_with_dashes_train_the_named_models_on_the_named_data(disk, options):
    dashed = ["--model-name-or-path", disk.student, "--teacher-model-name-or-path", disk.teacher]
    check_trained(train.main([*dashed, "--dataset-name", disk.data, *options]), disk)


@pytest.mark.parametrize("form", ["a mapping", "JSON"])
def test_several_teachers_each_read_the_rows_of_theirs(disk, options, tmp_path, form):
    rows = [{"prompt": row["prompt"], "teacher": f"t{place % 2}"} for place, row in enumerate(tiny.rows(4))]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    teachers = {"t0": disk.teacher, "t1": disk.student}
    file = {"model_name_or_path": disk.student, "per_device_train_batch_size": 4}
    if form == "a mapping":
        file["teacher_models"] = teachers
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    given = [] if form == "a mapping" else ["--teacher_models", json.dumps(teachers)]
    at = options.index("--per_device_train_batch_size")
    trainer = train.main(
        [
            *("--config", str(tmp_path / "run.yaml"), "--dataset_name", str(tmp_path / "rows.jsonl")),
            *(*given, *options[:at], *options[at + 2 :], "--dtype", "bfloat16", "--teacher_dtype", "float32"),
        ]
    )
    dtypes = {name: next(one.model.parameters()).dtype for name, one in trainer.teachers.items()}
    assert dtypes == dict.fromkeys(teachers, torch.float32), "each is loaded as the options of a teacher say"
    logged = trainer.state.log_history[0]
    assert logged["divergence/teacher/t1"] == pytest.approx(0, abs=1e-3), "the student itself"
    assert logged["divergence/teacher/t0"] > 0.1


@pytest.mark.quick
@pytest.mark.parametrize("written", ["math", "{}", '["a"]', '{"math": 1}'])
def test_teachers_without_names_are_refused(refused, written):
    assert f"`teacher_models={written!r}`: expected names and paths" in refused("--teacher_models", written)


@pytest.mark.quick
def test_two_options_that_say_who_teaches_are_refused(models, disk, refused):
    several = ["--teacher_models", json.dumps({"math": disk.teacher})]
    assert "each say who teaches: remove all but one" in refused(*models, *several)
    alone = ["--model_name_or_path", disk.student, "--teacher_model_kind", "base"]
    assert "each say who teaches" in refused(*alone, *several)


def test_a_file_after_an_equals_sign_is_read(disk, options, config):
    name, path = config(dataset_name=disk.data, learning_rate="1e-5", max_completion_length=4)
    trainer = train.main([f"{name}={path}", *options])
    check_trained(trainer, disk)
    assert trainer.args.learning_rate == 1e-4, "the command line overrides the file"


@pytest.mark.parametrize("written", [1e-5, "1e-5"], ids=["a number", "what YAML reads as text"])
def test_a_learning_rate_from_a_file_is_a_number(config, disk, written, options):
    at = options.index("--learning_rate")
    trainer = train.main([*config(dataset_name=disk.data, learning_rate=written), *options[:at], *options[at + 2 :]])
    assert trainer.args.learning_rate == 1e-5


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "A student model is required .* `--model_name_or_path`; .* `--task arithmetic`"),
        (("dataset",), "A student model is required"),
        (("teacher", "dataset"), "A student model is required"),
        (
            ("student", "dataset"),
            "A teacher model is required .* `--teacher_model_name_or_path`, .*_models`; .* `--teacher_model_k",
        ),
        (("student", "teacher"), "Either `datasets` or `dataset_name` must be provided. Set `--dataset_name`"),
    ],
    ids=lambda given: " and ".join(given) or "nothing" if isinstance(given, tuple) else "",
)
def test_what_is_missing_is_named_and_nothing_else_is_trained(disk, refused, given, message):
    option = {"student": "model_name_or_path", "teacher": "teacher_model_name_or_path", "dataset": "dataset_name"}
    path = {"student": disk.student, "teacher": disk.teacher, "dataset": disk.data}
    arguments = [part for one in given for part in (f"--{option[one]}", path[one])]
    assert re.match(message, refused(*arguments))


COMMAND_LINE = {
    "misspelt": (["--learning_rat", "1"], "unknown option '--learning_rat', did you mean '--learning_rate'?"),
    "misspelt, with dashes": (["--learning-rat=1"], "unknown option '--learning-rat', did you mean '--learning_rate'?"),
    "a part of a name": (["--model_r", "x"], "did you mean '--model_revision'?"),
    "parts of several names": (["--vllm_port", "1"], "did you mean '--vllm_group_port' or '--vllm_server_port'?"),
    "another script's": (["--torch_dtype", "x"], "it is called `dtype`; that of the teacher is `teacher_dtype`"),
    "nothing near": (["--eos_tokens", "x"], "error: unknown option '--eos_tokens'\n"),
    "another trainer's": (
        ["--generate_from_teacher", "true"],
        "unknown option '--generate_from_teacher': it is called `seq_kd`",
    ),
    "TRL's old name": (["--teacher_revision", "x"], "did you mean '--teacher_model_revision'?"),
    "nothing like it": (["--qqq"], "error: unknown option '--qqq'\n"),
    "two": (["--qqq", "--modle_revision", "x"], "'--qqq'; unknown option '--modle_revision', did you mean '--model_r"),
    "no option": (["stray"], "unexpected argument 'stray'"),
    "wrong type": (["--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
    "wrong choice": (["--teacher_dtype", "bf16"], "argument --teacher_dtype/--teacher-dtype: invalid choice: 'bf16'"),
    "wrong task": (["--task", "arithmetix"], "argument --task: invalid choice: 'arithmetix'"),
    "two files": (["--config", "a", "--config=b"], "--config is given 2 times"),
    "no file": (["--config", "nowhere.yaml"], "--config nowhere.yaml: [Errno 2] No such file"),
    "JSON": (["--model_init_kwargs", "{bad"], "`model_init_kwargs='{bad'` is not JSON"),
    "JSON in single quotes": (["--teacher_model_init_kwargs", "{'dtype': 1}"], "put names and texts in double quotes"),
    "JSON of a list": (["--model_init_kwargs", "[1]"], "`model_init_kwargs='[1]'`: expected a dict of options"),
    "a split that is not there": (
        ["--dataset_train_split", "train_"],
        "`dataset_train_split='train_'`: expected a split of the dataset, 'train'. Did you mean 'train'?",
    ),
    "no split to evaluate on": (
        ["--eval_strategy", "epoch"],
        "`dataset_test_split='test'`: expected a split of the dataset, 'train'. It is needed because `eval_strategy`",
    ),
    "streaming of `datasets`": (["--streaming"], "with `dataset_name` set `dataset_streaming`"),
    "test split of `datasets`": (["--test_split_size", "0.1"], "and would have no effect on `dataset_name`"),
    "a dtype given twice": (
        ["--dtype", "bfloat16", "--model_init_kwargs", '{"torch_dtype": "float32"}'],
        "`dtype='bfloat16'` and `model_init_kwargs={'dtype': 'float32'}` are two values for one thing",
    ),
    "an attention of the teacher given twice": (
        ["--teacher_attn_implementation", "sdpa", "--teacher_model_init_kwargs", '{"attn_implementation": "eager"}'],
        "`teacher_attn_implementation='sdpa'` and `teacher_model_init_kwargs={'attn_implementation': 'eager'}` are two",
    ),
    "a task and a dataset": (["--task", "arithmetic"], "`task='arithmetic'` has a dataset of its own"),
}


@pytest.mark.parametrize("case", COMMAND_LINE)
def test_a_mistake_on_the_command_line_is_refused_with_the_nearest_name(models, disk, refused, case):
    arguments, message = COMMAND_LINE[case]
    assert message in refused(*models, "--dataset_name", disk.data, *arguments)


def test_what_the_script_says_about_names_of_other_scripts_is_true():
    options = {name for group in GROUPS for name in (one.name for one in fields(group))}
    assert not HERE.keys() & options
    named = {name for advice in HERE.values() for name in re.findall(r"`(\w+)`", advice)}
    assert named
    assert named <= options


FILE = {
    "misspelt": ({"learning_rat": 1}, "unknown key 'learning_rat', did you mean 'learning_rate'?"),
    "with dashes": ({"dataset-config": "x"}, "unknown key 'dataset-config', did you mean 'dataset_config'?"),
    "nested": ({"training": {"seed": 1}}, "unknown key 'training'; options are not nested: write 'seed' at the top"),
    "nested under an option": ({"seed": {"value": 1}}, "'seed' is not a group of options: write 'value' at the top"),
    "a list": ({"dataset_name": ["a", "b"]}, "'dataset_name' takes one value, got a list of 2"),
    "wrong choice": ({"dtype": "bf16"}, "'dtype': invalid choice 'bf16', choose from 'auto', 'bfloat16', 'float16', "),
    "wrong type": ({"max_steps": 2.5}, "argument --max_steps/--max-steps: invalid int value: '2.5'"),
    "misspelt in `datasets`": ({"datasets": [{"pth": "x"}]}, "unknown key 'pth' of `datasets`, did you mean 'path'?"),
}


@pytest.mark.parametrize("case", FILE)
def test_a_mistake_in_the_file_is_refused_with_the_nearest_name(config, refused, tmp_path, case):
    given, message = FILE[case]
    assert message in refused(*config(**given))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping of options to values, got NoneType"),
        ("a: [1\nb: }", "expected ',' or ']', but got ':'"),
    ],
    ids=["empty", "not YAML"],
)
def test_a_file_that_is_no_mapping_is_refused(refused, tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    assert message in refused("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize("form", ["data", "jsonl", "parquet", "one_saved", "splits_saved"])
@pytest.mark.parametrize("streaming", [False, True], ids=["rows", "a stream"])
def test_a_local_dataset_is_read_in_every_form(disk, form, streaming):
    script = ScriptArguments(dataset_name=getattr(disk, form), dataset_streaming=streaming)
    splits = loaded(script, DatasetMixtureConfig())
    assert set(splits) == ({"train", "validation"} if form == "splits_saved" else {"train"})
    assert [row["prompt"][0]["content"] for row in splits["train"]] == tiny.rows(16)["prompt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "is neither a file or folder here nor a dataset that the Hub gives access to"),
        ("/no/where", "is neither a file or folder here nor a dataset"),
        ("nobody/nothing", "is neither a file or folder here nor a dataset"),
        ("notes.txt", "is a file of no kind that is read here: expected one of .json, .jsonl, .parquet, .csv, .arrow"),
    ],
)
def test_a_dataset_that_is_not_there_is_refused_by_its_name(models, refused, tmp_path, monkeypatch, name, message):
    (tmp_path / "notes.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    assert f"`dataset_name='{name}'` {message}" in refused(*models, "--dataset_name", name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is an empty file: expected a row in each line"),
        (
            '{"prompt": "a"}\n{"prompt": \n',
            "cannot be read as it is written: JSON parse error: Invalid value. in row 1",
        ),
    ],
    ids=["empty", "broken"],
)
def test_a_file_without_rows_is_refused_by_its_name(models, refused, tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    assert f"rows.jsonl'` {message}" in refused(*models, "--dataset_name", str(tmp_path / "rows.jsonl"))


def test_one_of_several_datasets_that_is_not_there_is_refused_by_its_name(config, disk, refused):
    given = config(datasets=[{"path": disk.data}, {"path": "/no/where"}])
    assert "`datasets='/no/where'` is neither a file or folder here nor a dataset" in refused(*given)


@pytest.mark.parametrize("option", ["model_name_or_path", "teacher_model_name_or_path"])
def test_an_adapter_is_refused_with_advice_that_can_be_followed_here(models, disk, options, refused, tmp_path, option):
    path, folder = str(tmp_path / "adapter"), str(tmp_path / "whole")
    base = AutoModelForCausalLM.from_pretrained(disk.student if option == "model_name_or_path" else disk.teacher)
    get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(path)
    given = [*models, "--dataset_name", disk.data]
    said = refused(*given, f"--{option}", path)
    advice = "AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload().save_pretrained(folder)"
    assert f"save the two as one model, `{advice}` with its tokenizer" in said
    eval(advice, {"AutoPeftModelForCausalLM": AutoPeftModelForCausalLM, "path": path, "folder": folder})
    tiny.tokenizer().save_pretrained(folder)
    assert train.main([*given, f"--{option}", folder, *options]).state.global_step == 1


def test_a_format_is_no_dataset(models, refused):
    assert "`dataset_name='json'` is a format" in refused(*models, "--dataset_name", "json")


def test_saved_rows_have_no_configurations(models, disk, refused):
    saved = ["--dataset_name", disk.one_saved, "--dataset_config", "main"]
    assert "was written by `save_to_disk` and has only one" in refused(*models, *saved)


def test_a_mixture_of_datasets_is_loaded_and_split_as_trl_does(config, disk, options):
    mixture = {"datasets": [{"path": disk.data}, {"path": "parquet", "data_files": disk.parquet}]}
    trainer = train.main([*config(**mixture, test_split_size=0.25, eval_strategy="steps", eval_steps=1), *options])
    check_trained(trainer, disk)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (24, 8)
    assert any("eval_loss" in row for row in trainer.state.log_history)


def test_what_a_mixture_makes_void_is_warned_of(config, disk, options, caplog):
    given = config(datasets=[{"path": disk.data}], dataset_name="nobody/nothing")
    check_trained(train.main([*given, *options]), disk)
    assert "Options without effect: `dataset_name='nobody/nothing'`, because `datasets` is loaded." in caplog.text


VOID = {
    "an adapter": (
        ["--lora_r", "4", "--use_dora"],
        "`lora_r=4`, because `use_peft` is not set; `use_dora=True`, because",
    ),
    "4 bits": (["--bnb_4bit_quant_type", "fp4"], "`bnb_4bit_quant_type='fp4'`, because `load_in_4bit` is not set"),
    "a split": (
        ["--dataset_test_split", "validation"],
        "`dataset_test_split='validation'`, because `eval_strategy` is",
    ),
    "buffers": (["--ignore_bias_buffers"], "`ignore_bias_buffers=True`, because this trainer has no use for it"),
    "a teacher": (
        ["--teacher_model_kind", "base", "--teacher_dtype", "bfloat16", "--teacher_attn_implementation", "eager"],
        "`teacher_dtype='bfloat16'`, because the student is its own teacher; `teacher_attn_implementation='eager'`, ",
    ),
    "a dataset": (
        ["--task", "arithmetic", "--dataset_config", "main", "--test_split_size", "0.1"],
        "`dataset_config='main'`, because the task has a dataset of its own; `test_split_size=0.1`, because the task",
    ),
}


@pytest.mark.parametrize("case", VOID)
def test_options_without_effect_beside_the_others_are_named(case, caplog):
    PartialState()  # which the config makes; the logger asks it for the process
    given, message = VOID[case]
    teacher = [] if "--teacher_model_kind" in given else ["--teacher_model_name_or_path", "teacher"]
    warn_of_options(OptionParser(train.TASKS).given(["--model_name_or_path", "student", *teacher, *given]))
    (said,) = (record.getMessage() for record in caplog.records if "without effect" in record.getMessage())
    assert f"Options without effect: {message}" in said


@pytest.mark.parametrize(
    "given",
    [
        ["--use_peft", "--lora_r", "4", "--eval_strategy", "epoch", "--dataset_test_split", "validation"],
        ["--load_in_4bit", "--bnb_4bit_quant_type", "fp4", "--teacher_dtype", "float32"],
        ["--dataset_name", "a", "--dataset_config", "b", "--dataset_streaming"],
    ],
    ids=["adapter and split", "4 bits and dtype", "dataset"],
)
def test_options_that_have_an_effect_are_not_named(given, caplog):
    models = ["--model_name_or_path", "student", "--teacher_model_name_or_path", "teacher"]
    warn_of_options(OptionParser().given([*models, *given]))
    assert "without effect" not in caplog.text


def test_the_named_split_is_evaluated(models, disk, options):
    splits = ["--dataset_name", disk.splits_saved, "--dataset_test_split", "validation"]
    trainer = train.main([*models, *splits, "--eval_strategy", "steps", "--eval_steps", "1", *options])
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (16, 4)
    assert any("eval_loss" in row for row in trainer.state.log_history)


@pytest.mark.parametrize(
    ("given", "student", "teacher"),
    [
        ([], torch.float32, torch.bfloat16),
        (["--teacher_dtype", "float32"], torch.float32, torch.float32),
        (["--teacher_model_init_kwargs", '{"dtype": "float32"}'], torch.float32, torch.float32),
        (["--teacher_offload", "stream"], torch.float32, torch.bfloat16),
        (["--dtype", "auto", "--learning_rate", "1e-2"], torch.bfloat16, torch.bfloat16),
        (["--model_init_kwargs", '{"dtype": "bfloat16"}', "--learning_rate", "1e-2"], torch.bfloat16, torch.bfloat16),
        (
            ["--model_init_kwargs", '{"torch_dtype": "bfloat16"}', "--learning_rate", "1e-2"],
            torch.bfloat16,
            torch.bfloat16,
        ),
        (["--teacher_model_init_kwargs", '{"torch_dtype": "float32"}'], torch.float32, torch.float32),
    ],
    ids=[
        "by default",
        "a dtype",
        "as JSON",
        "in host memory",
        "that of the checkpoint",
        "as JSON, of the student",
        "as JSON, by its older name, of the student",
        "as JSON, by its older name",
    ],
)
def test_each_model_is_loaded_in_a_dtype_of_its_own(models, disk, options, given, student, teacher):
    trainer = train.main([*models, "--dataset_name", disk.data, *options, "--bf16", "True", *given])
    assert {one.dtype for one in trainer.model.parameters()} == {student}
    assert {one.dtype for one in trainer.teacher.model.parameters()} == {teacher}
    size = sum(one.numel() for one in trainer.teacher.model.parameters())
    assert trainer.teacher.model.get_memory_footprint() == pytest.approx(size * teacher.itemsize, rel=0.01)


@pytest.mark.parametrize(("given", "frozen"), [([], torch.bfloat16), (["--dtype", "float32"], torch.float32)])
def test_weights_under_an_adapter_take_half_the_memory_unless_a_dtype_is_set(models, disk, options, given, frozen):
    adapter = ["--use_peft", "True", "--lora_target_modules", "all-linear", "--learning_rate", "1e-3"]
    trainer = train.main([*models, "--dataset_name", disk.data, *options, "--bf16", "True", *adapter, *given])
    found = {(one.requires_grad, one.dtype) for one in trainer.model.parameters()}
    assert found == {(False, frozen), (True, torch.float32)}


def test_a_student_in_bfloat16_is_warned_of_at_a_rate_it_cannot_hold(models, disk, options):
    with pytest.warns(UserWarning, match="98% of the student's trained weights would not move .*`dtype='float32'`"):
        train.main([*models, "--dataset_name", disk.data, *options, "--dtype", "auto", "--learning_rate", "1e-6"])


@pytest.mark.parametrize("teacher", [None, "eager"])
def test_each_model_may_have_an_attention_implementation_of_its_own(models, disk, options, teacher):
    own = [] if teacher is None else ["--teacher_attn_implementation", teacher]
    given = [*models, "--dataset_name", disk.data, "--attn_implementation", "sdpa", *own]
    trainer = train.main([*given, *options])
    assert trainer.model.config._attn_implementation == "sdpa"
    assert trainer.teacher.model.config._attn_implementation == (teacher or "sdpa")
