"""Trains with the given options: loads models and data, resumes and saves. Runs in each process of a launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from accelerate.logging import get_logger
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl_opsd.cli.merge import Experts, experts_of
from trl_opsd.cli.options import ExtraArguments, OptionParser, RunOptions, Splits
from trl_opsd.config import OPSDConfig
from trl_opsd.methods.reward_functions import found_function
from trl_opsd.methods.rewards import Rewards
from trl_opsd.options.rules import refuse
from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)

STOPPED = 128 + SIGTERM
"""Exit status of a run that has saved a checkpoint on SIGTERM and stopped, as of a program that SIGTERM ends."""


class Task(Protocol):
    """What brings its own rows and rewards, and measures the student before and after training."""

    rewards: Any
    """`functions` of the method `rewards`."""

    def data(self) -> Splits: ...
    def evaluate(self, trainer: OPSDTrainer) -> None: ...


def main(arguments: Sequence[str], parser: OptionParser | None = None, task: Task | None = None) -> OPSDTrainer:
    """Trains a student as the arguments of a command line say, which `parser` reads; returns the trainer.

    Raises:
        SystemExit: An option does not exist or has a wrong kind of value.
        ValueError: The options contradict each other, or name what is not there.
    """
    given, experts = read(arguments, parser)
    task = experts or task
    with TemporaryDirectory(prefix="trl_opsd-dry-run-") if given.extra.dry_run else nullcontext() as folder:
        if folder:
            leave_nothing(given.config, folder)
        trainer = build(given, task)
        if folder:
            trainer.add_callback(_OneStep())
            trainer.train()
            if trainer.accelerator.is_main_process:
                steps = trainer.state.max_steps
                whole = tqdm.format_interval(trainer.state.log_history[0]["step_time"] * steps)
                said = "Dry run: one generation batch and one optimizer step succeeded; nothing was saved."
                print(f"{said} All {steps} steps would take {whole}, without evaluations and checkpoints.")
            return trainer
        resume = given.config.resume_from_checkpoint  # a string on the command line
        resume = given.config.resume_from_checkpoint = {"true": True, "false": False}.get(str(resume).lower(), resume)
        if task:
            task.evaluate(trainer)
        trainer.train(resume_from_checkpoint=resume)
        if trainer.interrupted:
            return trainer
        trainer.save_model()
        if task:
            task.evaluate(trainer)
    return trainer


def read(arguments: Sequence[str], parser: OptionParser | None = None) -> tuple[RunOptions, Experts | None]:
    """The options of a command line, and the experts that they name; raises as `main` does."""
    if not torch.accelerator.is_available():  # without it, DeepSpeed on a CPU counts one process where there are two
        arguments = [*arguments, "--use_cpu"]
    given = (parser or OptionParser()).given(arguments)
    sys.path.insert(0, os.getcwd())  # where functions and methods of one's own are, as for a script that is run there
    experts = None if given.extra.experts is None else _experts(given)
    if given.model.model_name_or_path is None:
        raise ValueError("No student: pass `--model_name_or_path`.")
    set_loading(given.extra, given.config, given.model)
    return given, experts


def build(given: RunOptions, task: Task | None, train_dataset: Dataset | None = None) -> OPSDTrainer:
    """The trainer that these options describe; a dataset takes the place of the one that they name."""
    extra, script, config, model = given.extra, given.script, given.config, given.model
    data = task.data() if task else loaded(script, given.mixture)
    # Rows that experts are measured on are checked before anything is loaded.
    is_evaluated = config.eval_strategy != "no" or config.eval_on_start or isinstance(task, Experts)
    return OPSDTrainer(
        model=model.model_name_or_path,
        teacher_model=extra.teacher_models,
        args=config,
        train_dataset=train_dataset or _split(data, "dataset_train_split", script.dataset_train_split),
        eval_dataset=_split(data, "dataset_test_split", script.dataset_test_split) if is_evaluated else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        methods=[] if task is None else [_rewards(config, task)],
    )


def _rewards(config: OPSDConfig, task: Task) -> Rewards:
    """The rewards of a task, with the other settings of the method `rewards`, which is taken out of the options."""
    settings: dict[str, Any] = {}
    if isinstance(config.methods, dict):
        settings = config.methods.get("rewards") or {}
        config.methods = {name: one for name, one in config.methods.items() if name != "rewards"}
    if "functions" in settings:
        raise ValueError("`methods` sets `functions` of `rewards`, which the task or experts set: remove one.")
    return Rewards(task.rewards, **settings)


def end(trainer: OPSDTrainer) -> None:
    """Waits for the other processes, which fail if one exits first; a run that was stopped has its own status."""
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.interrupted:
        if trainer.accelerator.is_main_process:
            at = f"step {trainer.state.global_step} of {trainer.state.max_steps}"
            print(f"Stopped by SIGTERM at {at}: `--resume_from_checkpoint auto` goes on from there.", file=sys.stderr)
        sys.exit(STOPPED)


def _experts(given: RunOptions) -> Experts:
    """The experts of a run, in whose place no other teachers, rows or rewards are."""
    extra, script, config = given.extra, given.script, given.config
    others = {
        "dataset_name": script.dataset_name,
        "datasets": given.mixture.datasets,
        "teacher_models": extra.teacher_models,
        "teacher_model_name_or_path": config.teacher_model_name_or_path,
        "teacher_model_kind": config.teacher_model_kind,
    }
    if named := next((name for name, value in others.items() if value), None):
        raise ValueError(f"`{named}` with `experts`, which have models, rows and metrics: remove one of them.")
    experts = experts_of(extra.experts)
    metrics = [found_function(one.metric) for one in experts.values()]
    found = Experts(
        experts, lambda path: loaded(ScriptArguments(dataset_name=path), DatasetMixtureConfig()), metrics, config.seed
    )
    extra.teacher_models = found.teachers
    return found


# ---- Options of the script ------------------------------------------------------------------------------------------


def set_loading(extra: ExtraArguments, config: OPSDConfig, model: ModelConfig) -> None:
    """Sets in the config how to load each model; `*_init_kwargs` override the other options."""
    options = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    given = {name: value for name, value in options.items() if value is not None}
    config.model_init_kwargs = {**given, **(config.model_init_kwargs or {})}
    is_loaded = config.teacher_model_kind is None and config.teacher_server_url is None
    if is_loaded and (config.teacher_model_name_or_path or extra.teacher_models):
        attention = {"attn_implementation": model.attn_implementation}
        config.teacher_model_init_kwargs = {**attention, **(config.teacher_model_init_kwargs or {})}


# ---- Data -----------------------------------------------------------------------------------------------------------

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""How a single file is loaded, by its suffix."""


