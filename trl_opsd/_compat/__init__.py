"""The only modules that import other trainers and engines, one file or folder each; API changes are absorbed here.

Importing it drops what libraries log when they are imported, about devices and engines that this process may never use,
and deprecation warnings that only they can act on: TRL imports vLLM, DeepSpeed and torchao where they are installed.
"""

from __future__ import annotations

import logging
import warnings

_NOISE = {
    "vllm.triton_utils.importing": "Triton is installed",
    "DeepSpeed": "Setting accelerator to CPU",
    "torchao": "Failed to load",
    "torch.utils._pytree": "%s is an Enum subclass",  # torchao's
}
"""Beginning of the dropped message, by logger."""
_WARNINGS = (
    # DeepSpeed and FSDP2 call functions that torch renamed, some of them in each step.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning, ""),
    # TRL and accelerate call what transformers renamed.
    (r"`(gradient_checkpointing_(en|dis)able|is_gradient_checkpointing)` is deprecated", FutureWarning, ""),
    # TRL warns at five places; `versions.py` has bounds of its own.
    ("TRL currently supports vLLM versions", UserWarning, r"trl\."),
)
"""Message, category and module of warnings."""


# Before a module of this package imports TRL; no other messages of these loggers. mypy infers no lambda with a default.
for about in _WARNINGS:
    warnings.filterwarnings("ignore", *about)
for name, start in _NOISE.items():
    logging.getLogger(name).addFilter(lambda record, start=start: not str(record.msg).startswith(start))  # type: ignore[misc]
