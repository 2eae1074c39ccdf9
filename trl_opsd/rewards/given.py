"""Checks the rewards that a user passes, before a model is loaded, and names each as TRL does."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_opsd._compat.trl import get_callable_name, get_config_model_id

__all__ = ["OURS", "Given", "check_columns", "given_rewards"]

OURS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric")
"""Keyword arguments of a reward function besides the columns of its rows."""
NOT_PASSED = ("prompt", "completion", "completion_ids")
"""Columns that it does not get: the first is in `prompts`, and the others could be mistaken for the rollout's."""


@dataclass(frozen=True, slots=True)
class Given:
    """One reward as it was passed: a function, a reward model, or the path or id of one."""

    name: str
    """In the log."""
    source: Any
    tokenizer: PreTrainedTokenizerBase | None
    """Of a reward model; by default that of its folder."""

    @property
    def is_model(self) -> bool:
        """Whether it is a reward model, or the path of one."""
        return isinstance(self.source, str | PreTrainedModel)


def given_rewards(reward_funcs: Any, reward_processing_classes: Any) -> list[Given]:
    """The rewards as a list, with reward models' tokenizers."""
    sources = _listed(reward_funcs)
    tokenizers = _listed(reward_processing_classes) or [None] * len(sources)
    found, seen = [], Counter[str]()
    for number, (source, tokenizer) in enumerate(zip(sources, tokenizers, strict=True)):
        name = _name(source)
        seen[name] += 1
        # Two functions of one name get their own columns in the log.
        given = Given(name if seen[name] == 1 else f"{name}_{seen[name]}", source, tokenizer)
        if given.is_model:
            _check_model(source, f"reward_funcs[{number}]")
            if tokenizer is None:
                path = source if isinstance(source, str) else get_config_model_id(source.config)
                given = replace(given, tokenizer=AutoTokenizer.from_pretrained(path))
        found.append(given)
    return found


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _name(source: Any) -> str:
    if isinstance(source, str):
        return source.rstrip("/").split("/")[-1]
    if isinstance(source, PreTrainedModel):
        return str(get_config_model_id(source.config)).split("/")[-1] or type(source).__name__
    return str(get_callable_name(source))


def _check_model(source: Any, called: str) -> None:
    """Refuses a reward model that does not give one number; by its config if it is not loaded."""
    if isinstance(source, str):
        try:
            config = AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            [why, *_] = str(error).splitlines()
            raise ValueError(
                f"`{called}={source!r}`: no reward model can be loaded from there ({why}). A reward function is passed "
                "itself, not by its name."
            ) from error
        kinds = config.architectures or []
    else:
        config, kinds = source.config, [type(source).__name__]
    how = "pass a model with one label, `AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)`"
    # transformers would add a head with random weights, and any text would get some number.
    if kinds and not any("SequenceClassification" in kind or "RewardModel" in kind for kind in kinds):
        raise ValueError(f"`{called}` is a {kinds[0]} without a head that gives one number per text: {how}.")
    if config.num_labels != 1:
        raise ValueError(f"`{called}` gives {config.num_labels} numbers per text: {how}.")


def check_columns(
    rewards: Sequence[Given], datasets: Mapping[str, Collection[str] | None], more: Collection[str] = ()
) -> None:
    """Refuses columns whose names clash with other arguments of reward functions, or that one does not accept."""
    functions = [one for one in rewards if not one.is_model]
    for where, columns in datasets.items() if functions else ():
        if columns is None:
            continue
        # A column would silently be replaced by the argument of the same name.
        if taken := sorted({*OURS, *more} - {*NOT_PASSED} & {*columns}):
            raise ValueError(
                f"{where} has a column {taken[0]!r}, but reward functions get another argument of that name: rename "
                "the column."
            )
        given = dict.fromkeys((*OURS, *more, *sorted({*columns} - {*NOT_PASSED})))
        for one in functions:
            try:
                inspect.signature(one.source).bind(**given)
            except TypeError as error:
                raise ValueError(
                    f"The reward function {one.name!r} cannot be called for the rows of {where}: {error}. It gets "
                    f"{', '.join(map(repr, given))} by name: accept those it does not need as `**kwargs`."
                ) from None
            except ValueError:  # builtins may have no signature
                continue
