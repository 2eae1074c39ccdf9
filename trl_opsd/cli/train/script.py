"""Trains with the given options: loads models and data, resumes and saves. Runs in each process of a launch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl_opsd.cli.train.options import ExtraArguments, Given, OptionParser, Task
from trl_opsd.config import OPSDConfig
from trl_opsd.monitor.progress import PHASES
from trl_opsd.trainer import OPSDTrainer


def main(arguments: Sequence[str], parser: OptionParser | None = None) -> OPSDTrainer:
    """Trains a student as the arguments of a command line say.

    Args:
        arguments (`Sequence[str]`):
            Names and values of options: fields of [`OPSDConfig`], of TRL's `ScriptArguments`, `ModelConfig` and
            `DatasetMixtureConfig`, and of [`ExtraArguments`].
        parser (`OptionParser`, *optional*):
            Reads them; one with built-in tasks for a script that has any.

    Returns:
        [`OPSDTrainer`]: The trainer, after training.

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
    _check_models(given, list(parser.tasks))
    warn_of_options(given)
    set_loading(given.extra, given.config, given.model)
    with dry(given.config) if given.extra.dry_run else nullcontext() as dry_run:
        trainer = _built(given, task)
        if dry_run is not None:
            dry_run.of(trainer)
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
        raise ValueError(f"`task={given.task!r}` has a dataset of its own: remove it, or the other dataset.")
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
        train_dataset=split(data, "dataset_train_split", script.dataset_train_split),
        eval_dataset=split(data, "dataset_test_split", script.dataset_test_split) if evaluated else None,
        quantization_config=get_quantization_config(given.model),
        peft_config=get_peft_config(given.model),
        reward_funcs=task.rewards if task else None,
    )


def _train(trainer: OPSDTrainer, task: Task | None) -> None:
    if task:
        task.evaluate(trainer)
    resume = trainer.args.resume_from_checkpoint  # a string on the command line
    trainer.train(resume_from_checkpoint={"true": True, "false": False}.get(str(resume).lower(), resume))
    trainer.save_model()
    if task:
        task.evaluate(trainer)


def _check_models(given: Given, tasks: Sequence[str]) -> None:
    """Rejects a run without a student or without a teacher, before anything is loaded."""
    extra, config, model = given.extra, given.config, given.model
    if model.model_name_or_path is None:
        raise ValueError(
            "A student model is required for distillation training. Set it with `--model_name_or_path`"
            f"{f'; or train on a built-in task, with `--task {tasks[0]}`' if tasks else ''}."
        )
    options = {
        "teacher_model_name_or_path": config.teacher_model_name_or_path,
        "teacher_models": extra.teacher_models,
        "teacher_model_kind": config.teacher_model_kind,
    }
    named = [f"`{name}={value!r}`" for name, value in options.items() if value is not None]
    if not named:
        raise ValueError(
            "A teacher model is required for distillation training. Set it with `--teacher_model_name_or_path`, "
            "several with `--teacher_models`; or let the student teach itself, with `--teacher_model_kind`."
        )
    if len(named) > 1 and extra.teacher_models:
        raise ValueError(f"{' and '.join(named)} each say who teaches: remove all but one.")


