"""Real SGLang servers on loopback, in the environment that `tools/sglang_env.py` builds, and trainers that use them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiny
import vllm_lab
from server_lab import CONTEXT, free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """Config options that point to it."""
        return {"use_vllm": False, "sglang_server_url": self.url, "vllm_max_model_length": CONTEXT}

    def stop(self) -> None:
        """Ends it with all of its processes, whatever they are doing."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(20)


@contextmanager
def running(folder: Path, shape: str = "qwen2", tied: bool = True) -> Iterator[Server]:
    """A server of a random student; starting it takes about 17 seconds."""
    vllm_lab.student(folder / "student", shape, tied=tied, seed=5)
    tiny.tokenizer().save_pretrained(folder / "student")
    sglang_env = _tool()
    python, port = sglang_env.built(ROOT / ".sglang"), free_port()
    flags = ("--port", port, "--dtype", "float32", "--context-length", CONTEXT, "--max-total-tokens", 8192)
    flags += ("--max-running-requests", 16, "--log-level", "warning", "--dist-timeout", 30)
    command = sglang_env.command(python, str(folder / "student"), *map(str, flags))
    env = {**os.environ, **sglang_env.ENVIRONMENT}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    server = Server(process, port, folder / "log")
    try:
        wait_for(process, port, folder / "log")
        yield server
    finally:
        server.stop()


def _tool() -> Any:
    """`tools/sglang_env.py`."""
    spec = importlib.util.spec_from_file_location("sglang_env", ROOT / "tools/sglang_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