def loaded(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """The splits of the dataset that the options name, from the Hub or from files, as TRL's scripts load them."""
    name, config, streaming = script.dataset_name, script.dataset_config, script.dataset_streaming
    if mixture.datasets:
        return get_dataset(mixture)
    if not name:
        raise ValueError("No dataset: pass `--dataset_name`, or list several as `datasets` in YAML.")
    all_files = "this loads all such files below this folder; name a file or folder"
    refuse([(name in FORMATS.values(), f"`dataset_name={name!r}`", all_files)])
    if (suffix := Path(name).suffix) in FORMATS:
        return load_dataset(FORMATS[suffix], data_files=name, name=config, streaming=streaming)
    # The files that mark a folder of `save_to_disk`.
    if not any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
        return load_dataset(name, name=config, streaming=streaming)
    saved = load_from_disk(name)
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    return {split: rows.to_iterable_dataset() if streaming else rows for split, rows in splits.items()}


def _split(data: Splits, option: str, name: str) -> Dataset | IterableDataset:
    if name not in data:
        hint = " Evaluations need test.jsonl beside train.jsonl." if option == "dataset_test_split" else ""
        raise ValueError(f"`{option}={name!r}`: expected a split of the dataset, {' or '.join(map(repr, data))}.{hint}")
    return data[name]


# ---- Dry runs -------------------------------------------------------------------------------------------------------


def leave_nothing(config: OPSDConfig, folder: str) -> None:
    config.output_dir, config.report_to, config.report, config.push_to_hub = folder, [], False, False
    config.eval_on_start = config.enable_jit_checkpoint = False


class _OneStep(TrainerCallback):
    """Ends a training after its first optimizer step, without evaluating or saving."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop, control.should_log = True, True
        control.should_save = control.should_evaluate = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_save = control.should_evaluate = False
