"""Real SGLang servers on loopback, in the environment that `tools/sglang_env.py` builds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import vllm_lab
from server_lab import CONTEXT
from support import serving, tiny


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
    flags = ("--context-length", CONTEXT, "--max-total-tokens", 8192, "--max-running-requests", 16, *further)
    with serving.sglang(str(folder / "student"), folder / "log", *map(str, flags)) as (url, process):
        options = {"use_vllm": False, "sglang_server_url": url, "vllm_max_model_length": CONTEXT}
        server = Server(process, options)
        yield server
        server.stop()
