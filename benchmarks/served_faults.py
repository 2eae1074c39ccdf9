"""Breaks the server of a teacher during a training, and prints what the user reads and what is trained on.

    python benchmarks/served_faults.py

Prints, for each fault, after how many seconds the training ended, beside one without the fault; the largest difference
of a weight from that one; and what was logged or raised. The servers are vLLM's, in
processes of their own; the one that answers garbage is a stand-in.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from support import serving, tiny
from support.failing_server import pretended
from transformers import AutoModelForCausalLM, PrinterCallback

from trl_opsd import FixedRollout, OPSDError, OPSDTrainer
from trl_opsd.describe import Banner

STEPS = 4
_MIDDLE = 0.005
"""Seconds after the student has written, in which the servers have not yet read a batch."""


class Server:
    """A server of a teacher in a process of its own."""

    def __init__(self, path: str, log: Path, stack: ExitStack) -> None:
        port = serving.free_port()
        command = serving.pooling_command(path, port, "--dtype", "float32")
        self._process = stack.enter_context(serving.running(command, port, log, **serving.VLLM))
        self.url = f"http://127.0.0.1:{port}"

    def send(self, sign: signal.Signals) -> None:
        os.killpg(self._process.pid, sign)


class Faulty(FixedRollout):
    """Replays completions, and has something happen while those of the second step are read."""

    def __init__(self, recorded: Any, happens: Callable[[], None]) -> None:
        super().__init__(recorded)
        self._happens = happens

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        if step == 1:
            Timer(_MIDDLE, self._happens).start()
        return super().complete(prompt_ids, step)


def trained(folder: Path, path: str, url: str, happens: Callable[[], None]) -> list[torch.Tensor]:
    """The weights of the student after a few steps."""
    words = tiny.tokenizer()
    trainer = OPSDTrainer(
        model=tiny.qwen2(32),
        teacher_model=path,
        args=tiny.config(
            folder / "out",
            max_steps=STEPS,
            learning_rate=1e-3,
            teacher_server_url=url,
            teacher_server_timeout=10.0,
            ddp_timeout=40,
        ),
        train_dataset=tiny.rows(),
        processing_class=words,
        rollout=Faulty(tiny.recorded(words), happens),
    )
    for callback in (PrinterCallback, Banner):
        trainer.remove_callback(callback)
    trainer.train()
    return [one.detach().clone() for one in trainer.model.parameters()]


class Said(logging.Handler):
    """Keeps the warnings of the client."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    logger, said = logging.getLogger("trl_opsd.http.client"), Said()
    logger.addHandler(said)
    try:
        yield said.lines
    finally:
        logger.removeHandler(said)


def report(name: str, expected: list[torch.Tensor] | None, run: Callable[[], list[torch.Tensor]]) -> Any:
    """Prints a row of the table; returns the weights."""
    began, weights = time.monotonic(), None
    with heard() as said:
        try:
            weights = run()
            pairs = zip(weights, expected or weights, strict=True)
            result = f"{max(float((one - other).abs().max()) for one, other in pairs):.1e}"
        except OPSDError as error:
            result, said = "an error", [str(error)]
    words = " ".join(said).replace("\n", " ") or "-"
    print(f"| {name} | {time.monotonic() - began:.1f} | {result} | {words} |", flush=True)
    return weights


def main() -> None:
    print("| fault | seconds | weights differ by | what is said |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        path = serving.save_teacher(folder / "untied", seed=1)
        model = AutoModelForCausalLM.from_pretrained(path)

        def other(width: int, **given: Any) -> Any:
            return serving.spread_norms(tiny.qwen2(width, **given), by=0.7)

        good, stopped, killed = (Server(path, folder / f"log{number}", stack) for number in range(3))
        wrong = Server(serving.save_teacher(folder / "other", other, seed=1), folder / "log", stack)
        garbage = stack.enter_context(pretended(model, lambda *_: b"garbage", faulty_from=5))

        def run(server: Any, happens: Callable[[], None] = lambda: None) -> Callable[[], list[torch.Tensor]]:
            return lambda: trained(folder, path, server.url, happens)

        weights = report("none", None, run(good))
        report("another model from the start", weights, run(wrong))
        report("garbage", weights, run(garbage))
        report("stopped (SIGSTOP)", weights, run(stopped, happens=lambda: stopped.send(signal.SIGSTOP)))
        stopped.send(signal.SIGCONT)
        report("killed", weights, run(killed, happens=lambda: killed.send(signal.SIGKILL)))


if __name__ == "__main__":
    main()
