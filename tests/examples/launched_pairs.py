"""Pairs of processes that fail before training, or train under ZeRO-3; launched by one that is forked."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from datasets import Dataset, load_dataset
from support import forks, tiny
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.cli.main import app

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train

SECONDS = 200
"""Time limit after which a process that still waits prints its stack and ends."""


def trainer(folder: Path, **given: Any) -> OPSDTrainer:
    arguments = {"model": tiny.qwen2(32), "teacher_model": tiny.qwen2(48), "train_dataset": tiny.rows()}
    words = tiny.tokenizer()
    return OPSDTrainer(**{**arguments, "args": tiny.config(folder), "processing_class": words, **given})


def in_a_script_of_ones_own(folder: Path) -> None:
    tiny.config(folder)
    load_dataset("json", data_files=str(folder / "nowhere.json"))


def in_one_process_only(folder: Path) -> None:
    """The other waits for it."""
    args = tiny.config(folder)
    if args.process_index == 1:
        raise RuntimeError("only here")
    trainer(folder, args=args)
    time.sleep(SECONDS)


FAILURES: dict[str, Callable[[Path], Any]] = {
    "option": lambda folder: OPSDConfig(str(folder), divergence="forward", use_cpu=True),
    "JSON": lambda folder: OPSDConfig(str(folder), model_init_kwargs="{bad", use_cpu=True),
    "teacher": lambda folder: trainer(folder, teacher_model=str(folder / "nowhere")),
    "row": lambda folder: trainer(folder, train_dataset=Dataset.from_list([{"prompt": "a"}, {"prompt": ""}] * 4)),
    "own script": in_a_script_of_ones_own,
    "one process": in_one_process_only,
    "train.py, model": lambda folder: train.main(["--dataset_name", str(folder)]),
}

LAUNCHES: dict[str, Callable[[Path], Any]] = {
    "trl-opsd train, ZeRO-3": lambda folder: command(folder),
    "train.py, ZeRO-3": lambda folder: forks.launch("zero3_cpu", script, train_arithmetic, folder),
}


def train_arithmetic(folder: Path) -> None:
    options = {"task": "arithmetic", "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-4}
    train.main(listed({**options, "output_dir": folder / "whole"}))


def command(folder: Path) -> None:
    """The command as in a shell, but the processes that accelerate would start are forked."""
    tiny.save_pair(folder)
    tiny.rows(16).to_json(folder / "rows.jsonl")
    given = tiny.options(folder / "adapter", max_steps=1, gradient_accumulation_steps=2, gradient_checkpointing=True)
    given |= {"model_name_or_path": folder / "student", "teacher_model_name_or_path": folder / "teacher"}
    given |= {"dataset_name": folder / "rows.jsonl", "use_peft": True, "lora_target_modules": "all-linear"}

    def started(args: Any) -> None:
        assert args.module
        forks.launch(Path(args.config_file).stem, module, args.training_script, args.training_script_args)

    with mock.patch("trl_opsd.cli.launch.launch_command", started):
        app(["train", "--accelerate_config", "zero3_cpu", *listed(given)], prog_name="trl-opsd", standalone_mode=False)


def module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def listed(options: dict[str, Any]) -> list[str]:
    """Options as on a command line."""
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def script(function: Callable[[Path], Any], folder: Path) -> None:
    """Ends as a script would: through `sys.excepthook` with a status, or as argparse ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the agent, which it was forked from
    sys.argv = [__file__]
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        function(folder)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def main(folder: Path) -> dict[str, dict[str, Any]]:
    """How each pair ended; what it printed is in files."""
    warnings.simplefilter("ignore", DeprecationWarning)  # as Python does
    results = {}
    forks.build_shm_op()  # may compile; not a part of any pair's time
    for number, name in enumerate([*FAILURES, *LAUNCHES]):
        for name_of, descriptor, stream in (("out", 1, sys.stdout), ("err", 2, sys.stderr)):
            with (folder / f"{number}.{name_of}").open("wb") as file:
                for each in {descriptor, stream.fileno()}:
                    os.dup2(file.fileno(), each)
        began = time.time()
        try:
            LAUNCHES[name](folder) if name in LAUNCHES else forks.launch("ddp", script, FAILURES[name], folder)
            statuses = {}
        except ChildFailedError as error:
            statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SystemExit as error:
            statuses = {"command": error.code}
        results[name] = {"number": number, "statuses": statuses, "seconds": time.time() - began}
    return results
