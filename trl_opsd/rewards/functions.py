"""Calls reward functions and reward models with the rows of a batch, and checks that each returns one reward per row.

B rows · F functions
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.threads import device_setter
from trl_opsd._compat.trl import apply_chat_template, is_async_callable, start_event_loop_in_daemon

__all__ = ["RewardModel", "Rewards", "loaded_model"]


@final
class Rewards:
    """All reward functions of a trainer, by their names in the log; `weights` [F] are `reward_weights`."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], weights: Tensor) -> None:
        self.functions, self.weights = functions, weights
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
        which = rows[0] if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
        raise RuntimeError(
            f"The reward function {name!r} failed for {which}: {type(error).__name__}: {error}"
        ) from error


def _numbers(returned: Any, rows: Sequence[str]) -> list[float]:
    """The rewards of one function as numbers, NaN for `None`."""
    if isinstance(returned, str | Mapping):
        raise TypeError(f"it returned a {type(returned).__name__}: expected a list of numbers.")
    if len(returned := list(returned)) != len(rows):
        raise ValueError(f"it returned {len(returned)} rewards for {len(rows)} completions: expected one for each.")
    given = (one.item() if hasattr(one, "item") else one for one, _ in zip(returned, rows, strict=True))
    values = [math.nan if one is None else float(one) for one in given]
    if any(map(math.isinf, values)):
        raise ValueError(f"it returned {values}: expected finite numbers, or `None` where it does not apply.")
    return values


# ---- Reward models --------------------------------------------------------------------------------------------------


def loaded_model(path: str) -> Any:
    """The model at a path, unsharded in each process."""
    # Without the student's ZeRO-3 config, which would shard this model too.
    with loading(None):
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, use_safetensors=True)


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
