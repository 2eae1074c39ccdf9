"""Ends a run cleanly on SIGTERM: the step is finished and saved, then every process stops.

A cluster sends SIGTERM before it reclaims a machine. This replaces the handler of transformers, in which each process
decides for itself at which step to save, and waits three seconds before that; a save may fall between a step and the
random numbers drawn for it, so that a run cannot resume from it exactly; and a folder is named `checkpoint-N` while it
is still empty.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = get_logger(__name__)


class StopOnSigterm(TrainerCallback):
    """Saves after the step in which the first process received a SIGTERM, on all processes, and stops."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._received = False
        self._stopping = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGTERM within the context; raises outside the main thread, where Python cannot handle signals."""
        here = threading.current_thread()
        if here is not threading.main_thread():
            raise ValueError(
                f"`enable_jit_checkpoint=True`, but `train` was called in the thread {here.name!r}: Python handles "
                "signals in the main thread only, so a SIGTERM would end this run without a checkpoint. Call `train` "
                "in the main thread, or set it to False."
            )
        self._received = self._stopping = False
        before = signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._is_time_to_stop():
            logger.warning(f"SIGTERM: saving step {state.global_step} and stopping.")
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may not be time for it

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._stopping and self._is_time_to_stop():
            logger.warning(f"SIGTERM: step {state.global_step} has just been saved, stopping.")
            control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._stopping:  # saved already
            control.should_save = control.should_evaluate = False

    def _receive(self, *_: Any) -> None:
        # No collective and no logging here: the signal may have interrupted either.
        self._received = True

    def _is_time_to_stop(self) -> bool:
        if self._received:
            self._accelerator.set_trigger()
        # Collective, once per step, so that all processes stop at the same one.
        self._stopping = bool(self._accelerator.check_trigger())
        return self._stopping
