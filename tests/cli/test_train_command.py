"""`trl-opsd train` launches what its user asked for and refuses what nothing knows; a dry run leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from support import tiny
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

import trl_opsd
from trl_opsd import ServerError
from trl_opsd.cli import launch
from trl_opsd.cli import train as script
from trl_opsd.cli.main import app, explained
from trl_opsd.cli.options import OptionParser

ROOT = Path(trl_opsd.__file__).resolve().parent
CONFIGS = ROOT / "accelerate_configs"
LAUNCHED = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Arguments for a student, a teacher and rows, all on disk."""
    folder = tmp_path_factory.mktemp("disk")
    tiny.save_pair(folder)
    tiny.rows(16).to_json(folder / "rows.jsonl")
    models = ["--model_name_or_path", folder / "student", "--teacher_model_name_or_path", folder / "teacher"]
    return [*map(str, models), "--dataset_name", str(folder / "rows.jsonl")]


def options(folder, **given):
    """Options of a short run, as on a command line."""
    named = tiny.options(folder, **{"max_steps": 3, "max_completion_length": 8, **given})
    return [part for name, value in named.items() for part in (f"--{name}", str(value))]


def started(*arguments):
    """Starts the installed command as a shell would, outside of any launch."""
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    path = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "trl_opsd", *map(str, arguments)],
        env={**own, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stderr=PIPE,
        stdout=PIPE,
        text=True,
    )


def command(*arguments):
    """Runs it; its output, with that of errors behind it."""
    run = started(*arguments)
    printed, said = run.communicate(timeout=200)
    assert run.returncode == 0, said[-3000:]
    return printed + said


@pytest.mark.quick
def test_the_list_of_commands_is_printed_without_importing_torch():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trl_opsd", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "train" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "transformers", "trl", "accelerate"}


SEPARATED = {
    "nothing": (["--max_steps", "2"], [], ["--max_steps", "2"]),
    "a number": (["--num_processes", "2", "--max_steps", "2"], ["--num_processes", "2"], ["--max_steps", "2"]),
    "after it": (["--max_steps", "2", "--num_processes", "2"], ["--num_processes", "2"], ["--max_steps", "2"]),
    "dashes": (["--num-processes=2", "--max-steps=2"], ["--num-processes=2"], ["--max-steps=2"]),
    "a flag": (["--cpu", "--bf16", "false"], ["--cpu"], ["--bf16", "false"]),
    "what both have": (["--gradient_accumulation_steps", "2"], [], ["--gradient_accumulation_steps", "2"]),
    "a file of ours": (
        ["--accelerate_config", "zero3", "--seed", "1"],
        ["--config_file", str(CONFIGS / "zero3.yaml")],
        ["--seed", "1"],
    ),
    "unknown": (["--learning_rat", "1"], [], ["--learning_rat", "1"]),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", SEPARATED)
def test_options_of_accelerate_are_separated_from_those_of_the_training(case):
    given, launcher, ours = SEPARATED[case]
    assert launch.separated(given, OptionParser()) == (launcher, ours)


def test_command_line_overrides_launch_options_of_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"accelerate_config": "ddp", "num_processes": 4, "cpu": True, "max_steps": 7}))
    parser = OptionParser(launch_options=launch.launch_options())
    launcher, ours = launch.separated(["--config", str(file), "--num_processes", "2"], parser)
    assert launcher == ["--config_file", str(CONFIGS / "ddp.yaml"), "--cpu", "--num_processes", "2"]
    assert parser.given([*ours, "--output_dir", str(tmp_path), "--use_cpu"]).config.max_steps == 7


