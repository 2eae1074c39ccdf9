"""Trains with the given options: loads models and data, resumes and saves. Runs in each process of a launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl_opsd.cli.train.options import ExtraArguments, Given, OptionParser, Task, loaded_rewards
from trl_opsd.config import OPSDConfig
from trl_opsd.monitor.progress import PHASES
from trl_opsd.monitor.progress import in_words as duration
from trl_opsd.options.normalize import check_once
from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)


def main(arguments: Sequence[str], parser: OptionParser | None = None) -> OPSDTrainer:
    """Trains a student as the arguments of a command line say, which `parser` reads; returns the trainer.

    Raises:
        SystemExit: An option does not exist or has a wrong kind of value.
        ValueError: The options contradict each other, or name what is not there.
    """
    if not torch.accelerator.is_available():  # without it, DeepSpeed on a CPU counts one process where there are two
        arguments = [*arguments, "--use_cpu"]
    parser = parser or OptionParser()
    given = parser.given(arguments)
    task = parser.tasks[given.task] if given.task else None
    if task:
        _take(task, given)
    if given.model.model_name_or_path is None:
        built_in = f"; or train on a built-in task, with `--task {next(iter(parser.tasks))}`" if parser.tasks else ""
        raise ValueError(f"No student: pass `--model_name_or_path`{built_in}.")
    warn_of_options(given)
    set_loading(given.extra, given.config, given.model)
    with _dry(given.config) if given.extra.dry_run else nullcontext():
        trainer = _built(given, task)
        if given.extra.dry_run:
            _dry_run(trainer)
        else:
            _train(trainer, task)
    return trainer


def end(trainer: OPSDTrainer) -> None:
    """Waits for the other processes, because they fail if one exits first."""
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def _take(task: Task, given: Given) -> None:
    """Sets the models of a task where no others are named."""
    if given.script.dataset_name or given.mixture.datasets:
        raise ValueError(f"`task={given.task!r}` comes with its own dataset: remove the task or the other dataset.")
    given.model.model_name_or_path = given.model.model_name_or_path or task.student
    if given.config.teacher_model_kind is None and given.extra.teacher_models is None:
        given.config.teacher_model_name_or_path = given.config.teacher_model_name_or_path or task.teacher


def _built(given: Given, task: Task | None) -> OPSDTrainer:
    data = task.data() if task else loaded(given.script, given.mixture)
    script, evaluated = given.script, given.config.eval_strategy != "no"
    return OPSDTrainer(
        model=given.model.model_name_or_path,
        teacher_model=given.extra.teacher_models,
        args=given.config,
        train_dataset=_split(data, "dataset_train_split", script.dataset_train_split),
        eval_dataset=_split(data, "dataset_test_split", script.dataset_test_split) if evaluated else None,
        quantization_config=get_quantization_config(given.model),
        peft_config=get_peft_config(given.model),
        reward_funcs=task.rewards if task else loaded_rewards(given.extra.reward_funcs),
    )


def _train(trainer: OPSDTrainer, task: Task | None) -> None:
    if task:
        task.evaluate(trainer)
    resume = trainer.args.resume_from_checkpoint  # a string on the command line
    trainer.train(resume_from_checkpoint={"true": True, "false": False}.get(str(resume).lower(), resume))
    trainer.save_model()
    if task:
        task.evaluate(trainer)


# ---- Options of the script ------------------------------------------------------------------------------------------


def set_loading(extra: ExtraArguments, config: OPSDConfig, model: ModelConfig) -> None:
    """Sets in the config how to load each model; `*_init_kwargs` override defaults, and a contradiction is an error."""
    options = {"model_revision": "revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    config.model_init_kwargs = _joined(model, options, "model_init_kwargs", config)
    if config.teacher_model_kind is None:
        options = {"teacher_dtype": "dtype", "teacher_attn_implementation": "attn_implementation"}
        loading = _joined(extra, options, "teacher_model_init_kwargs", config)
        if config.teacher_server_url is None:
            loading["attn_implementation"] = loading.get("attn_implementation") or model.attn_implementation
        else:  # the server has loaded it: what is set is refused
            loading = {name: value for name, value in loading.items() if value not in (None, "auto")}
        config.teacher_model_init_kwargs = loading


def _joined(group: Any, options: Mapping[str, str], of_model: str, config: OPSDConfig) -> dict[str, Any]:
    """Options of a group and the dict `of_model`, combined; `options` maps to names in that."""
    given = getattr(config, of_model) or {}
    set_here = {name: getattr(group, option) for option, name in options.items()}
    for option, name in options.items():
        if name in given and set_here[name] not in (None, getattr(type(group), option)):
            check_once(option, set_here[name], of_model, name, given[name])
    return {**{name: value for name, value in set_here.items() if value is not None}, **given}


_DATA = ("dataset_name", "dataset_config", "dataset_streaming")
_MIXTURE = ("datasets", "streaming", "test_split_size")
_LORA = (*(one.name for one in fields(ModelConfig) if one.name.startswith("lora_")), "use_rslora", "use_dora")
_4_BIT = ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")
_OF_TEACHER = ("teacher_dtype", "teacher_attn_implementation")


def warn_of_options(given: Given) -> None:
    """Warns of options of the script that have no effect; `OPSDTrainer` does so for those of its config."""
    extra, script, config, model, mixture = given.extra, given.script, given.config, given.model, given.mixture
    own_data = "the task comes with its own dataset" if given.task else "`datasets` is loaded"
    groups: list[tuple[Any, Sequence[str], bool, str]] = [
        (script, ["ignore_bias_buffers"], True, "this trainer does not use it"),
        (model, _LORA, not model.use_peft, "`use_peft` is not set"),
        (model, _4_BIT, not model.load_in_4bit, "`load_in_4bit` is not set"),
        (extra, _OF_TEACHER, config.teacher_model_kind is not None, "the student is its own teacher"),
        (script, ["dataset_test_split"], config.eval_strategy == "no", "`eval_strategy` is not set"),
        (script, _DATA, bool(given.task or mixture.datasets), own_data),
        (mixture, _MIXTURE, bool(given.task), own_data),
        (mixture, _MIXTURE[1:], not (given.task or mixture.datasets), "`datasets` is not set"),
    ]
    found = [
        f"`{name}={getattr(group, name)!r}`, because {reason}"
        for group, names, is_unread, reason in groups
        for name in names
        if is_unread and getattr(group, name) != getattr(type(group), name, [])  # a list's default is in a factory
    ]
    if found:
        logger.warning(f"Options without effect: {'; '.join(found)}.")


# ---- Data -----------------------------------------------------------------------------------------------------------

Splits = Mapping[str, Dataset | IterableDataset]

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""How a single file is loaded, by its suffix."""


