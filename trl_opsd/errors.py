"""Errors that only this package raises, and how a command ends with an error.

An argument that is wrong is a `ValueError` or a `TypeError`, as everywhere.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OPSDError(RuntimeError):
    """Base class of the errors that this package raises during a run."""


class NonFiniteError(OPSDError, FloatingPointError):
    """A loss or a gradient is NaN or infinite; no step was taken along it."""


class ServerError(OPSDError):
    """An engine's server did not answer in time, or gave an invalid answer."""


class SyncError(OPSDError):
    """After a weight sync, the engine's log-probabilities differ from the student's."""


@contextmanager
def explained(command: Callable[[], str], whole: bool) -> Iterator[None]:
    """Ends a command with one sentence where the error explains itself: status 2 for a wrong argument, 1 for a failed
    run. Any other error, a bug, is raised, and with `whole` all are; `command` returns how the sentence begins.
    """
    try:
        yield
    except Exception as error:
        if whole or not _is_explained(error):
            raise
        if _ends_first(error):
            said = [f"{command()}: error: {error}", "`--traceback` shows where it was raised."]
            print(*said, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, OPSDError) else 2)


def _is_explained(error: Exception) -> bool:
    """Whether this error was written for a user: it is ours, the system's, or was raised by a `raise` statement."""
    if isinstance(error, ValueError | TypeError | ImportError):
        return (traceback.extract_tb(error.__traceback__)[-1].line or "").startswith("raise")
    return isinstance(error, OPSDError | OSError) and not isinstance(error, BrokenPipeError)  # of `| head`


def _ends_first(error: Exception) -> bool:
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return True
    from trl_opsd.parallel.failure import ends_first  # which imports torch

    return ends_first(error)
