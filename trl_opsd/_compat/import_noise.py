"""Drops what libraries log when they are merely imported, about devices and kernels that this process may never use,
and what they warn of that only they can change.

TRL imports vLLM and DeepSpeed where they are installed, whether or not a training asks for them.
"""

from __future__ import annotations

import logging
import warnings

_NOISE = {
    "vllm.triton_utils.importing": "Triton is installed",
    "DeepSpeed": "Setting accelerator to CPU",
}
"""Loggers, and how the message begins that is dropped."""


def drop_import_noise() -> None:
    """Filters these messages, and no other of their loggers. Called again it does nothing."""
    # DeepSpeed and FSDP2 call what torch has given another name, some of it in each step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    for name, start in _NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _NotAbout) for one in logger.filters):
            logger.addFilter(_NotAbout(start))


class _NotAbout(logging.Filter):
    """Passes all messages but those that begin with a text."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._start)
