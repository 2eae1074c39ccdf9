"""Checks the kinds of the trainer's arguments: objects instead of classes, in the right order; not what is in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainingArguments


def check_given(
    *, callbacks: Any = None, optimizers: Any = (None, None), tools: Any = None, peft_config: Any = None, **given: Any
) -> None:
    """Refuses arguments that are classes, or stand in the place of others."""
    for name, value in {**given, "peft_config": peft_config}.items():
        _check_no_class(name, value)
        if isinstance(value, os.PathLike) and not name.endswith("dataset"):  # for which there is better advice
            raise TypeError(f"`{name}` is a {type(value).__name__}: expected a path as text, `str(path)`.")
        if isinstance(value, Mapping):
            for key, one in value.items():
                if not isinstance(key, str):
                    raise TypeError(
                        f"`{name}` has the name {key!r}, a {type(key).__name__}: expected text, {str(key)!r}."
                    )
                _check_no_class(f"{name}[{key!r}]", one)
    if isinstance(given.get("teacher_model"), TrainingArguments):
        raise TypeError(
            f"`teacher_model` is an {type(given['teacher_model']).__name__}: the teacher comes second, and the options "
            "third: pass `args=`."
        )
    _check_model(given.get("model"))
    _check_not_wrapped("model", given.get("model"))
    _check_not_wrapped("teacher_model", given.get("teacher_model"))
    _check_optimizers(optimizers)
    _check_list("callbacks", callbacks, "`TrainerCallback`s", _is_callback)
    _check_list("tools", tools, "functions", callable)
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        raise TypeError(
            f"`peft_config` is a {type(peft_config).__name__}: expected a `PeftConfig`, such as `LoraConfig(r=16)`."
        )
    if (task := getattr(peft_config, "task_type", None)) not in (None, "CAUSAL_LM"):
        raise ValueError(f"`peft_config.task_type` is {task}: the student is a causal language model, 'CAUSAL_LM'.")


def _check_no_class(name: str, value: Any) -> None:
    if isinstance(value, type):
        made = "from_pretrained" if hasattr(value, "from_pretrained") and name != "peft_config" else ""
        example = f"{value.__name__}{made and '.'}{made}(...)"
        raise TypeError(f"`{name}` is the class {value.__name__}: pass an object, `{example}`.")


def _check_model(model: Any) -> None:
    if not isinstance(model, str | nn.Module):
        raise TypeError(
            f"`model` is a {type(model).__name__}: expected a path, a model id, a `PreTrainedModel` or a `PeftModel`."
        )


def _check_not_wrapped(name: str, model: Any) -> None:
    kind = type(model).__name__
    is_compiled = kind == "OptimizedModule"  # of `torch.compile`; importing its module takes seconds
    if is_compiled or isinstance(model, nn.DataParallel | DistributedDataParallel):
        inside = f"`{name}.{'_orig_mod' if is_compiled else 'module'}`"
        raise TypeError(
            f"`{name}` is a {kind} around a model: pass the model itself, {inside}; the launch wraps it as it needs."
        )


def _check_optimizers(optimizers: Any) -> None:
    expected = "expected a tuple of an optimizer and a scheduler, `(optimizer, None)` for the default scheduler."
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise TypeError(f"`optimizers` is a {type(optimizers).__name__}: {expected}")
    optimizer, scheduler = optimizers
    if any(isinstance(one, type) for one in optimizers):
        raise TypeError(f"`optimizers` holds a class: {expected} `optim` in `OPSDConfig` takes the name of one.")
    if isinstance(optimizer, LRScheduler) or isinstance(scheduler, Optimizer):
        raise TypeError(f"`optimizers` are in the wrong order: {expected}")


def _check_list(name: str, value: Any, kind: str, fits: Callable[[Any], bool]) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise TypeError(f"`{name}` is a {type(value).__name__}: expected a list of {kind}.")
    for one in value:
        if not fits(one):
            raise TypeError(f"`{name}` holds a {type(one).__name__}: expected a list of {kind}.")


def _is_callback(value: Any) -> bool:
    """Whether transformers takes it as a callback; it makes an object of a class."""
    return issubclass(value, TrainerCallback) if isinstance(value, type) else isinstance(value, TrainerCallback)
