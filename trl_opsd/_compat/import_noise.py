"""Drops what libraries say when they are merely imported, about devices and engines that this process may never use.

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
_WARNING = "TRL currently supports vLLM versions"
"""How the one begins that TRL gives at five places of its own; where vLLM is chosen it is said once."""


def drop_import_noise() -> None:
    """Filters these messages, and no other of their loggers. Called again it does nothing."""
    for name, start in _NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _NotAbout) for one in logger.filters):
            logger.addFilter(_NotAbout(start))
    warnings.filterwarnings("ignore", message=_WARNING, module=r"trl\.")


class _NotAbout(logging.Filter):
    """Passes all messages but those that begin with a text."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._start)