@pytest.fixture
def unlaunched(monkeypatch):
    """As outside of any launch; what is launched then is recorded, or fails as a test says."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)

    def launching(outcome: Any) -> None:
        def launched(_: Any) -> None:
            raise outcome

        monkeypatch.setattr(launch, "launch_command", launched)

    return launching


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--learning_rat", "1"], "'learning_rate'?"),
        (["--accelerate_config", "zero4"], "zero4: expected a file, or one of ddp, "),
        (["--max_steps", "many"], "'many'"),
        (["--num_processes", "two"], "--num_processes"),
    ],
)
def test_a_mistake_ends_the_command_before_anything_is_launched(given, named, capsys, unlaunched):
    unlaunched(AssertionError("launched"))
    with pytest.raises(SystemExit) as ended:
        launch.run([*given, "--num_machines", "1"], "trl-opsd train")
    said = capsys.readouterr().err
    assert (ended.value.code, named in said, said.partition(": error: ")[0]) == (2, True, "trl-opsd train"), said


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("more", [(), ("--dry_run",), ("--methods", "{a: 1}")], ids=["a run", "a dry run", "no JSON"])
def test_user_error_is_one_sentence_without_traceback_option(more, disk, tmp_path):
    value, message = (1, "Expecting property name") if "--methods" in more else (-1, "`temperature=-1.0`")
    given = ["train", *disk, *options(tmp_path, temperature=value), *more]
    done = CliRunner().invoke(app, given, prog_name="trl-opsd")
    assert (done.exit_code, done.stdout) == (2, "")
    first, last = done.stderr.splitlines()
    assert first.startswith(f"trl-opsd train: error: {message}")
    assert "`--traceback`" in last
    for asked in (["--traceback", *given], [*given, "--traceback"]):
        with pytest.raises(ValueError, match=message):
            app(asked)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ServerError("gone"), 1),
        (FileNotFoundError(2, "none", "x"), 2),
        (ImportError("install it"), 2),
        (RuntimeError("a bug"), None),
        (BrokenPipeError(32, "closed"), None),
    ],
)
def test_explained_errors_have_no_traceback_and_failed_runs_status_1(error, status, capsys):
    error.add_note("Resume.")
    with pytest.raises(type(error) if status is None else SystemExit) as ended, explained(lambda: "it", whole=False):
        raise error
    said = capsys.readouterr().err.splitlines()
    assert said[::2] == ([] if status is None else [f"it: error: {error}", "Resume."])
    assert status is None or ended.value.code == status


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ends", "status", "told"),
    [
        ({0: -15, 1: 2}, 2, []),  # the launcher has ended rank 0, as rank 1 has failed and said why
        ({0: 1, 1: 143}, 1, []),
        ({0: -9}, 137, ["trl-opsd train: error: SIGKILL ended the process of rank 0."]),
        ({0: 143, 1: 143}, 143, []),
        (SignalException("got a signal", signal.SIGTERM), 143, []),
        (SignalException("got a signal", signal.SIGINT), 130, []),
    ],
)
def test_status_of_a_launch_is_that_of_its_cause(ends, status, told, capsys, unlaunched):
    if isinstance(ends, dict):
        failed = {rank: ProcessFailure(rank, 1, code, "no file") for rank, code in ends.items()}
        ends = ChildFailedError("train", failed)
    unlaunched(ends)
    with pytest.raises(SystemExit) as ended:
        launch.run(["--num_machines", "1"], "trl-opsd train")
    assert ended.value.code == status
    assert capsys.readouterr().err.splitlines() == told


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [[], ["--num_machines", "1"], ["--accelerate_config", "ddp", "--num_processes", "2"]],
    ids=["no launcher", "one process", "two processes"],
)
def test_run_stopped_by_sigterm_has_its_status_and_goes_on(launcher, disk, tmp_path):
    """Started twice by one command, as a scheduler does: the second goes on from the checkpoint of the first."""
    given = options(tmp_path / "out", max_steps=4000, save_strategy="no", enable_jit_checkpoint=True, logging_steps=1)
    arguments = ["train", *launcher, *disk, *given, "--resume_from_checkpoint", "auto"]
    run = started(*arguments)
    assert run.stdout is not None
    for line in run.stdout:
        if line.strip().startswith("5/4000"):
            break
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=100)
    assert run.returncode == 143, said[-3000:]
    [saved] = (tmp_path / "out").glob("checkpoint-*")
    at = int(saved.name.rpartition("-")[2])
    assert f"Stopped by SIGTERM at step {at} of 4000" in said
    assert "Traceback" not in said
    assert not [*(tmp_path / "out").glob("*.safetensors")], "what was not finished looks as if it was"
    assert f"{at + 1}/{at + 1}" in command(*arguments, "--max_steps", at + 1)
    assert [*(tmp_path / "out").glob("*.safetensors")]


@pytest.mark.distributed
@pytest.mark.long
def test_command_launches_two_processes_and_saves(disk, tmp_path):
    given = options(tmp_path / "out", max_steps=1, gradient_accumulation_steps=2, gradient_checkpointing=True)
    adapter = ["--use_peft", "--lora_target_modules", "all-linear"]
    said = command("train", "--accelerate_config", "zero3_cpu", *disk, *given, *adapter)
    for false_alarm in ("None of the inputs have requires_grad", "is deprecated", "accumulation steps mismatch"):
        assert false_alarm not in said
    assert "  2, DeepSpeed ZeRO-3" in said
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_a_dry_run_takes_one_step_and_leaves_nothing(disk, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = options(tmp_path / "out", save_strategy="steps", save_steps=1, log_completions=True, max_steps=3)
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "train", "eval_on_start": "true"}
    evaluates["methods"] = '{"student_quantization": {"format": "int8"}}'
    splits = [part for name, value in evaluates.items() for part in (f"--{name}", str(value))]
    trainer = script.main([*disk, *given, *splits, "--dry_run"])
    assert trainer.state.global_step == 1
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert re.search(r"All 3 steps would take \d\d:\d\d, ", said)
    assert not any(name.startswith("eval_") for row in trainer.state.log_history for name in row)
    start = tiny.qwen2(32, seed=0)
    pairs = zip(trainer.model.parameters(), start.parameters(), strict=True)
    assert not all(torch.equal(one, was) for one, was in pairs), "the step was taken"


def test_a_dry_run_refuses_what_a_run_would(disk, tmp_path):
    with pytest.raises(ValueError, match="`max_completion_length"):
        script.main([*disk, *options(tmp_path, max_completion_length=0), "--dry_run"])
    Dataset.from_list([{"prompt": ""}] * 4).to_json(tmp_path / "rows.jsonl")
    at = disk.index("--dataset_name")
    with pytest.raises(ValueError, match="prompt in row 0 of train_dataset is empty"):
        script.main([*disk[:at], "--dataset_name", str(tmp_path / "rows.jsonl"), *options(tmp_path), "--dry_run"])