def set_loading(extra: ExtraArguments, config: OPSDConfig, model: ModelConfig) -> None:
    """Sets in the config how to load each model; `*_init_kwargs` override defaults, and a contradiction is an error."""
    attention = model.attn_implementation
    options = {"model_revision": "revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    config.model_init_kwargs = _joined(model, options, "model_init_kwargs", config)
    if config.teacher_model_kind is None:
        options = {"teacher_dtype": "dtype", "teacher_attn_implementation": "attn_implementation"}
        loading = _joined(extra, options, "teacher_model_init_kwargs", config)
        if config.teacher_server_url is None:
            loading["attn_implementation"] = loading.get("attn_implementation") or attention
        else:  # the server has loaded it: what is set is refused
            loading = {name: value for name, value in loading.items() if value not in (None, "auto")}
        config.teacher_model_init_kwargs = loading


def _joined(group: Any, options: Mapping[str, str], of_model: str, config: OPSDConfig) -> dict[str, Any]:
    """Options of a group and the dict `of_model`, combined; `options` maps to names in that."""
    given = getattr(config, of_model) or {}
    asked = {name: (option, getattr(group, option)) for option, name in options.items()}
    for name, (option, value) in asked.items():
        if name in given and value not in (None, given[name], getattr(type(group), option)):
            raise ValueError(
                f"`{option}={value!r}` and `{of_model}={{{name!r}: {given[name]!r}}}` are two values for one thing: "
                "remove one of them."
            )
    return {**{name: value for name, (_, value) in asked.items() if value is not None}, **given}


@contextmanager
def dry(config: OPSDConfig) -> Iterator[DryRun]:
    """Changes the options, before the trainer is built, so that a run of one step leaves nothing behind."""
    with TemporaryDirectory(prefix="trl_opsd-dry-run-") as folder:
        config.output_dir, config.report_to, config.push_to_hub = folder, [], False
        config.eval_on_start = False
        yield DryRun()


@dataclass(frozen=True, slots=True)
class DryRun:
    """One generation batch and one optimizer step of a trainer that passed every check when it was built."""

    def of(self, trainer: OPSDTrainer) -> None:
        """Runs the step and prints a summary, in the main process. Collective."""
        trainer.add_callback(_OneStep())
        trainer.train()
        if trainer.accelerator.is_main_process:
            print(in_words(trainer.state.log_history[0], trainer.state.max_steps))


class _OneStep(TrainerCallback):
    """Ends a training after its first optimizer step, without evaluating or saving."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop, control.should_log = True, True
        control.should_save = control.should_evaluate = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_save = control.should_evaluate = False


def in_words(logged: Mapping[str, float], steps: int) -> str:
    """A summary of the first step's log; `steps` are those of the whole run."""
    seconds = {name: logged[f"time/{name}"] for name in PHASES if f"time/{name}" in logged}
    whole = sum(seconds.values())
    parts = ", ".join(f"{PHASES[name]} {value:.2f} s" for name, value in seconds.items())
    lines = ["Dry run: one generation batch and one optimizer step went through; nothing was saved."]
    if "divergence/mean" in logged:
        lines.append(
            f"  divergence    {logged['divergence/mean']:.4g} nats per token; entropy of the student "
            f"{logged['entropy/student']:.3g}, of the teacher {logged['entropy/teacher']:.3g}"
        )
    else:
        lines.append("  divergence    none: no token counted in the loss")
    lines += [
        f"  completions   {logged['completions/mean_length']:.0f} tokens on average, from "
        f"{logged['completions/min_length']:.0f} to {logged['completions/max_length']:.0f}; "
        f"{logged['completions/clipped_ratio']:.0%} were cut at the limit",
        f"  step          loss {logged['loss']:.4g}, gradient norm {logged['grad_norm']:.3g}, learning rate "
        f"{logged['learning_rate']:.3g}{'' if logged['learning_rate'] else ', with which a warm-up begins'}",
        f"  seconds       {parts}",
        f"  the whole run {steps} steps; at this pace {_duration(whole * steps)}, without evaluations and checkpoints",
    ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


logger = get_logger(__name__)

_DATA = ("dataset_name", "dataset_config", "dataset_streaming")
_MIXTURE = ("datasets", "streaming", "test_split_size")
_LORA = (*(one.name for one in fields(ModelConfig) if one.name.startswith("lora_")), "use_rslora", "use_dora")
_4_BIT = ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")
_OF_TEACHER = ("teacher_dtype", "teacher_attn_implementation")


def warn_of_options(given: Given) -> None:
    """Warns of options of the script that have no effect; `OPSDTrainer` does so for those of its config."""
    extra, script, config, model, mixture = given.extra, given.script, given.config, given.model, given.mixture
    unread: list[tuple[Any, Sequence[str], str]] = [(script, ["ignore_bias_buffers"], "this trainer has no use for it")]
    if not model.use_peft:
        unread.append((model, _LORA, "`use_peft` is not set"))
    if not model.load_in_4bit:
        unread.append((model, _4_BIT, "`load_in_4bit` is not set"))
    if config.teacher_model_kind is not None:
        unread.append((extra, _OF_TEACHER, "the student is its own teacher"))
    if config.eval_strategy == "no":
        unread.append((script, ["dataset_test_split"], "`eval_strategy` is not set"))
    if given.task:
        unread += [
            (group, names, "the task has a dataset of its own")
            for group, names in ((script, _DATA), (mixture, _MIXTURE))
        ]
    elif mixture.datasets:
        unread.append((script, _DATA, "`datasets` is loaded"))
    found = [
        f"`{name}={getattr(group, name)!r}`, because {reason}"
        for group, names, reason in unread
        for name in names
        if getattr(group, name) != getattr(type(group), name, [])  # a list has its default in a factory
    ]
    if found:
        logger.warning(f"Options without effect: {'; '.join(found)}.")


Splits = Mapping[str, Dataset | IterableDataset]

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""How a single file is loaded, by its suffix."""


def loaded(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """The splits of the dataset that the options name; rejects options of another kind of dataset."""
    if not (mixture.datasets or script.dataset_name):
        raise ValueError(
            "Either `datasets` or `dataset_name` must be provided. Set `--dataset_name` to the name or path of a "
            "dataset, or list several as `datasets` in the file of `--config`."
        )
    if mixture.datasets:
        with _explained("datasets", [one.path for one in mixture.datasets]):
            return get_dataset(mixture)
    if mixture.streaming:
        raise ValueError("`streaming` belongs to `datasets`: with `dataset_name` set `dataset_streaming`.")
    if mixture.test_split_size is not None:
        raise ValueError(
            "`test_split_size` splits what `datasets` lists, and would have no effect on `dataset_name`: name a split "
            "with `dataset_test_split`, or list the dataset as `datasets` in the file of `--config`."
        )
    return _one_dataset(script.dataset_name, script.dataset_config, script.dataset_streaming)


def _one_dataset(name: str, config: str | None, streaming: bool) -> Splits:
    path = Path(name)
    if name in FORMATS.values():
        raise ValueError(
            f"`dataset_name={name!r}` is a format: pass the path of a file or folder of that format; it would load "
            "every file below the working directory."
        )
    if path.is_file() and path.suffix in FORMATS:
        if not path.stat().st_size:
            raise ValueError(f"`dataset_name={name!r}` is an empty file: expected a row in each line.")
        with _explained("dataset_name", [name]):
            return load_dataset(FORMATS[path.suffix], data_files=name, name=config, streaming=streaming)
    if path.is_file():
        raise ValueError(
            f"`dataset_name={name!r}` is a file of no kind that is read here: expected one of {', '.join(FORMATS)}."
        )
    # The files that mark a folder of `save_to_disk`.
    if not any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        with _explained("dataset_name", [name]):
            return load_dataset(name, name=config, streaming=streaming)
    if config is not None:
        raise ValueError(
            f"`dataset_config={config!r}`: {name!r} was written by `save_to_disk` and has only one: remove the option."
        )
    saved = load_from_disk(name)
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    return {split: rows.to_iterable_dataset() if streaming else rows for split, rows in splits.items()}


@contextmanager
def _explained(option: str, names: Sequence[str]) -> Iterator[None]:
    """Names the dataset in errors of `datasets`, which only state that the Hub was not reached, or an error."""
    try:
        yield
    except DatasetGenerationError as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(
            f"`{option}={' or '.join(map(repr, names))}` cannot be read as it is written: {why}"
        ) from error
    except (ConnectionError, FileNotFoundError) as error:
        absent = [name for name in names if name not in FORMATS.values() and not Path(name).exists()]
        if not absent:
            raise
        raise ValueError(
            f"`{option}={' or '.join(map(repr, absent))}` is neither a file or folder here nor a dataset that the Hub "
            f"gives access to: correct it, or log in. {str(error).splitlines()[0]}"
        ) from error


def split(data: Splits, option: str, name: str) -> Dataset | IterableDataset:
    """One split of a dataset; `option` names it, for the message, which lists those there are."""
    if name in data:
        return data[name]
    close = difflib.get_close_matches(name, data, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if option == "dataset_test_split":
        hint += " It is needed because `eval_strategy` is set."
    raise ValueError(f"`{option}={name!r}`: expected a split of the dataset, {' or '.join(map(repr, data))}.{hint}")
