"""Cleans up what transformers' trainer leaves behind when training ends with an exception, such as a Ctrl-C.

In a notebook the same trainer is often trained again. State that the next training resets by itself is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from trl_opsd.run.known import set_known

_BARS = ("training_bar", "prediction_bar")


@contextmanager
def cleanup_on_error(trainer: Trainer) -> Iterator[None]:
    """If the body raises, leaves the trainer as a completed training would; weights, optimizer and state stay."""
    try:
        yield
    except BaseException:
        set_known(trainer, is_in_train=False)
        _unhook_noise(trainer)
        _close_bars(trainer.callback_handler.callbacks)
        raise


def _unhook_noise(trainer: Trainer) -> None:
    """Removes NEFTune's hook: the next training adds its own, and would add the noise twice."""
    handle = getattr(trainer, "neftune_hook_handle", None)
    if handle is not None:
        handle.remove()


def _close_bars(callbacks: list[Any]) -> None:
    for callback in callbacks:
        for name in _BARS:
            close = getattr(getattr(callback, name, None), "close", None)
            if close is not None:
                close()
                setattr(callback, name, None)
