"""The main process sends requests for all processes, and all receive its errors. Knows no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list, gather_object

from trl_opsd.errors import ServerError

Row = TypeVar("Row")
Answer = TypeVar("Answer")


def asked_by_main(rows: list[Row], ask: Callable[[list[Row]], list[Answer]] | None, process_index: int) -> list[Answer]:
    """Answers to this process's rows, any number, by `ask` in the main process, elsewhere `None`. Collective."""
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
    """Raises an error of the main process in all, as `ServerError`, so that none waits for it. Collective."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    (message,) = broadcast_object_list([None if error is None else str(error)])
    if error is not None:
        raise error
    if message is not None:  # in another process, to which the error itself cannot always be sent
        raise ServerError(message)
