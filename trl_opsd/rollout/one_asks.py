"""The main process asks a server for all processes, and all learn of its errors. Knows no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list, gather_object

from trl_opsd.run.errors import ServerError

Row = TypeVar("Row")
Answer = TypeVar("Answer")


def asked_by_main(rows: list[Row], ask: Callable[[list[Row]], list[Answer]] | None, process_index: int) -> list[Answer]:
    """What the main process is answered for the rows of this one; processes may have different numbers. Collective.

    Args:
        rows (`list`):
            Those of this process.
        ask (`Callable`, *optional*):
            In the main process: takes the rows of all, and returns an answer for each; `None` in the others.
        process_index (`int`):
            Which process this is.

    Raises:
        Exception: What `ask` raised; in the other processes a [`ServerError`] with the same message.
    """
    by_process = gather_object([rows])
    answers: list[Any] = [None]
    with shared_errors():
        if ask is not None:
            rest = iter(ask([row for rows in by_process for row in rows]))
            answers = [[[next(rest) for _ in rows] for rows in by_process]]
    (of_each,) = broadcast_object_list(answers)
    mine: list[Answer] = of_each[process_index]
    return mine


@contextmanager
def shared_errors() -> Iterator[None]:
    """Broadcasts an error of the main process to all others, so that none waits for it. Collective.

    Raises:
        ServerError: In the other processes, with the message of the error.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    (message,) = broadcast_object_list([None if error is None else str(error)])
    if error is not None:
        raise error
    if message is not None:
        raise ServerError(message)
