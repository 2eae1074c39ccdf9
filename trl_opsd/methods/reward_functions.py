"""Finds and checks reward functions and reward models before a model is loaded, and calls them with rows of a batch.

B rows · F functions
"""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.threads import device_setter
from trl_opsd._compat.trl import (
    apply_chat_template,
    get_callable_name,
    get_config_model_id,
    is_async_callable,
    start_event_loop_in_daemon,
)
from trl_opsd.models.checks import whole_checkpoint

OF_BATCH = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric")
"""Keyword arguments of a reward function besides the columns of its rows."""
NOT_PASSED = ("prompt", "completion", "completion_ids")
"""Columns that it does not get: the first is in `prompts`, and the others could be mistaken for the rollout's."""


# ---- As they are passed ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """One reward as it was passed: a function, a reward model, or the path or id of one."""

    name: str
    """In the log."""
    source: Any
    tokenizer: PreTrainedTokenizerBase | None = None
    """Of a reward model."""

    @property
    def is_model(self) -> bool:
        """Whether it is a reward model, or the path of one."""
        return isinstance(self.source, str | PreTrainedModel)


def given_rewards(functions: Any, tokenizers: Any) -> list[Given]:
    """The rewards as a list, named as TRL does, with reward models' tokenizers."""
    sources, found, seen = [*map(found_function, _listed(functions))], list[Given](), Counter[str]()
    for source, tokenizer in zip(sources, _listed(tokenizers) or [None] * len(sources), strict=True):
        name = _name(source)
        seen[name] += 1
        if isinstance(source, str | PreTrainedModel):
            path = source if isinstance(source, str) else get_config_model_id(source.config)
            tokenizer = AutoTokenizer.from_pretrained(path) if tokenizer is None else tokenizer
        kind, heads = type(source).__name__, ("SequenceClassification", "RewardModel")
        # Others give many numbers, of which the first would be taken for a reward.
        if isinstance(source, PreTrainedModel) and (source.config.num_labels != 1 or not kind.endswith(heads)):
            raise ValueError(f"`Rewards`: the {kind} {name!r} does not give one number for each text.")
        # Two functions of one name get their own columns in the log.
        found.append(Given(name if seen[name] == 1 else f"{name}_{seen[name]}", source, tokenizer))
    return found


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def found_function(source: Any) -> Any:
    """The function of a name, `module.function` or one of `trl.rewards`; a path, or what is no name, as it is."""
    if not isinstance(source, str) or "/" in source or Path(source).exists():
        return source
    module, _, name = source.rpartition(".")
    try:
        return getattr(import_module(module or "trl.rewards"), name)
    except (AttributeError, ImportError) as error:
        expected = "expected `module.function`, a function of `trl.rewards`, or the path of a reward model"
        raise ValueError(f"`Rewards`: {source!r} was not found ({error}): {expected}.") from error


def _name(source: Any) -> str:
    if isinstance(source, str):
        return source.rstrip("/").split("/")[-1]
    if isinstance(source, PreTrainedModel):
        return str(get_config_model_id(source.config)).split("/")[-1] or type(source).__name__
    return str(get_callable_name(source))


def check_columns(rewards: Sequence[Given], where: str, columns: Collection[str], more: Collection[str]) -> None:
    """Refuses columns whose names clash with other arguments of reward functions, or that one does not accept."""
    if not (functions := [one for one in rewards if not one.is_model]):
        return
    given = dict.fromkeys((*OF_BATCH, *more, *sorted({*columns} - {*NOT_PASSED})))
    # A column would silently be replaced by the argument of the same name.
    if taken := sorted({*OF_BATCH, *more} - {*NOT_PASSED} & {*columns}):
        raise ValueError(f"{where} has a column {taken[0]!r}, but reward functions get another argument of that name.")
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


# ---- Calls ----------------------------------------------------------------------------------------------------------


@final
class Functions:
    """All reward functions of a trainer, by their names in the log."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions
        self._loop: asyncio.AbstractEventLoop | None = None

    def of(self, arguments: Mapping[str, Any], rows: Sequence[str]) -> Tensor:
        """The rewards of some rows, named for messages: [B, F], float32, NaN where a function returned `None`."""
        if not rows:
            return torch.empty(0, len(self.functions))
        found, coroutines = {}, {}
        for name, function in self.functions.items():
            if is_async_callable(function):
                coroutines[name] = function
                continue
            with _explained(name, rows):
                found[name] = _numbers(function(**arguments), rows)

        async def one(name: str, function: Callable[..., Any]) -> list[float]:
            with _explained(name, rows):
                return _numbers(await function(**arguments), rows)

        async def together() -> list[list[float]]:
            return await asyncio.gather(*(one(name, function) for name, function in coroutines.items()))

        if coroutines:
            found.update(zip(coroutines, self._wait(together()), strict=True))
        return torch.tensor([found[name] for name in self.functions]).T

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            # In a thread of its own, as the caller's may have a running loop, as in a notebook. It stays between
            # batches, as HTTP clients are bound to one loop.
            _, self._loop, _ = start_event_loop_in_daemon("rewards")
            self._loop.call_soon_threadsafe(device_setter())
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C nothing awaits it
            raise


@contextmanager
def _explained(name: str, rows: Sequence[str]) -> Iterator[None]:
    """Names function and rows in an error of a reward function."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):  # the trainer explains these
        raise
    except Exception as error:
        said = f"The reward function {name!r} failed for {rows[0]} to {rows[-1]}: {type(error).__name__}: {error}"
        raise RuntimeError(said) from error


def _numbers(returned: Any, rows: Sequence[str]) -> list[float]:
    """The rewards of one function as numbers, NaN for `None`."""
    given = [one.item() if hasattr(one, "item") else one for one in returned]
    values = [math.nan if one is None else float(one) for one in given]
    if len(values) != len(rows) or any(map(math.isinf, values)):
        raise ValueError(f"it returned {values} for {len(rows)} completions: expected a finite number or `None` each.")
    return values


# ---- Reward models --------------------------------------------------------------------------------------------------


def placed_model(source: Any, called: str, device: torch.device) -> Any:
    """The model, or that of a path, on a device, unsharded in each process."""
    if isinstance(source, str):
        # Without the student's ZeRO-3 config, which would shard this model too.
        with whole_checkpoint(called), loading(None):
            source = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, use_safetensors=True)
    return source if getattr(source, "hf_device_map", None) else source.to(device)


@final
class RewardModel:
    """Scores completions with a model, as TRL's GRPO does, so many `rows` at a time."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], rows: int) -> None:
        self._model = model.eval().requires_grad_(False)
        self._tokenizer, self._template, self._rows = tokenizer, template, rows
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The model finds a text's last token, where its logit is, as the last that is not padding.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """The reward of each completion."""
        texts = [self._text(prompt, one) for prompt, one in zip(prompts, completions, strict=True)]
        parts = [texts[at : at + self._rows] for at in range(0, len(texts), self._rows)]
        return [reward for part in parts for reward in self._scored(part)]

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        rendered = apply_chat_template({"messages": [*prompt, *completion]}, self._tokenizer, **self._template)
        return str(rendered["text"])

    @torch.inference_mode()
    def _scored(self, texts: list[str]) -> list[float]:
        # The chat template has already added special tokens.
        read = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(self._model.device)
        rewards: list[float] = self._model(**read).logits[:, 0].float().tolist()
        return rewards
