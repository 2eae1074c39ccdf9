"""Takes away what transformers' trainer leaves behind when a training ends by an exception, such as a Ctrl-C.

A trainer is often told to train once more in the same notebook. What the next training sets anew by itself stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from trl_opsd.run.known import set_known

_BARS = ("training_bar", "prediction_bar")


@contextmanager
def nothing_left(trainer: Trainer) -> Iterator[None]:
    """Whatever ends what runs inside, the trainer is afterwards as after a training that came to its end.

    Args:
        trainer ([`~transformers.Trainer`]):
            Its weights, optimizer and state stay as they are.
    """
    try:
        yield
    except BaseException:
        set_known(trainer, is_in_train=False)
        _unhook_noise(trainer)
        _close_bars(trainer.callback_handler.callbacks)
        raise


def _unhook_noise(trainer: Trainer) -> None:
    """The next training adds NEFTune's noise by a hook of its own, and would add it twice."""
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