def loaded(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """The splits of the dataset that the options name, from the Hub or from files, as TRL's scripts load them."""
    name, config, streaming = script.dataset_name, script.dataset_config, script.dataset_streaming
    if mixture.datasets:
        return get_dataset(mixture)
    if not name:
        raise ValueError("No dataset: pass `--dataset_name`, or list several as `datasets` in YAML.")
    if name in FORMATS.values():
        raise ValueError(
            f"`dataset_name={name!r}` is a file format and would load every file below the working directory: pass the "
            "path of a file or folder of that format."
        )
    path = Path(name)
    if path.is_file() and path.suffix in FORMATS:
        return load_dataset(FORMATS[path.suffix], data_files=name, name=config, streaming=streaming)
    # The files that mark a folder of `save_to_disk`.
    if not any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        return load_dataset(name, name=config, streaming=streaming)
    saved = load_from_disk(name)
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    return {split: rows.to_iterable_dataset() if streaming else rows for split, rows in splits.items()}


def _split(data: Splits, option: str, name: str) -> Dataset | IterableDataset:
    if name not in data:
        hint = " It is needed because `eval_strategy` is set." if option == "dataset_test_split" else ""
        raise ValueError(f"`{option}={name!r}`: expected a split of the dataset, {' or '.join(map(repr, data))}.{hint}")
    return data[name]


# ---- Dry runs -------------------------------------------------------------------------------------------------------


@contextmanager
def _dry(config: OPSDConfig) -> Iterator[None]:
    """Changes the options, before the trainer is built, so that a run of one step leaves nothing behind."""
    with TemporaryDirectory(prefix="trl_opsd-dry-run-") as folder:
        config.output_dir, config.report_to, config.push_to_hub = folder, [], False
        config.eval_on_start = False
        yield


def _dry_run(trainer: OPSDTrainer) -> None:
    """Runs one generation batch and one optimizer step, and prints a summary in the main process. Collective."""
    trainer.add_callback(_OneStep())
    trainer.train()
    if trainer.accelerator.is_main_process:
        print(_summary(trainer.state.log_history[0], trainer.state.max_steps))


class _OneStep(TrainerCallback):
    """Ends a training after its first optimizer step, without evaluating or saving."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop, control.should_log = True, True
        control.should_save = control.should_evaluate = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_save = control.should_evaluate = False


def _summary(logged: Mapping[str, float], steps: int) -> str:
    """The first step's log in words; `steps` are those of the whole run."""
    seconds = {PHASES[name]: logged[f"time/{name}"] for name in PHASES if f"time/{name}" in logged}
    divergence = "none: no token in the loss"
    if "divergence/mean" in logged:
        divergence = (
            f"{logged['divergence/mean']:.4g} nats per token; entropy of the student {logged['entropy/student']:.3g} "
            f"and of the teacher {logged['entropy/teacher']:.3g}"
        )
    lines = {
        "divergence": divergence,
        "completions": f"{logged['completions/mean_length']:.0f} tokens on average, from "
        f"{logged['completions/min_length']:.0f} to {logged['completions/max_length']:.0f}; "
        f"{logged['completions/clipped_ratio']:.0%} truncated at the limit",
        "step": f"loss {logged['loss']:.4g}, gradient norm {logged['grad_norm']:.3g}, learning rate "
        f"{logged['learning_rate']:.3g}{'' if logged['learning_rate'] else ': warmup starts at 0'}",
        "seconds": ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()),
        "the whole run": f"{steps} steps; estimated {duration(sum(seconds.values()) * steps)}, without evaluations "
        "and checkpoints",
    }
    head = "Dry run: one generation batch and one optimizer step succeeded; nothing was saved."
    return "\n".join([head, *(f"  {name:13} {text}" for name, text in lines.items())])
