"""Real SGLang servers on loopback, in the environment that `tools/sglang_env.py` builds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import vllm_lab
from server_lab import CONTEXT
from support import serving, tiny

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    """A running server."""

    process: Popen[bytes]
    options: dict[str, Any]
    """Config options that point to it."""

    def stop(self) -> None:
        """Ends it with all of its processes, whatever they are doing."""
        serving.end(self.process, seconds=0)


@contextmanager
def running(folder: Path, shape: str = "qwen2", tied: bool = True, *further: str) -> Iterator[Server]:
    """A server of a random student; starting it takes about 17 seconds."""
    vllm_lab.student(folder / "student", shape, tied=tied, seed=5)
    tiny.tokenizer().save_pretrained(folder / "student")
    sglang_env = _tool()
    python, port = sglang_env.built(ROOT / ".sglang"), serving.free_port()
    flags = ("--port", port, "--dtype", "float32", "--context-length", CONTEXT, "--max-total-tokens", 8192)
    flags += ("--max-running-requests", 16, "--log-level", "warning", "--dist-timeout", 30, *further)
    command = sglang_env.command(python, str(folder / "student"), *map(str, flags))
    options = {"use_vllm": False, "sglang_server_url": f"http://127.0.0.1:{port}", "vllm_max_model_length": CONTEXT}
    with serving.running(command, port, folder / "log", **sglang_env.ENVIRONMENT) as process:
        server = Server(process, options)
        yield server
        server.stop()


def _tool() -> Any:
    """`tools/sglang_env.py`."""
    spec = importlib.util.spec_from_file_location("sglang_env", ROOT / "tools/sglang_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
