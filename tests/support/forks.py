"""Starts pairs of processes as `accelerate launch` does, but by forking one that has imported everything.

The launcher's elastic agent is torch's own: it connects the processes, and when one dies it ends the other. Each pair
only skips the imports and DeepSpeed's check whether to compile its extension.

A process that has trained cannot fork pairs: tests have theirs forked by a server ([`serve`]), which itself was forked
from the tests' process when that had imported everything and trained nothing. Each launch is a fork of that server.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate.commands.launch import launch_command, launch_command_parser
from deepspeed.comm.torch import build_shm_op
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import trl_opsd

CONFIGS = Path(trl_opsd.__file__).parent / "accelerate_configs"
PROCESSES = 2
SECONDS = 600
"""Time limit of a launch; generous, for a busy machine."""


def launch(strategy: str, function: Callable[..., Any], *args: Any, processes: int = PROCESSES) -> dict[int, Any]:
    """Runs a function in several processes and returns its results by rank.

    The strategy is a file of `trl_opsd/accelerate_configs` for the CPU; or "ddp", as `torchrun` starts processes, since
    accelerate has no file for it that works on a CPU; or "alone", in one process that knows of no other.
    """
    if strategy == "alone":
        return {0: function(*args)}
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=strategy,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    results: dict[int, Any] = {}

    def child(*args: Any) -> Any:
        gc.freeze()  # what was inherited: accelerate collects in each training, and would walk it all
        return function(*args)

    def run(_: Any = None) -> None:
        results.update(elastic_launch(agent, child)(*args))

    build_shm_op()
    if strategy == "ddp":
        run()
    else:
        config = str(CONFIGS / f"{strategy}.yaml")
        with mock.patch("torch.distributed.run.run", run):
            given = ["--config_file", config, "--num_processes", str(processes), __file__]
            launch_command(launch_command_parser().parse_args(given))
    assert len(results) == processes
    return dict(sorted(results.items()))  # they come in the order in which processes end


@dataclass(frozen=True)
class Launched:
    """How a launch ended."""

    results: dict[int, Any] | None
    """By rank; none if a process failed."""
    first: int | None
    """The rank that failed first."""
    ended: float
    """When all processes had ended, in seconds since the epoch."""
    printed: str
    """What they printed on stderr."""


_server: Connection | None = None


def serve() -> None:
    """Forks the server, once: call it when everything is imported, and before anything trains."""
    global _server
    if _server is not None:
        return
    _server, theirs = multiprocessing.Pipe()
    if os.fork() == 0:
        try:
            _server.close()
            _serve(theirs, os.getppid())
        finally:
            os._exit(0)
    theirs.close()


def launched(strategy: str, function: Callable[..., Any], *args: Any, processes: int = PROCESSES) -> Launched:
    """Has the server [`launch`] a function of a module that tests import, and waits until all has ended."""
    assert _server is not None, "the server is forked once all tests are collected"
    with tempfile.NamedTemporaryFile() as file:
        _server.send((strategy, function, args, processes, file.name))
        launcher = _server.recv()
        if not _server.poll(SECONDS):
            os.kill(launcher, signal.SIGTERM)  # it ends its processes; killed, it would leave them behind
        answers = [_server.recv()]
        while isinstance(answers[-1], tuple):
            answers.append(_server.recv())
        printed = Path(file.name).read_text(errors="replace")
    print(f"{strategy} {function.__name__}: {answers.pop():.1f} CPU seconds")
    assert answers, f"{function.__name__} did not end in {SECONDS} seconds, or failed:\n{printed[-6000:]}"
    results, first, ended = answers[0]
    return Launched(results, first, ended, printed)


def results(strategy: str, function: Callable[..., Any], *args: Any, processes: int = PROCESSES) -> dict[int, Any]:
    """The results of a launch in which no process fails, by rank."""
    found = launched(strategy, function, *args, processes=processes)
    assert found.results is not None, found.printed[-6000:]
    return found.results


def _serve(connection: Connection, parent: int) -> None:
    """Forks a launcher for each request; sends its pid, its answer, and the CPU seconds of all its processes."""
    warnings.resetwarnings()  # of pytest
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with open(os.devnull, "wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    while os.getppid() == parent:
        if not connection.poll(5):
            continue
        try:
            request = connection.recv()
        except EOFError:
            return
        build_shm_op()  # once: a fork finds it loaded
        launcher = os.fork()
        if launcher == 0:
            connection.send(os.getpid())
            _answer(connection, *request)
            os._exit(0)
        before = _cpu_seconds()
        os.waitpid(launcher, 0)
        connection.send(_cpu_seconds() - before)


def _answer(connection: Connection, strategy: str, function: Any, args: Any, processes: int, printed: str) -> None:
    """Launches, with everything that is printed in a file, also by streams that pytest has put in place of others."""
    try:
        with open(printed, "wb") as file:
            for descriptor in {1, 2, sys.stdout.fileno(), sys.stderr.fileno()}:
                os.dup2(file.fileno(), descriptor)
        try:
            answer = (launch(strategy, function, *args, processes=processes), None, time.time())
        except ChildFailedError as error:
            answer = (None, error.get_first_failure()[0], time.time())
        connection.send(answer)
    except BaseException:
        traceback.print_exc()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
