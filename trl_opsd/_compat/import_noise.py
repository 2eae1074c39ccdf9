"""Drops what libraries log when they are merely imported, about devices and engines that this process may never use,
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
_WARNINGS = (
    # DeepSpeed and FSDP2 call what torch has given another name, some of it in each step.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning, ""),
    # TRL and accelerate call what transformers has given another name.
    (r"`(gradient_checkpointing_(en|dis)able|is_gradient_checkpointing)` is deprecated", FutureWarning, ""),
    # At five places of TRL's own; where vLLM is chosen it is said once.
    ("TRL currently supports vLLM versions", UserWarning, r"trl\."),
)
"""Message, category and module of warnings."""


def drop_import_noise() -> None:
    """Filters these messages, and no other of their loggers. Called again it does nothing."""
    for about in _WARNINGS:
        warnings.filterwarnings("ignore", *about)
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
